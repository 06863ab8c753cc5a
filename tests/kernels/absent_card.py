"""A CUDA card that is not there: what is launched on it is compiled for it, and never run.

Tensors are torch's fake ones, which have a device, a shape, a type and no contents. So it is the
launching code itself that says what is compiled, with the constants, the alignments and the numbers
of warps that a card would get; and what mixes devices, or reads a value, fails as it would there
or worse.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from tests.kernels.waits import WAITING

aten = torch.ops.aten
SHARED_BYTES = {
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
}  # a program may use at most, by compute capability


@dataclass(frozen=True, slots=True)
class Built:
    name: str
    ptx: str
    shared_bytes: int
    machine_code: bytes

    def stack_bytes(self) -> int:
        """Of each thread, for what registers do not hold; by NVIDIA's cuobjdump."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.machine_code)
            file.flush()
            asked = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        found = re.search(r"STACK:(\d+)", said)
        assert found, said
        return int(found[1])


class AbsentCard:
    """Stands in for Triton's driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.built: list[Built] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what Triton keeps of a device is of this one

    def get_current_stream(self, device: int) -> int:
        return 0


class _Pointer(MockTensor):  # type: ignore[misc]
    """As well aligned as the tensor would be whose memory is as well aligned as any allocation."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype)
        self._offset_bytes = int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        return self._offset_bytes


class NothingWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where the host would wait for the card: for a value, for a shape made of values, for a
    copy to or from memory that is not pinned. To be entered on an absent card.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pinned: list[Tensor] = []
        pinned = self._pinned

        def pin(tensor: Tensor) -> Tensor:
            pinned.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            return pinned[-1]

        self._patch = mock.patch.object(Tensor, "pin_memory", pin)

    def __enter__(self) -> Self:
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        assert func.overloadpacket not in WAITING, f"a step waits for {func}"
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and args and isinstance(args[0], Tensor):
            source = args[1] if func.overloadpacket is aten.copy_ else args[0]
            if source.is_cuda != out.is_cuda:
                assert out.is_cuda, f"{func} reads what the card has made"
                pinned = any(source is each for each in self._pinned)
                assert pinned and kwargs.get("non_blocking"), f"{func} waits for a copy"
        return out


class _Indexed(TorchFunctionMode):
    """`tensor[...]` and `copy_` by operators alone: torch built for CPUs has no guard for cards."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is Tensor.__getitem__:
            return _part(*args)
        if func is Tensor.__setitem__:
            tensor, where, value = args
            if not isinstance(value, Tensor):  # made there, as torch does
                value = torch.full((), value, device=tensor.device)
            if isinstance(where, Tensor):
                return aten.index_put_(tensor, [where], value)
            return aten.copy_(_part(tensor, where), value)
        if func is Tensor.copy_:
            return aten.copy_(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _part(tensor: Tensor, where: Any) -> Tensor:
    dim = 0
    for index in where if isinstance(where, tuple) else (where,):
        if isinstance(index, int):
            tensor = aten.select(tensor, dim, index)
            continue
        if index is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(index, slice):
            tensor = aten.slice(tensor, dim, index.start, index.stop)
        else:
            assert isinstance(index, Tensor), f"{index!r} is sent to the card, which is waited for"
            tensor = aten.index(tensor, [None] * dim + [index])
        dim += 1
    return tensor


@contextmanager
def absent_card(capability: int, *, compiles: bool = True) -> Iterator[AbsentCard]:
    """Within it tensors are fake, "cuda" is this card, and kernels are compiled when launched; or
    only said to have been, without a program.
    """
    card = AbsentCard(capability)
    compile_or_find = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(size > 0 for size in grid), f"{self.__name__} over {grid}"
        if not compiles:
            card.built.append(Built(self.__name__, "", 0, b""))
            return
        pointers = [_Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
        built = compile_or_find(self, *pointers, grid=grid, warmup=True, **kwargs)
        asm, shared_bytes = built.asm, built.metadata.shared
        card.built.append(Built(self.__name__, asm["ptx"], shared_bytes, asm["cubin"]))

    config = triton.runtime.driver
    before = config._active
    config.set_active(card)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with mock.patch.object(JITFunction, "run", run), fake, _Indexed():
            yield card
    finally:
        config._active = before
