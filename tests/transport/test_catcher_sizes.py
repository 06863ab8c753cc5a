"""Payloads that cannot be what their chunk says are staged, and end no link."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk
from transport.copiers import Copiers
from transport.lander import Lander
from transport.shipment import Shape

SPEC = CacheSpec.full(num_layers=3, num_kv_heads=2, head_dim=2, block_size=4, dtype="float32")


@pytest.mark.parametrize("piece_blocks", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("num_layers", [0, 3, 4, 2**32 - 1])
@pytest.mark.parametrize("num_bytes", [0, 1, 5, 1000])
def test_a_payload_of_too_few_bytes_is_staged(
    num_bytes: int, num_layers: int, piece_blocks: int
) -> None:
    store, threads = KvStore(SPEC, HeadInterval(0, 2), 4), Copiers(1, "test-catcher-sizes")
    landing: Any = SimpleNamespace(
        incoming=SimpleNamespace(shape=Shape.of(SPEC, 8)), order=SimpleNamespace(block_table=(1, 2))
    )
    chunk = Chunk(num_blocks=2, num_layers=num_layers, piece_blocks=piece_blocks)
    inlet: Any = SimpleNamespace(nbytes=num_bytes)
    try:
        assert Lander(store, threads).catcher(landing, (0, 1), chunk, inlet) is None
    finally:
        threads.stop()
