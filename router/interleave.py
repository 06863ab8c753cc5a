"""Several streams read as one, in the order their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def interleave(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield (number of the stream, item). The first error ends all; so does closing."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(maxsize=1)
    readers = [
        asyncio.create_task(_read(number, stream, queue), name=f"stream-{number}")
        for number, stream in enumerate(streams)
    ]
    try:
        num_open = len(readers)
        while num_open:
            said = await queue.get()
            if said is None:
                num_open -= 1
            elif isinstance(said, BaseException):
                raise said
            else:
                yield said
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)


async def _read(
    number: int,
    stream: AsyncGenerator[Item, None],
    queue: "asyncio.Queue[tuple[int, Item] | BaseException | None]",
) -> None:
    end: BaseException | None = None
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((number, item))
    except Exception as error:  # carried to whoever reads the whole
        end = error
    await queue.put(end)
