from collections.abc import Sequence

from engine.step_plan import SlicePlan, StepPlan
from prefill_worker.sealing import SealingObserver
from transport.orders import FirstToken

Seal = tuple[int, int, int, tuple[int, ...], int | None]


class Notebook:
    """Writes down what a shipper would be told."""

    def __init__(self) -> None:
        self.seals: list[Seal] = []
        self.noted: list[tuple[int, tuple[int, ...]]] = []
        self.finished: list[int] = []

    def seal(
        self,
        request_key: int,
        layer: int,
        first_block: int,
        block_ids: Sequence[int],
        tail_tokens: int | None,
    ) -> None:
        self.seals.append((request_key, layer, first_block, tuple(block_ids), tail_tokens))

    def note(self, layer: int, block_ids: Sequence[int]) -> None:
        self.noted.append((layer, tuple(block_ids)))

    def finish(self, request_key: int, first_tokens: Sequence[FirstToken] = ()) -> None:
        self.finished.append(request_key)


def run(observer: SealingObserver, *parts: SlicePlan, layers: int = 2) -> None:
    plan = StepPlan(0, parts)
    observer.begin(plan)
    for layer in range(layers):
        observer.layer_done(layer, plan)
    observer.end(plan)


def slice_of(key: int, start: int, count: int, table: tuple[int, ...]) -> SlicePlan:
    return SlicePlan(key, start, (0,) * count, table, False)


def test_full_blocks_are_sealed_layer_by_layer_and_the_tail_with_the_last_token() -> None:
    notes = Notebook()
    observer = SealingObserver(notes, notes.note, 2, 4, finishes_prompts=True)
    observer.watch(7, 10)
    run(observer, slice_of(7, 0, 6, (3, 5)))
    assert notes.seals == [(7, 0, 0, (3,), None), (7, 1, 0, (3,), None)]
    assert notes.finished == []
    run(observer, slice_of(7, 6, 4, (3, 5, 8)))
    assert notes.seals[2:] == [(7, 0, 1, (5, 8), 2), (7, 1, 1, (5, 8), 2)]
    assert notes.finished == [7]


def test_full_blocks_are_digested_by_the_slice_that_fills_them_and_a_tail_is_not() -> None:
    notes = Notebook()
    observer = SealingObserver(notes, notes.note, 2, 4, finishes_prompts=True)
    observer.watch(7, 10)
    run(observer, slice_of(7, 0, 6, (3, 5)), slice_of(8, 0, 4, (1,)))
    assert notes.noted == [(0, (3,)), (1, (3,))]
    run(observer, slice_of(7, 6, 2, (3, 5)))
    run(observer, slice_of(7, 8, 2, (3, 5, 8)))
    assert notes.noted[2:] == [(0, (5,)), (1, (5,))]
    observer.watch(9, 10)
    observer.begin(StepPlan(0, (slice_of(9, 8, 2, (3, 5, 2)),)))
    assert len(notes.noted) == 4, "what is cached has its digests from before"


def test_cached_blocks_are_sealed_in_every_layer_before_anything_is_computed() -> None:
    notes = Notebook()
    observer = SealingObserver(notes, notes.note, 3, 4, finishes_prompts=False)
    observer.watch(1, 12)
    observer.begin(StepPlan(0, (slice_of(1, 8, 2, (4, 2, 9)),)))
    assert notes.seals == [(1, layer, 0, (4, 2), None) for layer in range(3)]


def test_a_slice_that_fills_no_block_seals_nothing() -> None:
    notes = Notebook()
    observer = SealingObserver(notes, notes.note, 2, 16, finishes_prompts=True)
    observer.watch(1, 40)
    run(observer, slice_of(1, 0, 7, (0,)), slice_of(2, 0, 16, (1,)))
    assert notes.seals == []


def test_rank_0_does_not_finish_a_prompt_by_itself() -> None:
    notes = Notebook()
    observer = SealingObserver(notes, notes.note, 1, 4, finishes_prompts=False)
    observer.watch(1, 4)
    run(observer, slice_of(1, 0, 4, (6,)), layers=1)
    assert notes.seals == [(1, 0, 0, (6,), None)]
    assert notes.finished == []


def test_a_forgotten_prompt_is_sealed_no_further() -> None:
    notes = Notebook()
    observer = SealingObserver(notes, notes.note, 1, 4, finishes_prompts=True)
    observer.watch(1, 8)
    run(observer, slice_of(1, 0, 4, (6,)), layers=1)
    observer.forget(1)
    run(observer, slice_of(1, 4, 4, (6, 7)), layers=1)
    assert [seal[2] for seal in notes.seals] == [0]
    assert notes.finished == []
