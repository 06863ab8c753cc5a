"""Ranks share the cores they may use, and each has one at least."""

import os
from pathlib import Path

import pytest

from worker.cores import share, usable_cores


@pytest.mark.parametrize(
    ("num_ranks", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)]
)
def test_ranks_share_the_cores_and_have_one_each_at_least(
    num_ranks: int, cores: int, threads: int
) -> None:
    assert share(num_ranks, cores) == threads


def test_a_containers_quota_bounds_the_cores_and_part_of_one_counts_as_one(tmp_path: Path) -> None:
    quota, own = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == own
    quota.write_text(f"{own * 200_000} 100000\n")
    assert usable_cores(quota) == own
    assert usable_cores(tmp_path / "none") == own
