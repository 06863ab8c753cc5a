"""What the router has counted of the prompts of one run: the split of its hit rate, with reasons.

A router counts a prompt when its stream has ended, a moment after the client has seen that. What
others ask it meanwhile is counted, too: `agrees` tells.
"""

import asyncio
from dataclasses import dataclass

from engine.clock import Clock
from kvferry.errors import CommandError
from kvferry.stats import hit_rate_of, read_metrics
from router.hit_rate import FETCHED, KINDS, HitRate

SETTLE_S = 2.0
POLL_S = 0.1


@dataclass(slots=True)
class Counted:
    """Of the router with this HTTP door; empty: nobody to ask."""

    http_url: str
    clock: Clock
    _before: HitRate | None = None

    async def begin(self) -> None:
        """Raises CommandError."""
        if self.http_url:
            self._before = await self._read()

    async def since(self, prompt_tokens: int) -> HitRate | None:
        """The difference, once as many prompt tokens are in it, or soon."""
        before, give_up = self._before, self.clock.now() + SETTLE_S
        if before is None:
            return None
        while True:
            try:
                found = difference(await self._read(), before)
            except CommandError:
                return None
            if found.prompt >= prompt_tokens or self.clock.now() >= give_up:
                return found
            await self.clock.sleep(POLL_S)

    async def _read(self) -> HitRate:
        return hit_rate_of(await asyncio.to_thread(read_metrics, self.http_url))


def difference(after: HitRate, before: HitRate) -> HitRate:
    lost = {loss: count - before.lost.get(loss, 0) for loss, count in after.lost.items()}
    counts = {kind: getattr(after, kind) - getattr(before, kind) for kind in (*KINDS, FETCHED)}
    return HitRate(**counts, lost={loss: count for loss, count in lost.items() if count})
