"""The scripts that need a GPU, as far as they go without one."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu import SMALL
from tests.gpu import run_all, serving

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_benchmark_of_steps_runs_whole_on_a_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("bench/gpu.py", "--tiny", "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == [
        "decode, 1 x 40 tokens",
        "decode, 3 x 40 tokens",
        "prefill, 32 tokens",
    ]
    assert all(row["ours"] > 0 and row["peer_value"] > 0 and row["limit"] > 0 for row in rows)


def test_every_kernel_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    small = run_all.Geometry("small", num_kv_heads=2, group=2, head_dim=16, num_blocks=600)
    run_all.report("cpu", run_all.Extent([small], [(2, 40)], 40, 300, SMALL, torch.float32))
    lines = capsys.readouterr().out.splitlines()
    moving = [line.split()[0] for line in lines if line.endswith("of the copy")]
    kernels = "gather_blocks scatter_blocks copy_blocks write_kv rms_norm silu_multiply"
    assert moving == [*kernels.split(), "rotate_write", "quantise_kv,", "quantise_kv,", "decode,"]
    assert [line.split()[0] for line in lines if line.endswith("of the product")] == ["prefill,"]
    assert lines[-1].startswith("sample_tokens, 32 draws of 300: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", [run_all.main, partial(gpu.main, [])])
def test_without_a_card_a_sentence_says_that_nothing_was_done(
    script: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert script() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("torch sees no CUDA device: nothing was ")


def test_checks_that_fail_or_do_not_end_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    well, ill = "print('ok')", "print('FAILED'); raise SystemExit(1)"
    commands = [[sys.executable, "-c", code] for code in (well, ill)]
    assert run_all.num_wrong(commands, timeout_s=300) == 1
    assert capsys.readouterr().out == "ok\nFAILED\n"
    waits = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert run_all.num_wrong([waits], timeout_s=0.1) == 1
    assert capsys.readouterr().out == "NOT DONE after 0.1 s\n"


def test_the_checks_of_steps_run_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.num_failed("cpu") == 0
    assert capsys.readouterr().out.count("\nok     ") == len(serving.CHECKS) - 1


def test_a_check_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> str:
        raise AssertionError(device)

    monkeypatch.setattr(serving, "CHECKS", (fails, fails))
    monkeypatch.setattr(serving, "wire_gb_s", lambda device: {})
    assert serving.num_failed("cpu") == 2
