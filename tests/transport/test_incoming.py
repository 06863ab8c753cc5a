from dataclasses import replace

import pytest

from kvcache.spec import CacheSpec
from protos.transfer_pb2 import CellRun, Chunk, Open
from protos.worker_pb2 import GeneratedToken
from transport.cell_runs import Cell
from transport.incoming import Incoming, Remedy, Verdict
from transport.orders import Code, TransferFailed
from transport.shipment import Shape

SPEC = CacheSpec.full(num_layers=2, num_kv_heads=3, head_dim=2, block_size=4, dtype="float32")
HEADS = {0: (0, 1), 1: (2,)}


def make_incoming(num_tokens: int = 10, first_block: int = 0, opened: bool = True) -> Incoming:
    incoming = Incoming(Shape.of(SPEC, num_tokens), num_tokens, first_block, HEADS, max_resends=2)
    for rank in HEADS if opened else ():
        assert incoming.open(rank, open_for(rank, num_tokens))
    return incoming


def open_for(rank: int, num_tokens: int = 10) -> Open:
    return Open(num_tokens=num_tokens, num_layers=2, heads=HEADS[rank])


def chunk(seq: int, layer: int, first_block: int, num_blocks: int, num_layers: int = 0) -> Chunk:
    return Chunk(
        seq=seq,
        layer=layer,
        num_layers=num_layers,
        first_block=first_block,
        num_blocks=num_blocks,
        payload_bytes=100,
    )


def state_of(incoming: Incoming) -> str:
    return incoming.state.value


def take(incoming: Incoming, rank: int, *chunks: Chunk) -> None:
    for each in chunks:
        assert incoming.offer(rank, each) is Verdict.TAKE
        incoming.landed(rank, each)
        incoming.check()


def fill(incoming: Incoming) -> None:
    for rank in HEADS:
        take(incoming, rank, chunk(0, 0, 0, 3), chunk(1, 1, 0, 3))


def test_a_transfer_is_whole_when_every_cell_is_in_and_every_rank_has_said_so() -> None:
    incoming = make_incoming()
    fill(incoming)
    assert incoming.seal(0, 2, (GeneratedToken(token_id=7),)) == []
    assert state_of(incoming) == "receiving"
    assert incoming.seal(1, 2) == []
    assert state_of(incoming) == "whole"
    assert [token.token_id for token in incoming.first_tokens] == [7]
    assert incoming.num_chunks == 4
    assert incoming.bytes_landed == 400
    incoming.commit()
    assert state_of(incoming) == "committed"


def test_chunks_may_come_in_any_order_and_after_the_seal() -> None:
    incoming = make_incoming()
    busy = chunk(1, 1, 0, 3)
    assert incoming.offer(0, busy) is Verdict.TAKE
    assert incoming.seal(0, 2) == [0]  # 1 is being verified
    assert incoming.seal(0, 2) == []  # and 0 is asked for
    assert incoming.seal(1, 1) == [0]
    take(incoming, 0, chunk(0, 0, 0, 3))
    incoming.landed(0, busy)
    assert state_of(incoming) == "repairing"


def test_a_chunk_that_comes_twice_is_written_once() -> None:
    incoming = make_incoming()
    first = chunk(0, 0, 0, 2)
    assert incoming.offer(0, first) is Verdict.TAKE
    assert incoming.offer(0, first) is Verdict.BUSY
    incoming.landed(0, first)
    assert incoming.offer(0, first) is Verdict.KNOWN


@pytest.mark.parametrize(
    "bad",
    [
        chunk(5, 2, 0, 1),
        chunk(5, 0, 2, 2),
        chunk(5, 0, 3, 1),
        chunk(5, 0, 1, 0),
        chunk(5, 0, 1, 1),
        chunk(5, 0, 0, 1, 3),
        chunk(5, 1, 0, 1, 2**32 - 1),
        chunk(5, 0, 1, 1, 2),
    ],
    ids=["layer", "past the end", "after the end", "empty", "taken", "layers", "endless", "half"],
)
def test_cells_that_are_not_to_come_are_not_taken(bad: Chunk) -> None:
    incoming = make_incoming()
    take(incoming, 0, chunk(0, 0, 1, 1))
    assert incoming.offer(0, bad) is Verdict.BAD
    incoming.check()


def test_a_chunk_of_several_layers_has_the_same_blocks_of_each() -> None:
    incoming = make_incoming()
    both = chunk(0, 0, 0, 3, 2)
    assert incoming.offer(0, both) is Verdict.TAKE
    assert incoming.offer(0, chunk(1, 1, 2, 1)) is Verdict.BAD
    incoming.dropped(0, both)
    assert incoming.offer(0, both) is Verdict.TAKE
    incoming.landed(0, both, {Cell(1, 2, 0): "the digest does not match"})
    incoming.check()
    assert len(incoming.repairs) == 1
    assert incoming.num_whole_blocks == 0
    take(incoming, 1, chunk(0, 0, 0, 3, 2))
    assert incoming.num_whole_blocks == 2


