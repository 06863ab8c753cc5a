"""Pages of a ledger: in memory, or in mapped files that outlive the process however it dies.

A page begins with what is brought forward, so it can be read without the pages before it.
"""

import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvcache.ledger_row import ROW, ROW_BYTES, Extract, Origin, Rows

MAGIC = b"KVLEDGE1"
HEADER_BYTES = 1024  # of a page file, before its rows


@dataclass(frozen=True, slots=True)
class PageConfig:
    rows_per_page: int = 16_384  # 1 MiB
    num_kept: int = 4
    folder: Path | None = None  # None: in memory alone


class Page:
    def __init__(self, number: int, first_seq: int, memory: memoryview, path: Path | None) -> None:
        self.number = number
        self.first_seq = first_seq
        self.memory = memory
        self.size = memory.nbytes
        self.used = 0
        self._num_forward = 0
        self._path = path
        self._map: mmap.mmap | None = None

    @classmethod
    def open(
        cls, origin: Origin, config: PageConfig, number: int, first_seq: int, forward: Rows
    ) -> "Page":
        """Raises OSError when the folder does not take it, with nothing left there."""
        size = (len(forward) + config.rows_per_page) * ROW_BYTES
        if config.folder is None:
            page = cls(number, first_seq, memoryview(bytearray(size)), None)
        else:
            name = f"{origin.worker}.{origin.instance}.rank{origin.rank}.{number:06d}.ledger"
            path = config.folder / name
            config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = json.dumps({**asdict(origin), "first_seq": first_seq, "page": number}).encode()
            header = MAGIC + len(about).to_bytes(4, "little") + about
            if len(header) > HEADER_BYTES:
                raise ValueError(f"ledger header of {origin} is {len(header)} > {HEADER_BYTES}")
            mapped = _mapped(path, HEADER_BYTES + size)
            mapped[: len(header)] = header
            page = cls(number, first_seq, memoryview(mapped)[HEADER_BYTES:], path)
            page._map = mapped
        data = forward.tobytes()
        page.memory[: len(data)] = data
        page.used = len(data)
        page._num_forward = len(forward)
        return page

    def rows(self, *, own: bool = False) -> Rows:
        """A copy; with `own`, without what was brought forward."""
        start = self._num_forward * ROW_BYTES if own else 0
        return np.frombuffer(bytes(self.memory[start : self.used]), dtype=ROW)

    def flush(self) -> None:
        if self._map is not None:
            self._map.flush()

    def discard(self) -> None:
        if self._map is not None and self._path is not None:
            self.memory.release()
            self._map.close()
            self._path.unlink(missing_ok=True)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A new file of zeros in memory, all of it there: on a full disk a hole is a SIGBUS later."""
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, f"{error.strerror}, {size} bytes", str(path)) from None


def read_pages(paths: Iterable[Path]) -> list[Extract]:
    """Page files, in any order, as one extract for each process. Raises ValueError for others."""
    found: dict[Origin, list[tuple[int, int, Rows]]] = {}
    for path in paths:
        data = path.read_bytes()
        if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
            raise ValueError(f"{path} is no page of a ledger")
        start = len(MAGIC) + 4
        length = int.from_bytes(data[len(MAGIC) : start], "little")
        try:
            about = json.loads(data[start : start + length])
            first_seq, page = about.pop("first_seq"), about.pop("page")
            origin = Origin(**about)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has a damaged header: {error}") from None
        body = data[HEADER_BYTES : len(data) - (len(data) - HEADER_BYTES) % ROW_BYTES]
        rows = np.frombuffer(body, dtype=ROW)
        written = np.flatnonzero(rows["seq"])  # a torn row at the end has none yet
        rows = rows[: written[-1] + 1 if len(written) else 0]
        found.setdefault(origin, []).append((page, first_seq, rows))
    return [_joined(origin, pages) for origin, pages in found.items()]


def _joined(origin: Origin, pages: list[tuple[int, int, Rows]]) -> Extract:
    """Pages of one process from the newest on that has no gap before it."""
    pages.sort(key=lambda page: page[0])
    start = len(pages) - 1
    while start and pages[start - 1][0] == pages[start][0] - 1:
        start -= 1
    (_, first_seq, rows), rest = pages[start], pages[start + 1 :]
    parts = [rows, *(own[own["seq"] >= first] for _, first, own in rest)]
    return Extract(origin, np.concatenate(parts), first_seq)
