"""One of two processes that move bytes with another project's engine, told so by JSON lines.

Runs under whichever Python has those packages: it imports nothing of ours, and at most numpy beside
them. `python peer.py mooncake` or `python peer.py nixl`; UCX_TLS says over what NIXL goes. With
`check`, it only says whether both are there.
"""

import base64
import json
import os
import sys
import time
from typing import Any

import numpy as np


class Mooncake:
    def __init__(self, num_bytes: int) -> None:
        from mooncake.engine import TransferEngine

        self.buffer = np.zeros(num_bytes, dtype=np.uint8)
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("mooncake does not start")
        if self.engine.register_memory(self.buffer.ctypes.data, num_bytes):
            raise RuntimeError("mooncake does not register memory")

    def about(self) -> dict[str, Any]:
        return {
            "where": f"127.0.0.1:{self.engine.get_rpc_port()}",
            "address": self.buffer.ctypes.data,
        }

    def meet(self, other: dict[str, Any]) -> None:
        self.other = other

    def write(self, piece_bytes: int) -> float:
        begins = range(0, self.buffer.nbytes, piece_bytes)
        mine = [self.buffer.ctypes.data + begin for begin in begins]
        theirs = [self.other["address"] + begin for begin in begins]
        sizes = [min(piece_bytes, self.buffer.nbytes - begin) for begin in begins]
        began = time.perf_counter()
        if self.engine.batch_transfer_sync_write(self.other["where"], mine, theirs, sizes):
            raise RuntimeError("mooncake failed to write")
        return time.perf_counter() - began


class Nixl:
    def __init__(self, num_bytes: int) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.buffer = np.zeros(num_bytes, dtype=np.uint8)
        self.name = f"bench-{os.getpid()}"
        self.agent = nixl_agent(self.name, nixl_agent_config(backends=[]))
        # UCX goes over shared memory only when it need not notice that the other end has died.
        options = {"ucx_error_handling_mode": "none"} if "shm" in os.environ["UCX_TLS"] else {}
        self.agent.create_backend("UCX", options)
        self.agent.register_memory([(self.buffer.ctypes.data, num_bytes, 0, "")], "DRAM")

    def about(self) -> dict[str, Any]:
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.buffer.ctypes.data, "name": self.name}

    def meet(self, other: dict[str, Any]) -> None:
        self.other = other
        self.agent.add_remote_agent(base64.b64decode(other["metadata"]))

    def write(self, piece_bytes: int) -> float:
        begins = range(0, self.buffer.nbytes, piece_bytes)

        def pieces(address: int) -> Any:
            sizes = (min(piece_bytes, self.buffer.nbytes - begin) for begin in begins)
            listed = [(address + begin, size, 0) for begin, size in zip(begins, sizes, strict=True)]
            return self.agent.get_xfer_descs(listed, "DRAM")

        mine, theirs = pieces(self.buffer.ctypes.data), pieces(self.other["address"])
        handle = self.agent.initialize_xfer("WRITE", mine, theirs, self.other["name"], b"")
        began = time.perf_counter()
        state = self.agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = self.agent.check_xfer_state(handle)
        took = time.perf_counter() - began
        self.agent.release_xfer_handle(handle)
        if state == "ERR":
            raise RuntimeError("nixl failed to write")
        return took


def main(kind: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between our lines
    end: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "start":
                end = {"mooncake": Mooncake, "nixl": Nixl}[kind](order["num_bytes"])
                answer: Any = end.about()
            elif order["do"] == "meet":
                answer = end.meet(order["other"])
            elif order["do"] == "byte":
                answer = int(end.buffer[-1])
            else:
                end.buffer[:] = order["byte"]
                answer = end.write(order["piece_bytes"])
            said = {"answer": answer}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


def check() -> None:
    """Raises ImportError."""
    import mooncake.engine
    import nixl_cu12._api

    print("mooncake", mooncake.engine.__name__, "and nixl", nixl_cu12._api.__name__, "are there")


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check()
    else:
        main(sys.argv[1])
