"""A step in two halves, one of which computes while the ranks add up the other."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import host_decoder
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.comm import Comm, ThreadComm
from model.decoder import Decoder, Residual
from model.source import ModelSource, open_model
from tests.model.paged_run import PagedRun
from tests.model.test_comm import gloo_group, on_every_rank
from tests.model.tiny_checkpoints import save_tiny

TP = 2
TOKENS = random.Random(5).choices(range(101), k=40)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny("llama with every bias", folder)
    return open_model(str(folder))


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_decoder, "load", lambda: None)


def load(head_map: HeadMap, comm: Comm, source: ModelSource, overlap_rows: int) -> Decoder:
    whole = source.load(head_map, comm.rank, comm, block_size=8)
    assert isinstance(whole, Decoder)
    weights = whole._weights
    return Decoder(whole.config, head_map, comm, weights, whole.spec, overlap_rows)


def head_map(source: ModelSource) -> HeadMap:
    config = source.config
    return HeadMap.even(config.num_query_heads, config.num_kv_heads, TP)


@pytest.mark.parametrize("overlap_rows", [1, 8, 40])
def test_halves_give_the_logits_of_the_whole(source: ModelSource, overlap_rows: int) -> None:
    runs = [
        PagedRun(partial(load, source=source, overlap_rows=rows), head_map(source))
        for rows in (0, overlap_rows)
    ]
    whole, halves = (run.prefill("a", TOKENS, chunk=40) for run in runs)
    torch.testing.assert_close(halves, whole, atol=1e-5, rtol=0)
    whole, halves = (run.step({"a": [7], "b": TOKENS[:13], "c": [1, 2]}) for run in runs)
    torch.testing.assert_close(halves, whole, atol=1e-5, rtol=0)
    assert torch.equal(halves.argmax(-1), whole.argmax(-1))


def test_halves_over_gloo_give_the_logits_of_the_whole(source: ModelSource) -> None:
    """Its sums do go on while the rank computes: one that was read too early would show."""
    run = PagedRun(partial(load, source=source, overlap_rows=0), head_map(source))
    want = run.step({"a": TOKENS}, range(len(TOKENS)))
    batch = PagedRun(partial(load, source=source, overlap_rows=0), head_map(source))._batch(
        {"a": TOKENS}, range(len(TOKENS))
    )

    def forward(comm: Comm) -> Tensor | None:
        model = load(head_map(source), comm, source, overlap_rows=2)
        store = KvStore(model.spec, head_map(source).kv[comm.rank], 64)
        return model.forward(batch, store, lambda layer: None)

    logits, nothing = on_every_rank([partial(forward, comm) for comm in gloo_group(TP)])
    assert nothing is None and isinstance(logits, Tensor)
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)


class Told:
    """A comm that writes down when sums begin and when they are waited for."""

    rank, size, queued = 0, 2, True

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        number = sum(line.startswith("begin") for line in self.log)
        self.log.append(f"begin {number}")

        def summed() -> Tensor:
            self.log.append(f"wait {number}")
            return tensor * 2

        return summed


def test_a_sum_is_waited_for_when_its_half_is_read_and_not_before() -> None:
    comm, halves = Told(), [slice(0, 1), slice(1, 4)]
    rows = Residual(torch.zeros(4, 2), comm, halves)  # type: ignore[arg-type]
    for part in halves:
        rows.add(part, torch.ones(4, 2)[part], torch.full((2,), 0.5))
    assert comm.log == ["begin 0", "begin 1"]
    for part in halves:  # as the feed-forward does: half 1 still adds up while half 0 computes
        rows.add(part, rows.at(part) * 3, None)
    assert comm.log[2:] == ["wait 0", "begin 2", "wait 1", "begin 3"]
    assert rows.all().tolist() == [[17.5, 17.5]] * 4
    assert comm.log[6:] == ["wait 2", "wait 3"]


def test_one_rank_or_few_rows_are_not_cut(source: ModelSource) -> None:
    first = load(head_map(source), ThreadComm.group(TP)[0], source, overlap_rows=8)
    assert first._parts(7) == [slice(0, 7)]
    assert first._parts(9) == [slice(0, 4), slice(4, 9)]
