"""A prefill worker that dials decode workers where a file says, for tests with proxies.

`python proxied_prefill.py DIAL_FILE ROLE...`: DIAL_FILE maps the addresses that decode workers
announce to those of the proxies that stand before them; the rest is `kvferry`'s own command line.
"""

import json
import sys
from pathlib import Path

import grpc.aio

from kvferry.__main__ import main
from transport import grpc_wire
from transport.grpc_options import channel_options


def dial_by(file: Path) -> None:
    instead: dict[str, str] = json.loads(file.read_text())

    def open_channel(address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(instead[address], options=channel_options())

    grpc_wire._open_channel = open_channel


if __name__ == "__main__":
    dial_by(Path(sys.argv.pop(1)))
    main()
