from dataclasses import replace

import pytest

from kvcache.spec import CacheSpec
from transport.messages import MAX_PAYLOAD_BYTES
from transport.orders import Code, TransferFailed
from transport.outgoing import Outgoing
from transport.outgoing_pair import MAX_ASKS, OutgoingPair
from transport.sealed_runs import Part, Run
from transport.shipment import Shape

SPEC = CacheSpec.full(num_layers=3, num_kv_heads=2, head_dim=2, block_size=4, dtype="float32")
BLOCK_BYTES = 128  # of two heads: 2 heads x 2 planes x 4 tokens x 2 values x 4 bytes


def make_pair(num_tokens: int = 40, chunk_bytes: int = 3 * BLOCK_BYTES) -> OutgoingPair:
    return OutgoingPair((0, 1), Shape.of(SPEC, num_tokens), chunk_bytes)


def state_of(outgoing: Outgoing) -> str:
    return outgoing.state.value


def take_all(pair: OutgoingPair) -> list[Part]:
    parts = []
    while (part := pair.take()) is not None:
        parts.append(part)
        pair.sent(part.seq, now=0.0)
        pair.check()
    return parts


def test_nothing_leaves_before_credit() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, (5, 6)))
    assert pair.take() is None
    pair.grant(0, 1 << 20)
    assert pair.take() == Part(0, Run(0, 0, (5, 6)))


def test_what_waited_for_credit_is_joined_by_layer_and_cut_into_chunks() -> None:
    pair = make_pair()
    for first_block in range(5):
        for layer in range(2):
            pair.seal(Run(layer, first_block, (10 + first_block,)))
    pair.grant(0, 1 << 20)
    assert [str(part.run) for part in take_all(pair)] == [
        "layer 0, blocks 0-2",
        "layer 0, blocks 3-4",
        "layer 1, blocks 0-2",
        "layer 1, blocks 3-4",
    ]


def test_resident_blocks_are_left_out() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, (10, 11, 12, 13), tail_tokens=1))
    pair.seal(Run(1, 0, (10, 11)))
    pair.grant(2, 1 << 20)
    assert take_all(pair) == [Part(0, Run(0, 2, (12, 13), tail_tokens=1))]
    assert pair.all_sent


def test_only_the_chunk_with_the_last_block_knows_of_the_tail() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, (1, 2, 3)))
    pair.seal(Run(0, 3, (4,), tail_tokens=2))
    pair.grant(0, 1 << 20)
    assert [part.run.tail_tokens for part in take_all(pair)] == [None, 2]


def test_unacknowledged_bytes_stay_within_the_window() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, tuple(range(9))))
    pair.grant(0, 7 * BLOCK_BYTES)
    assert [part.seq for part in take_all(pair)] == [0, 1]
    assert pair.unacked_bytes == 6 * BLOCK_BYTES
    assert pair.acked(0)
    assert [part.seq for part in take_all(pair)] == [2]


def test_a_window_smaller_than_a_chunk_still_lets_one_through() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, tuple(range(6))))
    pair.grant(0, 1)
    assert [part.seq for part in take_all(pair)] == [0]
    pair.acked(0)
    assert [part.seq for part in take_all(pair)] == [1]


def test_chunks_that_are_stored_nowhere_are_larger() -> None:
    """As many times as the wire asks for, where decode has room for four of them on their way."""
    for most_chunks, window, want in (
        (4, 60 * BLOCK_BYTES, [12, 1]),
        (4, 40 * BLOCK_BYTES, [10, 3]),
        (4, 16 * BLOCK_BYTES, [4, 4, 4, 1]),
        (2, 60 * BLOCK_BYTES, [6, 6, 1]),
        (4, 11 * BLOCK_BYTES, [3, 3, 3]),  # as many as the window takes
        (1, 40 * BLOCK_BYTES, [3, 3, 3, 3, 1]),
    ):
        pair = make_pair(num_tokens=52)
        pair.most_chunks = most_chunks
        pair.seal(Run(0, 0, tuple(range(13))))
        pair.grant(0, window)
        assert [len(part.run.block_ids) for part in take_all(pair)] == want


