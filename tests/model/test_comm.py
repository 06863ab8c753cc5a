import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from model.comm import FIRST_FRAME, Comm, GroupComm, SingleComm, ThreadComm


def gloo_group(size: int) -> list[Comm]:
    store = HashStore()
    comms: list[Comm | None] = [None] * size

    def join(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        comms[rank] = GroupComm(cast(dist.ProcessGroup, gloo))

    on_every_rank([partial(join, rank) for rank in range(size)])
    return [comm for comm in comms if comm is not None]


def on_every_rank(calls: list[Callable[[], object]]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(rank: int) -> None:
        results[rank] = calls[rank]()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


GROUPS: list[tuple[str, Callable[[], list[Comm]]]] = [
    ("single", lambda: [SingleComm()]),
    ("threads of 3", lambda: list(ThreadComm.group(3))),
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
    widths = [2, 0, 5][: len(group)]

    def work(comm: Comm) -> list[list[list[int]]] | None:
        part = torch.full((2, widths[comm.rank]), comm.rank)
        gathered = comm.gather_to_0(part, widths)
        return None if gathered is None else [part.tolist() for part in gathered]

    results = on_every_rank([partial(work, comm) for comm in group])
    assert results[0] == [[[rank] * widths[rank]] * 2 for rank in range(len(group))]
    assert results[1:] == [None] * (len(group) - 1)


@pytest.mark.parametrize("length", [0, 1, FIRST_FRAME, FIRST_FRAME + 1, 5000])
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
