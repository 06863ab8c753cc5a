"""Digests of KV cells: what a receiver checks before it lets bytes into live blocks.

A cell is (block, layer, KV head, plane) over [tokens, width] in row order. Its digest is xxh3-64 of
its bytes and nothing else, so every tensor-parallel split of the same cache agrees on the numbers.
"""

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kernels import host_cells


def cell_digests_reference(cells: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """What `cell_digests` means."""
    num_cells, cell_bytes = cells.shape
    raw = np.ascontiguousarray(cells).reshape(-1).data
    return np.fromiter(
        (xxh3_64_intdigest(raw[i * cell_bytes : (i + 1) * cell_bytes]) for i in range(num_cells)),
        dtype=np.uint64,
        count=num_cells,
    )


def cell_digests(cells: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The digest of each row of `cells`, [num_cells, cell_bytes]."""
    host = host_cells.load()
    if host is None:
        return cell_digests_reference(cells)
    return host.digests(np.ascontiguousarray(cells))


def bad_cells(cells: NDArray[np.uint8], digests: NDArray[np.uint64]) -> NDArray[np.intp]:
    """The rows of `cells`, [num_cells, cell_bytes], that are not what their digests say.

    `digests` has one for each row.
    """
    assert len(cells) == len(digests), f"{len(cells)} cells, {len(digests)} digests"
    return np.flatnonzero(cell_digests(cells) != digests)


def digests_to_bytes(digests: NDArray[np.uint64]) -> bytes:
    """As they travel: u64 each, little-endian."""
    return digests.astype("<u8", copy=False).tobytes()


def digests_from_bytes(raw: bytes) -> NDArray[np.uint64]:
    """Those that `digests_to_bytes` made of them, and may not be changed."""
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64, copy=False)
