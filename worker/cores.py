"""How many threads a rank computes with where its settings leave that open."""

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds, and of how many


def usable_cores(quota: Path = QUOTA) -> int:
    """Cores that this process may use at once: its affinity, and no more than its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        most, period, *_ = quota.read_text().split()
    except (OSError, ValueError):
        return cores or 1
    if most == "max":
        return cores or 1
    return min(cores or 1, max(1, math.ceil(int(most) / int(period))))


def share(num_ranks: int, cores: int) -> int:
    """Threads for each of the ranks that compute on so many cores at the same time."""
    return max(1, cores // num_ranks)