def test_layers_that_are_not_alike_are_not_taken_as_one_chunk() -> None:
    incoming = make_incoming()
    layer, _ = incoming.shape.layers
    incoming.shape = replace(incoming.shape, layers=(layer, replace(layer, cell_bytes=7)))
    assert incoming.offer(0, chunk(0, 0, 0, 3, 2)) is Verdict.BAD
    assert incoming.offer(0, chunk(0, 0, 0, 3, 1)) is Verdict.TAKE


def test_resident_blocks_are_not_taken() -> None:
    incoming = make_incoming(first_block=2)
    assert incoming.offer(0, chunk(0, 0, 1, 2)) is Verdict.BAD
    take(incoming, 0, chunk(0, 0, 2, 1))


def test_the_good_cells_of_a_damaged_chunk_stay_and_the_bad_ones_are_wanted() -> None:
    incoming = make_incoming()
    bad = Cell(0, 1, 1)
    assert incoming.offer(0, chunk(0, 0, 0, 3)) is Verdict.TAKE
    incoming.landed(0, chunk(0, 0, 0, 3), {bad: "layer 0, block 1, head 1: flipped"})
    incoming.check()
    assert state_of(incoming) == "repairing"
    assert [cell for cell, _ in incoming.repairs.due(0.0)] == [bad]
    take(incoming, 0, chunk(1, 1, 0, 3))
    take(incoming, 1, chunk(0, 0, 0, 3), chunk(1, 1, 0, 3))
    incoming.seal(0, 2)
    incoming.seal(1, 2)
    assert state_of(incoming) == "repairing"
    assert incoming.num_whole_blocks == 1
    again = CellRun(layer=0, first_block=1, num_blocks=1, heads=[1])
    assert incoming.offer_again(0, again) == [bad]
    assert incoming.offer_again(0, again) == []  # it is being verified
    incoming.landed_again(0, [bad], {bad: "flipped again"}, 100)
    assert incoming.offer_again(0, again) == [bad]
    incoming.landed_again(0, [bad], {}, 100)
    incoming.check()
    assert incoming.offer_again(0, again) == []
    assert state_of(incoming) == "whole"


@pytest.mark.parametrize(
    "run",
    [
        CellRun(layer=0, first_block=1, num_blocks=2, heads=[1]),
        CellRun(layer=0, first_block=1, num_blocks=1, heads=[0, 1]),
        CellRun(layer=0, first_block=1, num_blocks=1, heads=[2]),
        CellRun(layer=0, first_block=1, num_blocks=1, heads=[1, 1]),
        CellRun(layer=0, first_block=0, num_blocks=0, heads=[1]),
        CellRun(layer=7, first_block=2**32 - 1, num_blocks=2**32 - 1, heads=[1]),
    ],
    ids=["more blocks", "more heads", "another's head", "a head twice", "nothing", "nonsense"],
)
def test_cells_that_nobody_asked_for_are_not_taken_again(run: CellRun) -> None:
    incoming = make_incoming()
    incoming.offer(0, chunk(0, 0, 0, 3))
    incoming.landed(0, chunk(0, 0, 0, 3), {Cell(0, 1, 1): "flipped"})
    assert incoming.offer_again(0, run) == []


def test_a_chunk_whose_header_is_damaged_is_asked_for_and_then_its_cells_are() -> None:
    incoming = make_incoming()
    take(incoming, 1, chunk(0, 0, 0, 3), chunk(1, 1, 0, 3))
    take(incoming, 0, chunk(1, 1, 0, 3))
    answers = [incoming.damaged(0, chunk(0, 0, 0, 3), "bad header") for _ in range(3)]
    assert answers == [Remedy.ASK, Remedy.ASK, Remedy.LET_GO]
    assert incoming.damaged(0, chunk(2**31, 0, 0, 3), "bad header") is Remedy.NONE
    incoming.seal(0, 2)
    incoming.seal(1, 2)
    incoming.check()
    assert state_of(incoming) == "repairing"
    missing = [cell for cell, _ in incoming.repairs.due(0.0)]
    assert missing == [Cell(0, block, head) for block in range(3) for head in (0, 1)]
    cells = incoming.offer_again(0, CellRun(layer=0, first_block=0, num_blocks=3, heads=[0, 1]))
    incoming.landed_again(0, cells, {}, 100)
    assert state_of(incoming) == "whole"


