"""Transfers between stores of devices that lag far behind the threads that ask for work."""

from functools import partial

import pytest

from kvcache.device_cells import DeviceCells
from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.spec import CacheSpec
from tests.kvcache.late_device import LateDevice
from tests.transport import harness
from tests.transport.harness import WIRES, cluster, network

SOURCE, TARGET = [5, 3, 9, 0, 11], [7, 20, 2, 15, 4]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[LateDevice]:
    """Of every store that is made from here on."""
    made: list[LateDevice] = []

    def on_late(
        spec: CacheSpec, kv_heads: HeadInterval, num_blocks: int, layout: KvLayout
    ) -> KvStore:
        made.append(LateDevice())
        cells = DeviceCells(made[-1], piece_bytes=700)
        return KvStore(spec, kv_heads, num_blocks, layout=layout, on_device=cells)

    monkeypatch.setattr(harness, "KvStore", on_late)
    return made


@pytest.mark.parametrize("wire", WIRES)
async def test_cells_are_what_the_step_leaves_and_land_after_the_one_before(
    wire: str, devices: list[LateDevice]
) -> None:
    """Prefill's device has computed nothing when its layers are sealed; decode's still has to write
    for the request that had the blocks before.
    """
    async with network(wire) as net, cluster(net, 3, 2) as group:
        writers = [(store, 3) for store in group.prefill.stores]
        writers += [(store, -1) for store in group.decode.stores]
        for (store, factor), device in zip(writers, devices, strict=True):
            for layer in range(store.num_layers):
                device.steps.run(partial(store.layer(layer).mul_, factor))
                store.layer_written(layer)
            store.step_ended()
        _, receipts = await group.carry(18, SOURCE, TARGET)
        for device in devices:
            device.finish()
        group.check_blocks(18, SOURCE, TARGET)
        assert receipts[0].first_tokens[0].token_id == 7
