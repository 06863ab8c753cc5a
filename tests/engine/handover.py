"""Carries a prompt's KV from one small worker to another, as the transport would."""

from collections.abc import Sequence

from engine.request import Request, TokenOutput
from engine.roster import Reservation
from protos.worker_pb2 import GeneratedToken
from tests.engine.small_worker import Heard, SmallWorker


def carry(
    prefill: SmallWorker, block_table: Sequence[int], to: SmallWorker, at: Reservation
) -> int:
    """Copy what the reservation lacks; return how many blocks that was."""
    skipped = at.num_cached_blocks
    source = block_table[skipped:]
    target = at.block_table[skipped:][: len(source)]
    heads = range(3)
    for layer in range(prefill.store.num_layers if target else 0):
        cells = prefill.store.gather_cells(layer, source, heads)
        to.store.scatter_cells(layer, target, heads, cells)
    return len(target)


def prefill_request(worker: SmallWorker, request: Request, heard: Heard) -> list[GeneratedToken]:
    """Run a request with hold to its end; its first tokens, as they would travel."""
    worker.engine.add(request)
    worker.drain()
    return [out.to_proto() for out in heard.outputs if isinstance(out, TokenOutput)]