@pytest.mark.parametrize("chunk_mib", [8, 16, 24, 48])
def test_the_largest_chunk_fits_into_a_message(chunk_mib: int) -> None:
    """With its digests: decode would take it for nonsense, and end the link."""
    blocks = (MAX_PAYLOAD_BYTES + (1 << 20)) // BLOCK_BYTES
    pair = make_pair(num_tokens=4 * blocks, chunk_bytes=chunk_mib << 20)
    pair.most_chunks = 4
    pair.seal(Run(0, 0, tuple(range(blocks))))
    pair.grant(0, 1 << 30)
    part = pair.take()
    assert part is not None
    layer = pair.shape.layers[0]
    num_blocks = part.num_layers * len(part.run.block_ids)
    num_digests = num_blocks * len(pair.heads) * len(layer.planes)
    num_bytes = part.num_bytes(pair.shape, pair.heads) + 8 * num_digests + 8
    assert num_bytes <= MAX_PAYLOAD_BYTES


def layers_of(pair: OutgoingPair) -> list[tuple[range, int, int]]:
    """Of each chunk its layers, first block and number of blocks."""
    return [(part.layers, part.run.first_block, len(part.run.block_ids)) for part in take_all(pair)]


def test_what_streams_takes_the_same_blocks_of_several_layers_as_one_chunk() -> None:
    pair = make_pair(chunk_bytes=4 * BLOCK_BYTES)
    pair.most_chunks = 4
    pair.grant(1, 1 << 20)
    for layer in (0, 1, 2):
        pair.seal(Run(layer, 0, (5, 6)))
        pair.seal(Run(layer, 2, (7,), 2))
    pair.most_bytes = 0
    first, second = take_all(pair)
    assert (first.seq, first.run, first.num_layers) == (0, Run(0, 1, (6, 7), 2), 2)
    assert first.runs == [Run(0, 1, (6, 7), 2), Run(1, 1, (6, 7), 2)]
    assert (second.seq, second.run, second.num_layers) == (1, Run(2, 1, (6, 7), 2), 1)
    assert first.num_bytes(pair.shape, pair.heads) == 4 * BLOCK_BYTES
    assert pair.unacked_bytes == pair.bytes_sent == 6 * BLOCK_BYTES
    pair.sent(0, 0.0)
    assert pair.nacked(0) is True
    assert pair.take() == first


def test_layers_go_together_only_where_their_blocks_are_the_same_and_all_wait() -> None:
    for runs, want in (
        ([Run(0, 0, (5, 6)), Run(1, 0, (5, 6))], [(range(2), 0, 2)]),
        ([Run(0, 0, (5, 6)), Run(1, 0, (5, 7))], [(range(1), 0, 2), (range(1, 2), 0, 2)]),
        ([Run(0, 0, (5, 6)), Run(2, 0, (5, 6))], [(range(1), 0, 2), (range(2, 3), 0, 2)]),
        ([Run(0, 0, (5, 6)), Run(1, 0, (5,))], [(range(1), 0, 2), (range(1, 2), 0, 1)]),
        ([Run(0, 0, (5, 6)), Run(1, 0, (5, 6), 1)], [(range(1), 0, 2), (range(1, 2), 0, 2)]),
        ([Run(1, 0, (5,)), Run(0, 0, (5,))], [(range(1, 2), 0, 1), (range(1), 0, 1)]),
    ):
        pair = make_pair()
        pair.most_chunks = 4
        pair.grant(0, 1 << 20)
        for run in runs:
            pair.seal(run)
        assert layers_of(pair) == want


def test_layers_go_together_as_far_as_the_window_allows() -> None:
    pair = make_pair(chunk_bytes=100 * BLOCK_BYTES)
    pair.most_chunks = 4
    pair.grant(0, 5 * BLOCK_BYTES)
    for layer in (0, 1, 2):
        pair.seal(Run(layer, 0, (5, 6)))
    assert layers_of(pair) == [(range(2), 0, 2)]
    pair.acked(0)
    assert layers_of(pair) == [(range(2, 3), 0, 2)]


