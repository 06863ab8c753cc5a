"""What a transport has seen since it started, for metrics and for tests."""

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounts:
    completed: int = 0
    failed: int = 0
    expired: int = 0  # of them, because the other end fell silent
    chunks: int = 0
    bytes: int = 0
    resent_chunks: int = 0
    damaged_chunks: int = 0
    damaged_cells: int = 0
    repaired_cells: int = 0  # fetched again, whole
    resent_cells: int = 0  # over the link they came damaged over
    pulled_cells: int = 0  # over a call of their own
    duplicate_chunks: int = 0
    bad_chunks: int = 0
    stale_frames: int = 0  # of another epoch or attempt, or of a transfer nobody knows
    late_frames: int = 0  # of a transfer that has ended
    links_lost: int = 0
    ends_asked: int = 0  # of shipments whose link went between the last chunk and Commit
    links_refused: int = 0
    wires_quarantined: int = 0  # of a prefill rank, as too much came damaged over them
    workers_quarantined: int = 0  # prefill workers, as it came so over several of their wires
    wires_cleared: int = 0  # by a transfer that came whole after the cool-down
