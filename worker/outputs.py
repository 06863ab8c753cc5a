"""From the engine's thread to the event loop: what one request puts out, in order."""

import asyncio

from engine.request import Admitted, Failed, Output, TokenOutput
from worker.refusal import STATUS, Refused


class Outputs:
    """Give `put` to a request as its `on_output`; take the outputs from the loop's side.

    Nothing is lost and the engine never waits: a request puts out at most n * max_tokens outputs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        """From any thread. After the loop has closed there is nobody left to tell."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    async def take(self) -> Admitted | TokenOutput:
        """The next output; raises Refused when the engine gave the request up."""
        output = await self._queue.get()
        if isinstance(output, Failed):
            raise Refused(STATUS[output.code], output.reason)
        return output
