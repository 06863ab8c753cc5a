"""How a pool's memory may be laid out. What passes between two workers does not depend on it."""

from enum import StrEnum


class KvLayout(StrEnum):
    """In which order a pool's memory runs; see `MEMORY_ORDER`."""

    HEAD_MAJOR = "head-major"  # a cell is one run of memory: the quickest to send and to attend
    TOKEN_MAJOR = "token-major"
    PLANE_MAJOR = "plane-major"  # all keys before all values


# The slowest dimension first: N blocks, P planes, H KV heads, S slots, D head dim.
MEMORY_ORDER = {
    KvLayout.HEAD_MAJOR: "NHPSD",
    KvLayout.TOKEN_MAJOR: "NPSHD",
    KvLayout.PLANE_MAJOR: "PNSHD",
}