def test_a_seal_that_leaves_cells_out_is_a_loss_of_data_that_names_the_first() -> None:
    incoming = make_incoming()
    take(incoming, 0, chunk(0, 0, 0, 3), chunk(1, 1, 0, 2))
    take(incoming, 1, chunk(0, 0, 0, 3), chunk(1, 1, 0, 3))
    incoming.seal(0, 2)
    incoming.seal(1, 2)
    assert str(incoming.failure) == (
        "DATA_LOSS: everything arrived, but layer 1, block 2, head 0 was in no chunk"
    )


@pytest.mark.parametrize("num_chunks", [1, 7])  # two layers of three blocks make six at most
def test_a_seal_that_contradicts_the_chunks_is_a_loss_of_data(num_chunks: int) -> None:
    incoming = make_incoming()
    fill(incoming)
    assert incoming.seal(0, num_chunks) == []
    assert incoming.failure is not None
    assert incoming.failure.code is Code.DATA_LOSS


def test_everything_resident_means_nothing_to_wait_for_but_the_seals() -> None:
    incoming = make_incoming(num_tokens=8, first_block=2)
    incoming.seal(0, 0)
    assert state_of(incoming) == "open"
    incoming.seal(1, 0)
    assert state_of(incoming) == "whole"


def test_a_lost_link_fails_what_has_not_come_and_says_where_it_stopped() -> None:
    incoming = make_incoming()
    take(incoming, 1, chunk(0, 0, 0, 3), chunk(1, 1, 0, 1))
    incoming.lose(1, "the link to prefill-0 is lost")
    assert str(incoming.failure) == (
        "UNAVAILABLE: the link to prefill-0 is lost, before layer 1, block 1, head 2"
    )


def test_a_link_lost_after_everything_has_come_does_no_harm() -> None:
    incoming = make_incoming()
    fill(incoming)
    incoming.seal(0, 2)
    incoming.lose(0, "gone")
    incoming.seal(1, 2)
    incoming.lose(1, "gone")
    assert state_of(incoming) == "whole"


def test_damage_found_after_the_link_is_lost_can_still_be_repaired() -> None:
    incoming = make_incoming()
    last = chunk(1, 1, 0, 3)
    take(incoming, 0, chunk(0, 0, 0, 3))
    incoming.offer(0, last)
    incoming.seal(0, 2)
    incoming.lose(0, "gone")
    assert incoming.failure is None
    incoming.landed(0, last, {Cell(1, 0, 0): "flipped"})
    assert incoming.failure is None
    assert state_of(incoming) == "repairing"  # a call does not need the link


def test_an_offer_of_another_transfer_is_refused_with_both_shapes() -> None:
    incoming = make_incoming(opened=False)
    with pytest.raises(TransferFailed, match=r"offers .* \(11, 2, \(0, 1\)\), we expect \(10, 2,"):
        incoming.open(0, open_for(0, num_tokens=11))
    with pytest.raises(TransferFailed, match="prefill rank 4 offers"):
        incoming.open(4, open_for(0))


def test_chunks_before_the_call_or_after_the_seal_are_strays() -> None:
    incoming = make_incoming(opened=False)
    assert incoming.offer(0, chunk(0, 0, 0, 1)) is Verdict.STRAY
    incoming.open(0, open_for(0))
    incoming.seal(0, 1)
    assert incoming.offer(0, chunk(1, 0, 0, 1)) is Verdict.STRAY


def test_nothing_is_committed_that_is_not_whole() -> None:
    incoming = make_incoming()
    with pytest.raises(TransferFailed, match="in state open: layer 0, block 0, head 0 is missing"):
        incoming.commit()


def test_blocks_are_in_quarantine_while_a_scatter_runs() -> None:
    incoming = make_incoming()
    busy = chunk(0, 0, 0, 1)
    incoming.offer(0, busy)
    incoming.fail(Code.CANCELLED, "the client left")
    incoming.settle(num_scattering=1)
    assert state_of(incoming) == "quarantine"
    incoming.dropped(0, busy)
    incoming.settle(num_scattering=0)
    incoming.settle(num_scattering=0)
    assert state_of(incoming) == "freed"


def test_a_late_success_does_not_override_a_failure() -> None:
    incoming = make_incoming()
    fill(incoming)
    incoming.fail(Code.CANCELLED, "the client left")
    incoming.seal(0, 2)
    incoming.seal(1, 2)
    assert incoming.offer(0, chunk(7, 0, 0, 1)) is Verdict.STRAY
    with pytest.raises(TransferFailed, match="CANCELLED: the client left"):
        incoming.commit()
    assert state_of(incoming) == "aborting"
