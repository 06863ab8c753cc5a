"""The numbers of a transport, for both ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportConfig:
    chunk_bytes: int = 1 << 20  # of payload, unless one block is larger
    window_bytes: int = 8 << 20  # unacknowledged, per shipment and pair of ranks
    max_resends: int = 3  # of one damaged chunk, then DATA_LOSS
    max_staged_chunks: int = 64  # received and not yet scattered, per link
    copy_threads: int = 2  # that gather or scatter, and digest
    lease_s: float = 30.0  # of silence, after which the other end counts as gone
    renew_s: float = 5.0
    resend_after_s: float = 10.0  # without an answer to a chunk
    tick_s: float = 1.0  # of the reaper
    open_wait_s: float = 5.0  # for the order an early Open belongs to
    send_timeout_s: float = 30.0  # for one frame, before the link counts as stuck
    max_remembered: int = 4096  # ended transfers, so that late frames are known for what they are
