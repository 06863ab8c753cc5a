"""An index that hears of what workers store some time after they say it."""

from collections.abc import Sequence

from prefix_index.index import BlockEvent
from prefix_index.memory_index import MemoryIndex


class LaggingIndex(MemoryIndex):
    """`lag_s` must be well below the lease: a worker that waits here renews nothing meanwhile."""

    lag_s: float = 0.0

    async def publish(
        self, worker: str, epoch: int, events: Sequence[BlockEvent], sequence: int | None = None
    ) -> None:
        if self.lag_s:
            await self._clock.sleep(self.lag_s)
        await super().publish(worker, epoch, events, sequence)
