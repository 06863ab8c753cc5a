"""What a worker orders from its transport, and what it is told at the end.

One `ShipmentOrder` per prefill rank and one `ReceiptOrder` per decode rank make up a transfer; both
carry the same key, which is never used twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvcache.head_map import HeadInterval
from protos import rank_pb2, transfer_pb2, worker_pb2

FirstToken = worker_pb2.GeneratedToken


class Code(StrEnum):
    """How a transfer failed: names of gRPC statuses, so that a servicer passes them on."""

    UNAVAILABLE = "UNAVAILABLE"  # the other end or the link is gone: try elsewhere
    DATA_LOSS = "DATA_LOSS"  # what arrived is not what was sent
    FAILED_PRECONDITION = "FAILED_PRECONDITION"  # these two cannot work together
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"

    @classmethod
    def parse(cls, name: str) -> "Code":
        """The code of that name; what another build calls otherwise counts as UNAVAILABLE."""
        return cls(name) if name in cls.__members__ else cls.UNAVAILABLE


class TransferFailed(Exception):
    """The transfer cannot be completed: the prompt must be computed again or given up."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank of one life of a worker."""

    worker: str
    instance: str
    epoch: int
    rank: int

    def __str__(self) -> str:
        return f"{self.worker} rank {self.rank} (instance {self.instance}, epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class ShipmentKey:
    transfer_id: bytes
    attempt: int
    prefill_epoch: int
    decode_epoch: int

    def __str__(self) -> str:
        return f"{self.transfer_id.hex()[:12]}/{self.attempt}"

    @classmethod
    def from_proto(cls, key: transfer_pb2.ShipmentKey) -> "ShipmentKey":
        return cls(key.transfer_id, key.attempt, key.prefill_epoch, key.decode_epoch)

    def to_proto(self) -> transfer_pb2.ShipmentKey:
        return transfer_pb2.ShipmentKey(
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            prefill_epoch=self.prefill_epoch,
            decode_epoch=self.decode_epoch,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The decode group that is to receive: where each rank listens, and the KV heads it holds."""

    worker: str
    instance: str
    epoch: int
    rank_addresses: tuple[str, ...]
    kv_intervals: tuple[HeadInterval, ...]
    block_size: int = 0  # tokens; 0: as the prefill worker's

    @classmethod
    def from_proto(cls, target: worker_pb2.DecodeTarget) -> "Target":
        """Raises ValueError when the lists do not speak of the same ranks."""
        intervals = intervals_from(target.kv_head_starts, target.kv_head_stops)
        addresses = tuple(target.rank_addresses)
        if not addresses or len(addresses) != len(intervals):
            raise ValueError(
                f"{target.worker}: {len(addresses)} rank addresses, {len(intervals)} head intervals"
            )
        return cls(
            target.worker, target.instance, target.epoch, addresses, intervals, target.block_size
        )

    def to_proto(self) -> worker_pb2.DecodeTarget:
        return worker_pb2.DecodeTarget(
            worker=self.worker,
            instance=self.instance,
            epoch=self.epoch,
            rank_addresses=self.rank_addresses,
            kv_head_starts=[interval.start for interval in self.kv_intervals],
            kv_head_stops=[interval.stop for interval in self.kv_intervals],
            block_size=self.block_size,
        )


@dataclass(frozen=True, slots=True)
class ShipmentOrder:
    key: ShipmentKey
    request_key: int  # names the request in `Shipper.seal`
    num_tokens: int  # of the whole prompt
    target: Target
    wire: str
    other_wires: tuple[str, ...] = ()  # in turn, where those before are in quarantine

    @classmethod
    def from_proto(cls, order: rank_pb2.ShipmentOrder) -> "ShipmentOrder":
        return cls(
            ShipmentKey.from_proto(order.key),
            order.request_key,
            order.num_tokens,
            Target.from_proto(order.target),
            order.wire,
            tuple(order.other_wires),
        )

    def to_proto(self) -> rank_pb2.ShipmentOrder:
        return rank_pb2.ShipmentOrder(
            key=self.key.to_proto(),
            request_key=self.request_key,
            num_tokens=self.num_tokens,
            target=self.target.to_proto(),
            wire=self.wire,
            other_wires=self.other_wires,
        )


@dataclass(frozen=True, slots=True)
class ShipmentReport:
    """What one prefill rank sent; `transfer_ms` runs from its first chunk to the last Commit."""

    chunks: int = 0
    bytes: int = 0
    transfer_ms: float = 0.0

    @classmethod
    def from_proto(cls, report: rank_pb2.ShipmentReport) -> "ShipmentReport":
        return cls(report.chunks, report.bytes, report.transfer_ms)

    def to_proto(self) -> rank_pb2.ShipmentReport:
        return rank_pb2.ShipmentReport(
            chunks=self.chunks, bytes=self.bytes, transfer_ms=self.transfer_ms
        )


@dataclass(frozen=True, slots=True)
class Lender:
    """A rank of some worker's life that hands out cells by calls."""

    instance: str
    rank: int
    address: str
    worker: str = ""  # without a name nothing is held against it
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that knows blocks of a prompt by name, and hands out cells of them by calls."""

    instance: str
    rank_addresses: tuple[str, ...]
    kv_intervals: tuple[HeadInterval, ...]
    block_size: int = 0  # tokens of the blocks that it names; 0: not known
    worker: str = ""
    epoch: int = 0

    @classmethod
    def from_proto(cls, holder: worker_pb2.Holder) -> "Holder":
        return cls(
            holder.instance,
            tuple(holder.rank_addresses),
            intervals_from(holder.kv_head_starts, holder.kv_head_stops),
            holder.block_size,
            holder.worker,
            holder.epoch,
        )

    def to_proto(self) -> worker_pb2.Holder:
        return worker_pb2.Holder(
            instance=self.instance,
            rank_addresses=self.rank_addresses,
            kv_head_starts=[interval.start for interval in self.kv_intervals],
            kv_head_stops=[interval.stop for interval in self.kv_intervals],
            block_size=self.block_size,
            worker=self.worker,
            epoch=self.epoch,
        )

    def lender(self, head: int, asker: int) -> Lender | None:
        """Of the ranks that hold a head, askers take one in turn, as in `transport.plan`."""
        ranks = enumerate(zip(self.rank_addresses, self.kv_intervals, strict=False))
        owners = [
            Lender(self.instance, rank, at, self.worker, self.epoch)
            for rank, (at, held) in ranks
            if head in held
        ]
        return owners[asker % len(owners)] if owners else None


@dataclass(frozen=True, slots=True)
class ReceiptOrder:
    key: ShipmentKey
    num_tokens: int  # of the whole prompt
    first_block: int  # blocks (ours) before it are resident, and are not written
    block_table: tuple[int, ...]  # of the whole prompt
    prefill_instance: str
    source_intervals: tuple[HeadInterval, ...]  # the KV heads of each prefill rank
    timeout_s: float
    source_block_size: int = 0  # tokens; 0: as ours
    # Where damaged cells can be fetched from by a call: the prefill ranks, and others that hold
    # blocks of this prompt, which know them by these names.
    source_addresses: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    block_names: tuple[bytes, ...] = ()  # of the full blocks, from the first on

    @classmethod
    def from_proto(cls, order: rank_pb2.ReceiptOrder) -> "ReceiptOrder":
        return cls(
            ShipmentKey.from_proto(order.key),
            order.num_tokens,
            order.first_block,
            tuple(order.block_table),
            order.prefill_instance,
            intervals_from(order.kv_head_starts, order.kv_head_stops),
            order.timeout_ms / 1000,
            order.source_block_size,
            tuple(order.source_addresses),
            tuple(map(Holder.from_proto, order.holders)),
            tuple(order.block_names),
        )

    def to_proto(self) -> rank_pb2.ReceiptOrder:
        return rank_pb2.ReceiptOrder(
            key=self.key.to_proto(),
            num_tokens=self.num_tokens,
            first_block=self.first_block,
            block_table=self.block_table,
            prefill_instance=self.prefill_instance,
            kv_head_starts=[interval.start for interval in self.source_intervals],
            kv_head_stops=[interval.stop for interval in self.source_intervals],
            timeout_ms=round(self.timeout_s * 1000),
            source_block_size=self.source_block_size,
            source_addresses=self.source_addresses,
            holders=[holder.to_proto() for holder in self.holders],
            block_names=self.block_names,
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one decode rank received; the first tokens come to rank 0 alone."""

    chunks: int = 0
    bytes: int = 0
    first_tokens: tuple[FirstToken, ...] = ()

    @classmethod
    def from_proto(cls, receipt: rank_pb2.Receipt) -> "Receipt":
        return cls(receipt.chunks, receipt.bytes, tuple(receipt.first_tokens))

    def to_proto(self) -> rank_pb2.Receipt:
        return rank_pb2.Receipt(
            chunks=self.chunks, bytes=self.bytes, first_tokens=self.first_tokens
        )


def intervals_from(starts: Iterable[int], stops: Iterable[int]) -> tuple[HeadInterval, ...]:
    """Raises ValueError when the lists differ in length or a rank holds no heads."""
    intervals = tuple(HeadInterval(*bounds) for bounds in zip(starts, stops, strict=True))
    for rank, interval in enumerate(intervals):
        if interval.start >= interval.stop:
            raise ValueError(f"rank {rank} holds KV heads {interval.start}..{interval.stop}: none")
    return intervals
