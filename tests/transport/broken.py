"""What the tests of faults share: one small transfer, and how it is broken and watched."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from engine.clock import ManualClock
from tests.transport.harness import QUICK, Cluster
from transport.fault_wire import Fault, FaultConnector, none
from transport.link import Connector
from transport.orders import TransferFailed

SOURCE, TARGET = [5, 3, 9, 0, 11], [7, 20, 2, 15, 4]
NUM_TOKENS = 18
IMPATIENT = replace(QUICK, repair_wait_s=0.05, lease_s=3.0)  # for what is only asked for in time


def with_fault(
    outgoing: Fault = none, incoming: Fault = none
) -> Callable[[Connector], FaultConnector]:
    return lambda inner: FaultConnector(inner, outgoing, incoming)


def flipped(payload: memoryview, bit: int) -> memoryview:
    raw = bytearray(payload)
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    return memoryview(raw)


async def failures(*tasks: "asyncio.Task[object]") -> list[TransferFailed]:
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, TransferFailed), result
    return [result for result in results if isinstance(result, TransferFailed)]


async def carry_whole(group: Cluster) -> None:
    await group.carry(NUM_TOKENS, SOURCE, TARGET)
    group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


async def run_until(clock: ManualClock, seconds: float, *tasks: "asyncio.Task[object]") -> None:
    """Let `seconds` pass, unless the tasks end before."""
    for _ in range(round(seconds * 2)):
        await clock.run(0.5)
        await asyncio.sleep(0.001)
        if all(task.done() for task in tasks):
            return
