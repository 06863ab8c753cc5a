"""Fetching cells from another worker by a call of its own: what is asked, and who asks it.

A pull names its blocks by a live shipment, which only its two ends know, or by their whole names,
which only someone who has their tokens and their tenant's key can know.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import grpc
import grpc.aio

from protos.transfer_pb2 import CellRun, FetchedCells, FetchRequest
from protos.transfer_pb2_grpc import CellsStub
from transport.grpc_options import channel_options
from transport.orders import Lender, ShipmentKey
from transport.plain_words import why

Part = tuple[CellRun, FetchedCells]  # where in the prompt, and the cells


class PullFailed(Exception):
    """The other worker cannot be reached, or will not answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One call: `runs[i]`, in the prompt's own blocks, is what `request.runs[i]` asks for."""

    lender: Lender
    request: FetchRequest
    runs: Sequence[CellRun]


class Puller(Protocol):
    def fetch(self, pull: Pull) -> AsyncGenerator[Part, None]:
        """Yield what comes, unverified. Raises PullFailed. What is missing there does not come."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """Of a prompt's full blocks, of `block_size` tokens, from the first on; on the wire each counts
    as `parts` blocks.
    """

    names: Sequence[bytes]
    parts: int = 1
    block_size: int = 0  # 0: as the lender's


def by_shipment(lender: Lender, key: ShipmentKey, runs: Sequence[CellRun], asker: int = 0) -> Pull:
    """Ask a prefill rank for cells of a shipment that it has not let go of yet. `asker` is the
    decode rank that does.
    """
    return Pull(lender, FetchRequest(key=key.to_proto(), runs=runs, decode_rank=asker), runs)


def by_name(
    lender: Lender,
    key: ShipmentKey,
    names: Names,
    runs: Sequence[CellRun],
    asker: int = 0,
) -> Pull:
    """Ask a rank of any worker for cells of named blocks. `key` is of the shipment that lacks
    them, which gives no right: it is for the books.
    """
    asked: list[bytes] = []
    places: list[int] = []
    renumbered, parts = [], names.parts
    for run in runs:
        first, last = run.first_block // parts, (run.first_block + run.num_blocks - 1) // parts
        moved = CellRun()
        moved.CopyFrom(run)
        moved.first_block = len(places) + run.first_block % parts
        asked += names.names[first : last + 1]
        places += range(first * parts, (last + 1) * parts)
        renumbered.append(moved)
    request = FetchRequest(
        names=asked,
        runs=renumbered,
        lacks=key.to_proto(),
        places=places,
        decode_rank=asker,
        parts=parts,
        block_size=names.block_size,
    )
    return Pull(lender, request, runs)


class GrpcPuller:
    """Each pull has a channel of its own: what is wrong with a link's does not concern it."""

    def __init__(
        self,
        timeout_s: float = 10.0,
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._open_channel = open_channel or _open_channel

    async def fetch(self, pull: Pull) -> AsyncGenerator[Part, None]:
        asked, channel = Asked(pull), self._open_channel(pull.lender.address)
        try:
            call = CellsStub(channel).Fetch(pull.request, timeout=self._timeout_s)
            async for part in call:
                run = asked.place(part.run)
                if run is None:
                    raise PullFailed(f"{pull.lender.address} answers with cells nobody asked for")
                if not part.missing:
                    yield run, part
        except grpc.aio.AioRpcError as error:
            raise PullFailed(f"{error.code().name}: {why(error)}") from error
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise PullFailed(why(error)) from error
        finally:
            await channel.close(None)


class Asked:
    """The runs of one call, for whoever sorts its answers: there may be thousands of either."""

    def __init__(self, pull: Pull) -> None:
        self._runs: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, int]]] = {}
        for asked, run in zip(pull.request.runs, pull.runs, strict=True):
            first, stop = asked.first_block, asked.first_block + asked.num_blocks
            alike = self._runs.setdefault((asked.layer, tuple(asked.heads)), [])
            alike.append((first, stop, run.first_block - first))
        for alike in self._runs.values():
            alike.sort()

    def place(self, part: CellRun) -> CellRun | None:
        """Where in the prompt a part of an answer belongs; None when it was not asked for."""
        alike = self._runs.get((part.layer, tuple(part.heads)), [])
        at = bisect_right(alike, part.first_block, key=itemgetter(0)) - 1
        if at < 0 or not part.num_blocks:
            return None
        _, stop, moves_by = alike[at]
        if part.first_block + part.num_blocks > stop:
            return None
        moved = CellRun()
        moved.CopyFrom(part)
        moved.first_block += moves_by
        return moved


def _open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())
