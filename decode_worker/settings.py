"""What a decode worker is told at start."""

from typing import Annotated

from pydantic import Field

from transport.config import TransportConfig
from worker.settings import Count, Seconds, Times, WorkerSettings

OPEN_WAIT_S = 5.0  # for the router's other leg, beyond the wait for blocks


class DecodeSettings(WorkerSettings):
    """A decode group.

    `max_reserving` requests may wait for blocks at once, each for at most `reserve_wait_s`;
    beyond either the answer is RESOURCE_EXHAUSTED with a retry hint.
    """

    max_reserving: Annotated[int, Field(ge=0)] = 64
    reserve_wait_s: Annotated[float, Field(ge=0, le=600)] = 10.0

    # How a damaged cell is had again: over its link, by calls to prefill, from other holders.
    max_resends: Times = 3  # of a chunk whose header is damaged, then its cells are asked for
    max_link_asks: Times = 3  # for one cell, over the link it came over
    max_link_damages: Count = 3  # chunks of one transfer, then its cells are had by calls
    max_calls: Times = 2  # for one cell, to the prefill rank
    repair_wait_s: Seconds = 2.0  # for cells asked for over a link, before they are asked for again
    call_timeout_s: Seconds = 10.0  # for one call that brings cells

    suspect_wires: Count = 2  # of one prefill worker in quarantine at once: then it is the worker

    def transport(self) -> TransportConfig:
        """The numbers of this worker's end of its transfers."""
        return TransportConfig(
            **self.any_transport(),
            max_resends=self.max_resends,
            max_link_asks=self.max_link_asks,
            max_link_damages=self.max_link_damages,
            max_calls=self.max_calls,
            repair_wait_s=self.repair_wait_s,
            call_timeout_s=self.call_timeout_s,
            open_wait_s=self.reserve_wait_s + OPEN_WAIT_S,
            suspect_wires=self.suspect_wires,
        )
