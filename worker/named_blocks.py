"""The blocks of this worker by name, held fast while they are read for somebody else."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from engine.engine import Engine
from kvcache.block_hash import BlockHash


class NamedBlocks:
    """What rank 0's engine has cached or in use, for `transport.cells_servicer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def pinned(self, names: Sequence[bytes]) -> AsyncIterator[Mapping[bytes, int]]:
        ids = self._engine.pin([BlockHash(name) for name in names])
        try:
            yield {bytes(name): block_id for name, block_id in ids.items()}
        finally:
            self._engine.unpin(list(ids.values()))