def test_a_slow_wire_is_not_held_for_long_by_one_chunk() -> None:
    """Where it is not known to be fast, chunks are as they are elsewhere: of one layer each."""
    for reach, num_blocks in ((0, 3), (2, 3), (5, 5), (99, 12)):
        pair = make_pair(num_tokens=80)
        pair.most_chunks = 4
        pair.seal(Run(0, 0, tuple(range(20))))
        pair.grant(0, 1 << 20)
        part = pair.take(reach * BLOCK_BYTES)
        assert part is not None and len(part.run.block_ids) == num_blocks
    for reach, num_layers in ((0, 1), (1, 1), (2, 2), (3, 3), (99, 3)):
        pair = make_pair()
        pair.most_chunks = 4
        for layer in range(3):
            pair.seal(Run(layer, 0, (5,)))
        pair.grant(0, 1 << 20)
        part = pair.take(reach * BLOCK_BYTES)
        assert part is not None and part.num_layers == num_layers


def test_layers_whose_cells_differ_in_size_do_not_go_together() -> None:
    pair = make_pair()
    pair.most_chunks = 4
    layers = (pair.shape.layers[0], replace(pair.shape.layers[0], cell_bytes=7))
    pair.shape = replace(pair.shape, layers=layers)
    pair.grant(0, 1 << 20)
    for layer in (0, 1):
        pair.seal(Run(layer, 0, (5,)))
    assert layers_of(pair) == [(range(1), 0, 1), (range(1, 2), 0, 1)]


def test_an_acknowledgement_counts_once() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, (1,)))
    pair.grant(0, 1 << 20)
    take_all(pair)
    assert [pair.acked(0), pair.acked(0), pair.acked(7)] == [True, False, False]
    assert pair.unacked_bytes == 0


def test_a_refused_chunk_is_sent_again_as_it_was_and_not_for_ever() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, (1, 2)))
    pair.grant(0, 1 << 20)
    first = take_all(pair)
    for _ in range(MAX_ASKS):
        assert pair.nacked(0)
        assert not pair.nacked(0)  # it is on its way again already
        assert take_all(pair) == first
    with pytest.raises(TransferFailed, match="layer 0, blocks 0-1: asked for 17 times") as bad:
        pair.nacked(0)
    assert bad.value.code == "DATA_LOSS"


def test_a_chunk_without_an_answer_is_sent_again_but_not_too_soon() -> None:
    pair = make_pair()
    pair.seal(Run(0, 0, (1,)))
    pair.grant(0, 1 << 20)
    part = pair.take()
    assert part is not None
    assert not pair.probe(110.0, 10.0)  # it has not left yet
    pair.sent(part.seq, now=50.0)
    assert not pair.probe(59.0, 10.0)
    assert pair.probe(60.0, 10.0)
    assert pair.take() == part


def test_what_may_be_on_its_way_yet_is_not_sent_again_for_some_time() -> None:
    """While decode says that more and more has come over the link."""
    pair = make_pair()
    pair.seal(Run(0, 0, (1,)))
    pair.grant(0, 1 << 20)
    part = pair.take()
    assert part is not None
    pair.sent(part.seq, now=50.0)
    for second in range(51, 80):
        pair.flows(second, now=second)
        assert not pair.probe(second + 0.5, 10.0)
    pair.flows(80, now=80.0)
    assert pair.probe(80.0, 10.0)
    assert pair.take() == part
    pair.sent(part.seq, now=100.0)
    pair.flows(101, now=105.0)
    pair.flows(101, now=112.0)  # no more has come
    assert not pair.probe(114.0, 10.0)
    assert pair.probe(115.0, 10.0)


