"""The scripts that need a GPU, as far as they go without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_every_kernel_is_timed() -> None:
    small = run_all.Geometry("small", num_kv_heads=2, group=2, head_dim=16, num_blocks=600)
    speeds = run_all.moved_gb_s(small, "cpu", torch.float32)
    speeds |= run_all.layer_gb_s(small, "cpu", torch.float32)
    assert len(speeds) == 9 and all(speed > 0 for speed in speeds.values())
    assert run_all.decode_gb_s(small, "cpu", torch.float32, batch=2, context=40) > 0
    assert run_all.prefill_tflop_s(small, "cpu", torch.float32, tokens=40) > 0
    assert all(took > 0 for took in run_all.sampling_ms("cpu", num_draws=2, vocabulary=300))


def test_the_checks_of_steps_run_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.num_failed("cpu") == 0
    assert capsys.readouterr().out.count("\nok     ") == len(serving.CHECKS) - 1


def test_a_check_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> str:
        raise AssertionError(device)

    monkeypatch.setattr(serving, "CHECKS", (fails, fails))
    monkeypatch.setattr(serving, "wire_gb_s", lambda device: {})
    assert serving.num_failed("cpu") == 2
