"""The decoder as a GPU computes it: every kernel of it run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.model import by_kernels
from tests.model.tiny_checkpoints import save_tiny

CASES = ["llama with every bias", "qwen3"]


def test_the_kernels_give_the_logits_of_their_references(tmp_path: Path) -> None:
    folders = [str(tmp_path / str(number)) for number in range(len(CASES))]
    for case, folder in zip(CASES, folders, strict=True):
        save_tiny(case, Path(folder))
    out = tmp_path / "logits.pt"
    subprocess.run(
        [sys.executable, by_kernels.__file__, str(out), *folders],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )
    by_interpreter = torch.load(out)
    for folder in folders:
        want = by_kernels.logits_of_a_run(folder)
        torch.testing.assert_close(by_interpreter[folder], want, atol=1e-4, rtol=0)
