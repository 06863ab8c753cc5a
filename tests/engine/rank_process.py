"""A rank of a checksum worker, as a process of its own: `python -m tests.engine.rank_process`."""

import sys

from engine import follower
from engine.rank_group import GroupConfig, join
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.checksum import ChecksumModel
from model.config import ChecksumConfig


def main() -> None:
    seat, rest = join(sys.argv[1:])
    if "--fall-at-once" in rest:
        raise SystemExit(3)
    settings = seat.wait("settings", timeout_s=30)
    seat.publish(f"rank/{seat.rank}", {"rank": seat.rank, "arguments": rest})
    comm = seat.connect(GroupConfig(size=settings["size"]))
    config = ChecksumConfig()
    heads = HeadMap.even(config.num_query_heads, config.num_kv_heads, settings["size"])
    model = ChecksumModel(config, heads, comm, 16)
    follower.run(model, KvStore(model.spec, heads.kv[comm.rank], settings["num_blocks"]), comm)


if __name__ == "__main__":
    main()