def test_the_seal_may_follow_chunks_that_wait_for_their_turn_on_an_ordered_wire() -> None:
    outgoing = make_outgoing(1)
    pair = outgoing.pairs[0]
    pair.grant(0, 1 << 20)
    outgoing.seal(Run(0, 0, (1, 2)))
    outgoing.finish()
    part = pair.take()
    assert part is not None and not outgoing.seal_due(0)
    pair.leaves(part.seq)
    assert outgoing.seal_due(0) and not pair.all_left
    pair.sent(part.seq, now=0.0)
    assert pair.all_left
    pair.nacked(part.seq)  # it comes again, and waits once more
    assert not outgoing.seal_due(0) and not pair.all_left


def test_a_pair_without_heads_owes_nothing() -> None:
    pair = OutgoingPair((), Shape.of(SPEC, 8), 1000)
    pair.seal(Run(0, 0, (1, 2)))
    pair.grant(0, 1 << 20)
    assert pair.take() is None
    assert pair.all_sent


def make_outgoing(num_pairs: int) -> Outgoing:
    return Outgoing({rank: make_pair(8) for rank in range(num_pairs)})


def test_a_shipment_walks_through_its_states() -> None:
    outgoing = make_outgoing(1)
    pair = outgoing.pairs[0]
    seen = [outgoing.state]

    def note() -> None:
        outgoing.advance()
        seen.append(outgoing.state)

    outgoing.seal(Run(0, 0, (1, 2)))
    pair.grant(0, 1 << 20)
    note()
    take_all(pair)
    note()
    outgoing.seal(Run(1, 0, (1, 2)))
    outgoing.finish()
    note()
    assert not outgoing.seal_due(0)
    take_all(pair)
    assert outgoing.seal_due(0)
    pair.seal_sent = True
    pair.acked(0)
    pair.acked(1)
    note()
    assert outgoing.commit(0)
    note()
    assert [state.value for state in seen] == [
        "new",
        "admitted",
        "streaming",
        "sealed",
        "await_commit",
        "released",
    ]


def test_a_shipment_with_nobody_to_send_to_is_done_at_once() -> None:
    outgoing = make_outgoing(0)
    outgoing.advance()
    assert state_of(outgoing) == "released"


def test_all_pairs_must_commit() -> None:
    outgoing = make_outgoing(2)
    outgoing.finish()
    for pair in outgoing.pairs.values():
        pair.grant(2, 1)
    outgoing.advance()
    for rank, pair in outgoing.pairs.items():
        assert outgoing.seal_due(rank)
        pair.seal_sent = True
    outgoing.advance()
    outgoing.commit(1)
    assert state_of(outgoing) == "await_commit"
    outgoing.commit(0)
    assert state_of(outgoing) == "released"


def test_the_first_failure_stands_and_a_late_success_does_not_override_it() -> None:
    outgoing = make_outgoing(1)
    assert outgoing.fail(Code.UNAVAILABLE, "the link is lost")
    assert not outgoing.fail(Code.DATA_LOSS, "late")
    outgoing.pairs[0].grant(0, 1)
    outgoing.pairs[0].seal_sent = True
    outgoing.finish()
    assert not outgoing.commit(0)
    outgoing.drained()
    outgoing.drained()
    assert state_of(outgoing) == "drained"
    assert str(outgoing.failure) == "UNAVAILABLE: the link is lost"


def test_a_commit_before_everything_was_sent_is_not_believed() -> None:
    outgoing = make_outgoing(1)
    outgoing.pairs[0].grant(0, 1)
    assert not outgoing.commit(0)


def test_a_failure_names_the_first_cells_that_may_be_missing() -> None:
    pair = make_pair()
    assert pair.where() == "before layer 0, block 0"
    pair.seal(Run(0, 0, (1, 2)))
    pair.grant(0, 1 << 20)
    take_all(pair)
    pair.seal(Run(1, 0, (1, 2)))
    assert pair.where() == "layer 0, blocks 0-1"
    pair.acked(0)
    assert pair.where() == "layer 1, block 0"
