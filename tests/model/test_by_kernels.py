"""The decoder as a GPU computes it: every kernel of it run by Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import host_decoder
from model.decode_graphs import Compute
from tests.model import by_kernels
from tests.model.tiny_checkpoints import save_tiny

Logits = dict[tuple[str, bool], Tensor]
CASES = ["llama with every bias", "qwen3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = [str(tmp_path_factory.mktemp("tiny") / "model") for _ in CASES]
    for case, folder in zip(CASES, folders, strict=True):
        save_tiny(case, Path(folder))
    return folders


@pytest.fixture(scope="module")
def by_interpreter(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Logits:
    out = tmp_path_factory.mktemp("out") / "logits.pt"
    subprocess.run(
        [sys.executable, by_kernels.__file__, str(out), *folders],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
    logits: Logits = torch.load(out, weights_only=True)
    return logits


def test_the_kernels_give_the_logits_of_their_references(
    folders: list[str], by_interpreter: Logits
) -> None:
    for folder in folders:
        want = by_kernels.logits_of_a_run(folder)
        torch.testing.assert_close(by_interpreter[folder, False], want, atol=1e-4, rtol=0)


def test_recorded_decode_steps_give_the_logits_of_the_decoder_itself(
    folders: list[str], by_interpreter: Logits
) -> None:
    recorded, plain = by_interpreter[folders[0], True], by_interpreter[folders[0], False]
    torch.testing.assert_close(recorded, plain, atol=1e-5, rtol=0)


class NoDevice:
    """Records nothing, and remembers that it was asked to."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, compute: Compute) -> tuple[Tensor, Callable[[], None]]:
        self.num_asked += 1
        raise RuntimeError("no CUDA device")


def test_where_nothing_can_be_recorded_steps_are_computed_one_by_one(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_decoder, "load", lambda: None)  # graphs are of the decoder in torch
    want = by_kernels.logits_of_a_run(folders[0])
    no_device = NoDevice()
    monkeypatch.setattr(by_kernels, "computed_again", no_device)
    assert torch.equal(by_kernels.logits_of_a_run(folders[0], recorded=True), want)
    assert no_device.num_asked == 1
