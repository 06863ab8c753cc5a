"""Nodes that are only names: all on loopback, joined by proxies made when they are asked for."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from engine.clock import Clock
from kvferry.lab.lane import Counts
from kvferry.lab.network import Condition
from kvferry.lab.proxy import DelayingProxy, StreamLane
from kvferry.lab.topology import Direction, Topology


class ProxyNetwork:
    def __init__(self, topology: Topology, clock: Clock, seed: int) -> None:
        self._lanes: dict[Direction, StreamLane] = {
            direction: StreamLane(topology.shape(*direction), clock, seed + number)
            for number, direction in enumerate(topology.directions)
        }
        self._proxies: dict[tuple[str, str, int], DelayingProxy] = {}
        self._open = AsyncExitStack()

    def host(self, node: str) -> str:
        return "127.0.0.1"

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return list(command)

    async def address(self, source: str, target: str, port: int) -> tuple[str, int]:
        proxy = self._proxies.get((source, target, port))
        if proxy is None:
            there, back = self._lanes[source, target], self._lanes[target, source]
            proxy = DelayingProxy(("127.0.0.1", port), there, back)
            await self._open.enter_async_context(proxy)
            self._proxies[source, target, port] = proxy
        return proxy.address

    async def apply(self, source: str, target: str, condition: Condition) -> None:
        self._lanes[source, target].change(condition.shape, condition.is_cut)

    async def counts(self, source: str, target: str) -> Counts | None:
        return self._lanes[source, target].lane.counts

    async def stop(self) -> None:
        await self._open.aclose()


@asynccontextmanager
async def proxy_network(
    topology: Topology, clock: Clock, seed: int = 0
) -> AsyncIterator[ProxyNetwork]:
    network = ProxyNetwork(topology, clock, seed)
    try:
        yield network
    finally:
        await network.stop()
