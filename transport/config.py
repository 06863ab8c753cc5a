"""The numbers of a transport, for both ends."""

from dataclasses import dataclass

CHUNK_BYTES = 8 << 20  # what each costs both ends besides its bytes is about what 2 MiB cost
WINDOW_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TransportConfig:
    chunk_bytes: int = CHUNK_BYTES  # of payload, unless one block is larger
    window_bytes: int = WINDOW_BYTES  # unacknowledged, per shipment and pair of ranks
    max_resends: int = 3  # of a chunk that was dropped whole, then its cells are pulled
    max_link_asks: int = 3  # for one damaged cell, over the link it came over
    max_link_damages: int = 3  # chunks of one transfer, then its cells are pulled
    max_calls: int = 2  # for one damaged cell, to the prefill rank; then whoever else holds it
    repair_wait_s: float = 2.0  # for cells asked for over a link, before they are asked for again
    call_timeout_s: float = 10.0  # for one call that pulls cells
    max_call_bytes: int = 64 << 20  # that one such call may ask for
    max_staged_chunks: int = 64  # received and not yet scattered, per link
    copy_threads: int = 2  # that gather or scatter, and digest
    lease_s: float = 30.0  # of silence, after which the other end counts as gone
    open_wait_s: float = 5.0  # for the order an early Open belongs to
    send_timeout_s: float = 30.0  # for one frame, before the link counts as stuck
    # A link that damages more than an accident explains is left alone for a while, and then tried
    # again with one transfer: see `transport.quarantine`.
    damage_window_s: float = 300.0  # in which a link's cells are counted, fading
    max_damage_share: float = 1e-4  # of them, and beyond it, the wire is quarantined; 1: never
    forgiven_chunks: int = 3  # damaged in that time, that are not held against a link
    suspect_wires: int = 2  # of one prefill worker in quarantine at once: then it is the worker
    cool_down_s: float = 60.0  # of the first quarantine; one soon after it lasts twice as long
    max_cool_down_s: float = 3600.0
    max_remembered: int = 4096  # ended transfers, so that late frames are known for what they are

    @property
    def renew_s(self) -> float:
        """A few lost or late renewals must not end a lease, however short it is."""
        return self.lease_s / 6

    @property
    def resend_after_s(self) -> float:
        """Without an answer to a chunk."""
        return self.lease_s / 3

    @property
    def tick_s(self) -> float:
        """Of the reaper."""
        return min(0.5, self.lease_s / 12)
