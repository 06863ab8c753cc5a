import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from kernels import host_exchange
from model.comm import FIRST_FRAME, Comm, GroupComm, SingleComm, ThreadComm
from model.host_comm import SLOT_BYTES, GroupBroken, HostComm


def gloo_group(size: int) -> list[Comm]:
    store = HashStore()
    comms: list[Comm | None] = [None] * size

    def join(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        comms[rank] = GroupComm(cast(dist.ProcessGroup, gloo))

    on_every_rank([partial(join, rank) for rank in range(size)])
    return [comm for comm in comms if comm is not None]


def host_group(size: int, timeout_s: float = 30.0) -> list[HostComm]:
    exchange = host_exchange.load()
    assert exchange is not None, "needs Linux and a C compiler"
    memory, descriptor = HostComm.make_memory(size)
    try:
        others = [HostComm.map_memory(os.getpid(), descriptor, size) for _ in range(1, size)]
    finally:
        os.close(descriptor)
    maps = enumerate([memory, *others])
    return [HostComm(exchange, each, rank, size, timeout_s) for rank, each in maps]


def on_every_rank(calls: Sequence[Callable[[], object]]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(rank: int) -> None:
        results[rank] = calls[rank]()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


LONG = SLOT_BYTES // 8  # int64 in a slot of memory
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]

GROUPS: list[tuple[str, Callable[[], list[Comm]]]] = [
    ("single", lambda: [SingleComm()]),
    ("threads of 3", lambda: list(ThreadComm.group(3))),
    ("memory of 2", lambda: list(host_group(2))),
    ("memory of 3", lambda: list(host_group(3))),
    ("memory of 5", lambda: list(host_group(5))),
    ("gloo of 2", lambda: gloo_group(2)),
    ("gloo of 3", lambda: gloo_group(3)),
]


@pytest.fixture(params=[make for _, make in GROUPS], ids=[name for name, _ in GROUPS])
def group(request: pytest.FixtureRequest) -> list[Comm]:
    make: Callable[[], list[Comm]] = request.param
    return make()


def test_a_sum_reaches_every_rank(group: list[Comm]) -> None:
    def work(comm: Comm) -> object:
        first = comm.all_reduce(torch.full((1, 2), float(comm.rank + 1)))
        return comm.all_reduce(first * 2).tolist()

    total = sum(range(1, len(group) + 1))
    results = on_every_rank([partial(work, comm) for comm in group])
    assert results == [[[2.0 * total * len(group)] * 2]] * len(group)


def test_a_gather_brings_uneven_parts_to_rank_0_in_rank_order(group: list[Comm]) -> None:
    widths = [2, 0, 5, 1, 3][: len(group)]

    def work(comm: Comm) -> list[list[list[int]]] | None:
        part = torch.full((2, widths[comm.rank]), comm.rank)
        gathered = comm.gather_to_0(part, widths)
        return None if gathered is None else [part.tolist() for part in gathered]

    results = on_every_rank([partial(work, comm) for comm in group])
    assert results[0] == [[[rank] * widths[rank]] * 2 for rank in range(len(group))]
    assert results[1:] == [None] * (len(group) - 1)


@pytest.mark.parametrize(
    "length", [0, 1, FIRST_FRAME, FIRST_FRAME + 1, 5000, LONG - 1, LONG, 2 * LONG + 3]
)
def test_a_plan_of_any_length_reaches_every_rank(group: list[Comm], length: int) -> None:
    plan = np.arange(length, dtype=np.int64) - 7

    def work(comm: Comm) -> object:
        shared = comm.broadcast_ints(plan if comm.rank == 0 else None)
        assert shared.dtype == np.int64
        return shared.tolist()

    results = on_every_rank([partial(work, comm) for comm in group])
    assert results == [list(range(-7, length - 7))] * len(group)


def test_a_rank_that_fails_frees_the_ones_that_wait() -> None:
    first, second = ThreadComm.group(2)

    def wait() -> str:
        try:
            first.all_reduce(torch.ones(1))
        except threading.BrokenBarrierError:
            return "freed"
        return "summed"

    assert on_every_rank([wait, second.abort]) == ["freed", None]


def test_a_rank_that_stays_away_breaks_the_group_at_the_deadline() -> None:
    first, _ = ThreadComm.group(2, timeout_s=0.01)
    with pytest.raises(threading.BrokenBarrierError):
        first.all_reduce(torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 8 * 576, SLOT_BYTES // 2 + 5])
def test_memory_sums_like_the_numbers_in_rank_order(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    for size in (2, 3):
        parts = [(torch.randn(count) * 50).to(dtype) for _ in range(size)]
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total = total + part
        comms = host_group(size)
        calls = [
            partial(comm.all_reduce, part.clone()) for comm, part in zip(comms, parts, strict=True)
        ]
        for result in on_every_rank(calls):
            assert torch.equal(cast(torch.Tensor, result), total)


def test_memory_sums_a_tensor_that_is_not_dense_in_place() -> None:
    wholes = [torch.full((4, 6), float(rank)) for rank in (1, 2)]
    views = [whole[:, ::2] for whole in wholes]
    on_every_rank([partial(c.all_reduce, v) for c, v in zip(host_group(2), views, strict=True)])
    assert wholes[0].tolist() == [[3.0, 1.0] * 3] * 4
    assert wholes[1].tolist() == [[3.0, 2.0] * 3] * 4


def test_memory_keeps_thousands_of_mixed_rounds_apart() -> None:
    """Sums, gathers and plans of changing sizes: a slot taken a round too early would show."""

    def work(comm: HostComm) -> int:
        total = 0
        for number in range(1500):
            size = 1 + number * 37 % 900
            if number % 3 == 0:
                mine = torch.arange(size) + comm.rank * 1000 + number
                summed = comm.all_reduce(mine)
                want = 3 * torch.arange(size) + 3000 + 3 * number
                total += int(torch.equal(summed, want))
            elif number % 3 == 1:
                widths = [size, 1, 2]
                part = torch.full((2, widths[comm.rank]), number * 10 + comm.rank)
                parts = comm.gather_to_0(part, widths)
                good = [bool((p == number * 10 + r).all()) for r, p in enumerate(parts or [])]
                total += all(good)
            else:
                plan = np.arange(size, dtype=np.int64) * number
                shared = comm.broadcast_ints(plan if comm.rank == 0 else None)
                total += int(np.array_equal(shared, plan))
        return total

    assert on_every_rank([partial(work, comm) for comm in host_group(3)]) == [1500] * 3


def test_memory_that_is_broken_up_frees_who_waits_and_refuses_who_comes() -> None:
    first, second, third = host_group(3)

    def wait(comm: HostComm) -> str:
        with pytest.raises(GroupBroken, match="the group is broken"):
            comm.all_reduce(torch.ones(4))
        return "freed"

    assert on_every_rank([partial(wait, first), partial(wait, second), third.abort])[:2] == [
        "freed",
        "freed",
    ]
    assert wait(third) == "freed"


def test_memory_does_not_wait_for_ever_for_a_rank_that_stays_away() -> None:
    first, _ = host_group(2, timeout_s=0.01)
    with pytest.raises(GroupBroken, match=r"rank 0, round 1: another rank stayed away for 0.01 s"):
        first.all_reduce(torch.ones(1))


def test_a_rank_waits_for_a_plan_beyond_the_deadline() -> None:
    first, second = host_group(2, timeout_s=0.01)
    later = threading.Timer(1.2, first.broadcast_ints, [np.array([5], dtype=np.int64)])
    later.start()
    assert second.broadcast_ints(None).tolist() == [5]
    later.join()
