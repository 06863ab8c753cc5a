"""The decoder as a GPU computes it: every kernel of it run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import host_decoder
from model.decode_graphs import Compute, Replay
from tests.model import by_kernels
from tests.model.tiny_checkpoints import save_tiny

Logits = dict[tuple[str, bool], Tensor]
CASES = ["llama with every bias", "qwen3", "qwen2 past the window of one layer"]


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


class NoDevice(by_kernels.ComputedAgain):
    """Of the ranks that ask, the last can record nothing."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.num_asked = 0

    def record(self, compute: Compute) -> tuple[Tensor, Replay]:
        recorded = super().record(compute)  # a capture keeps no rank waiting, this stand-in would
        self.num_asked += 1
        if self.num_asked == self._num_ranks:
            raise RuntimeError("no CUDA device")
        return recorded


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are of the decoder in torch."""
    monkeypatch.setattr(host_decoder, "load", lambda: None)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("tp", [1, 3])
def test_where_one_rank_cannot_record_all_compute_steps_one_by_one(
    folders: list[str], tp: int
) -> None:
    want = by_kernels.logits_of_a_run(folders[0], tp=tp)
    no_device = NoDevice(tp)
    assert torch.equal(by_kernels.logits_of_a_run(folders[0], no_device, tp), want)
    assert no_device.num_asked == tp


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_record_their_sums_and_replay_them_together(folders: list[str], tp: int) -> None:
    want = by_kernels.logits_of_a_run(folders[0], tp=tp)
    recorded = by_kernels.logits_of_a_run(folders[0], by_kernels.ComputedAgain(), tp)
    torch.testing.assert_close(recorded, want, atol=1e-5, rtol=0)
