"""A link between two network namespaces, in user space: rate, delay, drop tail, loss, partition.

`python -m kvferry.lab.link_emulator NAMESPACE DEVICE NAMESPACE DEVICE SHAPE SEED`

1  a TUN device opens in each namespace     "{}" goes to standard output
2  packets go from one to the other         each lane says when, in `kvferry/lab/lane.py`
3  a line on standard input                 changes one lane; the answer is what both have carried
4  standard input ends                      so do the devices: whoever started us has ended

One process for each link, one thread; `select` because epoll would wait whole milliseconds.
"""

import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.lab.lane import Lane
from kvferry.lab.netns import in_namespace, open_tun
from kvferry.lab.topology import Shape

MAX_PACKET_BYTES = 65_536
MAX_READ_AT_ONCE = 32  # then see what is due
BURST_S = 0.004  # how late a busy machine may let us look at what came in
PRIORITY = -10  # a late packet is a wrong measurement


@dataclass(slots=True)
class Way:
    """What goes one way: read here, on its way there."""

    lane: Lane
    source: int
    target: int
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take_in(self) -> None:
        for _ in range(MAX_READ_AT_ONCE):
            try:
                packet = os.read(self.source, MAX_PACKET_BYTES)
            except OSError:  # nothing more for now, or the device is down
                return
            arrival = self.lane.offer(time.monotonic(), len(packet))
            if arrival is not None:
                self.under_way.append((arrival, packet))

    def put_out(self) -> None:
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the device is down: nobody is there to receive
                os.write(self.target, self.under_way[0][1])
            self.under_way.popleft()

    def change(self, changes: dict[str, Any]) -> None:
        self.lane.is_cut = changes["is_cut"]
        self.lane.shape = Shape(**changes["shape"])
        if self.lane.is_cut:
            self.under_way.clear()  # packets on a line that is cut do not arrive


def emulate(ways: Sequence[Way], control_in: int, control_out: int) -> None:
    """Run the link until `control_in` ends."""
    requests = b""
    while True:
        due = [way.under_way[0][0] for way in ways if way.under_way]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([way.source for way in ways] + [control_in], [], [], timeout)
        for way in ways:
            if way.source in readable:
                way.take_in()
            way.put_out()
        if control_in in readable:
            received = os.read(control_in, MAX_PACKET_BYTES)
            if not received:
                return
            *lines, requests = (requests + received).split(b"\n")
            for line in lines:
                _answer(json.loads(line), ways, control_out)


def _answer(request: dict[str, Any], ways: Sequence[Way], control_out: int) -> None:
    if request:
        ways[request["way"]].change(request)
    counts = [asdict(way.lane.counts) for way in ways]
    os.write(control_out, json.dumps(counts).encode() + b"\n")


def main(arguments: Sequence[str]) -> None:
    namespaces, devices = arguments[0:4:2], arguments[1:4:2]
    shape, seed = Shape(**json.loads(arguments[4])), int(arguments[5])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    one, other = (
        in_namespace(namespace, lambda device=device: open_tun(device))  # type: ignore[misc]
        for namespace, device in zip(namespaces, devices, strict=True)
    )
    lanes = (Lane(shape, seed, BURST_S), Lane(shape, seed + 1, BURST_S))
    ways = (Way(lanes[0], one, other), Way(lanes[1], other, one))
    os.write(sys.stdout.fileno(), b"{}\n")
    emulate(ways, sys.stdin.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
