"""One of the two processes of a measurement: does what it is told, one JSON line at a time."""

import asyncio
import json
import os
import sys
import time
from typing import Any

from kvcache import host_memory
from kvferry.transfer_bench.case import Case
from kvferry.transfer_bench.ends import DecodeEnd, PrefillEnd
from kvferry.transfer_bench.limits import push, serve
from kvferry.transfer_bench.loads import Cold, Hot, Load, Memory, cold_memory


class Child:
    def __init__(self) -> None:
        self._decode: DecodeEnd | None = None
        self._prefill: PrefillEnd | None = None
        self._serving: asyncio.Task[None] | None = None
        self._cold: Memory | None = None

    async def do(self, order: dict[str, Any]) -> Any:
        match order["do"]:
            case "start decode":
                self._decode = DecodeEnd(Case.from_json(order["case"]))
                return await self._decode.start()
            case "start prefill":
                self._prefill = PrefillEnd(Case.from_json(order["case"]), order["addresses"])
                return await self._prefill.start()
            case "expect":
                assert self._decode is not None
                return self._decode.expect(order["first"])
            case "settle":
                assert self._decode is not None
                return await self._decode.settle()
            case "ship":
                assert self._prefill is not None
                return await self._prefill.ship(order["first"])
            case "sealing seconds":
                assert self._prefill is not None
                return self._prefill.sealing_s
            case "cpu seconds":
                return time.process_time()
            case "close":
                for end in (self._prefill, self._decode):
                    if end is not None:
                        await end.close()
                self._prefill = self._decode = self._cold = None
                return None
            case "serve limit":
                case = Case.from_json(order["case"])
                address, self._serving = await serve(case, self._load(case, order["cold"]))
                return address
            case "push limit":
                case = Case.from_json(order["case"])
                load = self._load(case, order["cold"])
                if case.sealed and self._prefill is not None:  # a transfer comes behind that, too
                    self._prefill.compute(0)
                return await push(case, order["address"], load)
            case "take alone":
                assert self._decode is not None
                address, self._serving = await self._decode.take_alone()
                return address
            case "push alone":
                assert self._prefill is not None
                return await self._prefill.push_alone(order["address"])
            case "end limit":
                assert self._serving is not None
                return await self._serving
        raise ValueError(f"cannot {order['do']}")

    def _load(self, case: Case, cold: bool) -> Load:
        """With the same memory from one repetition to the next, if it is a cold one."""
        if not cold:
            return Hot(case)
        if self._cold is None or self._cold.nbytes != case.total_bytes:
            self._cold = cold_memory(case)
        return Cold(case, self._cold)


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between our lines
    host_memory.keep_freed()  # as every worker does
    loop, child = asyncio.get_running_loop(), Child()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = {"answer": await child.do(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
