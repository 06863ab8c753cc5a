"""Cells of a device's pool: as from the host's, and never before or after their time."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.cells import cell_digests
from kvcache.device_cells import DeviceCells
from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.spec import CacheSpec
from tests.kvcache.late_device import LateDevice

BLOCK_BYTES = 2 * 3 * 8 * 4 * 4  # planes, heads, slots, width, float32


def on_host(layout: KvLayout = KvLayout.HEAD_MAJOR) -> KvStore:
    return KvStore(CacheSpec.full(2, 3, 4, 8, "float32"), HeadInterval(0, 3), 12, layout=layout)


def on_late(
    device: LateDevice, piece_bytes: int = BLOCK_BYTES, layout: KvLayout = KvLayout.HEAD_MAJOR
) -> KvStore:
    spec = CacheSpec.full(2, 3, 4, 8, "float32")
    cells = DeviceCells(device, piece_bytes)
    return KvStore(spec, HeadInterval(0, 3), 12, layout=layout, on_device=cells)


def fill(store: KvStore, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    for layer in range(store.num_layers):
        store.layer(layer).copy_(torch.randn(store.layer(layer).shape, generator=rng))


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(st.integers(0, 23), min_size=1, max_size=9, unique=True),
    heads=st.sampled_from([[0], [1, 2], [0, 2], [0, 1, 2]]),
    piece_bytes=st.sampled_from([1, 100, 192, 400, 1 << 20]),
    layout=st.sampled_from(KvLayout),
    tail=st.none() | st.integers(1, 3),
    spoilt=st.booleans(),
)
def test_a_device_s_cells_are_the_host_s(
    blocks: list[int],
    heads: list[int],
    piece_bytes: int,
    layout: KvLayout,
    tail: int | None,
    spoilt: bool,
) -> None:
    """Whatever pieces they go in; of those that are not what their digests say, none is written."""
    late, host = on_late(LateDevice(), piece_bytes, layout), on_host()
    for store in (late, host):
        fill(store)
    views = [store.cut(4) for store in (late, host)]
    cells, want = (view.gather_cells(1, blocks, heads, tail) for view in views)
    assert np.array_equal(cells, want)
    digests = cell_digests(cells)
    if spoilt and len(cells):
        cells = cells.copy()
        cells[0, 0] ^= 1
    bad = [view.scatter_cells(0, blocks, heads, cells, digests).tolist() for view in views]
    assert bad == [[0] if spoilt and len(cells) else []] * 2
    for view in views:
        view.scatter_cells(1, blocks, heads, want)
    for layer in range(2):
        assert torch.equal(late.layer(layer), host.layer(layer))


def test_a_layer_is_gathered_once_written_and_no_later_layer_is_waited_for() -> None:
    device = LateDevice()
    store = on_late(device)
    for layer in range(2):  # the host asks for the whole step before the device has begun
        device.steps.run(partial(store.layer(layer).fill_, layer + 1.0))
        store.layer_written(layer)
    cells = store.gather_cells(0, [3, 1], [0, 1, 2])
    assert (cells.view(np.float32) == 1.0).all()
    assert device.steps.num_left == 1
    assert (store.gather_cells(1, [0], [2]).view(np.float32) == 2.0).all()


def test_cells_are_scattered_after_the_step_that_last_wrote_their_blocks() -> None:
    device = LateDevice()
    store, cells = on_late(device), np.full(2 * BLOCK_BYTES, 7, np.uint8)
    device.steps.run(lambda: store.layer(0).fill_(1.0))  # of a request that was given up since
    store.step_ended()
    device.steps.run(lambda: store.layer(1).fill_(2.0))  # a step that runs meanwhile
    store.scatter_cells(0, [4, 2], [0, 1, 2], cells)
    assert device.steps.num_left == 1
    device.finish()
    assert (store.gather_cells(0, [4, 2], [0, 1, 2]) == 7).all()


def test_a_copied_block_is_gathered_as_it_became() -> None:
    device = LateDevice()
    store = on_late(device)
    fill(store)
    store.copy_blocks([(0, 5)])
    assert np.array_equal(store.gather_cells(1, [5], [1]), store.gather_cells(1, [0], [1]))
    assert "side0 waits for steps 0" in device.log


def test_two_buffers_take_turns_and_each_is_waited_for_before_it_is_used_again() -> None:
    device = LateDevice()
    store = on_late(device)
    fill(store)
    store.layer_written(0)
    store.gather_cells(0, [0, 1, 2], [0, 1, 2])
    assert device.log == [
        "side0 waits for steps 0",
        "side0 2",
        "side0 3",
        "host waits for side0 2",
        "side0 4",
        "host waits for side0 3",
        "host waits for side0 4",
    ]
    device.log.clear()
    store.scatter_cells(0, [0, 1, 2], [0, 1, 2], bytes(3 * BLOCK_BYTES))
    assert device.log == [
        "side0 5",
        "side0 6",
        "host waits for side0 5",
        "side0 7",
        "host waits for side0 6",
        "host waits for side0 7",
    ]


def test_nothing_is_under_way_once_a_call_is_back_even_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the blocks may be given to others."""
    device = LateDevice()
    store = on_late(device)
    store.gather_cells(0, [0, 1, 2, 3], [0, 2])
    store.scatter_cells(0, [0, 1, 2, 3], [1], bytes(4 * BLOCK_BYTES // 3))
    assert [side.num_left for side in device.sides] == [0]
    ids = iter([[0], ["not a block"]])
    monkeypatch.setattr("kvcache.device_cells._ids", lambda *_: torch.tensor(next(ids)))
    with pytest.raises(ValueError, match="too many dimensions"):
        store.gather_cells(0, [0, 1, 2, 3], [0, 1, 2])
    assert [side.num_left for side in device.sides] == [0]


def test_calls_of_several_threads_have_a_stream_and_buffers_each() -> None:
    device = LateDevice()
    store, host = on_late(device, piece_bytes=100), on_host()
    for each in (store, host):
        fill(each)
    want = {block: host.gather_cells(1, [block, 11], [0, 1, 2]) for block in range(8)}

    def gather(block: int) -> bool:
        return all(
            np.array_equal(store.gather_cells(1, [block, 11], [0, 1, 2]), want[block])
            for _ in range(20)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(gather, range(8)))
    assert 1 <= len(device.sides) <= 4
