"""The kernels themselves, run by Triton's interpreter in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("against_reference.py")
NUM_CASES = {
    "copy_blocks": 16,
    "gather_blocks": 16,
    "paged_attention": 45,
    "quantise_kv": 30,
    "rms_norm": 19,
    "rotate_write": 13,
    "sample_tokens": 4,
    "scatter_blocks": 16,
    "silu_multiply": 16,
    "write_kv": 8,
}


@pytest.fixture(scope="module")
def report() -> str:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "cpu"], env=env, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("kernel", NUM_CASES)
def test_a_kernel_equals_its_reference_on_every_shape_and_type(report: str, kernel: str) -> None:
    lines = [line for line in report.splitlines() if line[7:].startswith(f"{kernel} ")]
    passed = [line for line in lines if line.startswith("ok")]
    assert len(passed) == NUM_CASES[kernel], report
    assert "FAILED" not in report, report


def test_every_kernel_is_in_the_report() -> None:
    folder = SCRIPT.parents[2] / "kernels"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "launch"}
    in_c = {path.stem for path in folder.glob("*.c")} | {
        "compiled",
        "host_cells",
        "host_decoder",
        "huge_pages",
    }
    files -= in_c  # for the CPU, with tests of their own
    assert files == set(NUM_CASES)
