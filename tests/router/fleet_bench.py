"""A fleet whose mirror, clock and channels are in a test's hands."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from engine.clock import ManualClock
from kvcache.block_hash import PUBLIC, BlockHash, Namespace, name_blocks
from prefix_index.index import Load, Manifest, Role, WorkerRecord
from prefix_index.prefix_table import Run
from router.fleet import Fleet
from router.journal import journal
from router.snapshot import Asked, Snapshot
from tests.router.fakes import IDLE, MANIFEST, MODEL, PROMPT


class FakeMirror:
    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []
        self.reads = 0
        self.held: dict[str, int] = {}
        self.in_host: dict[str, int] = {}
        self.held_under: dict[tuple[bytes, ...], dict[str, int]] = {}  # where names matter
        self.asked: list[Sequence[bytes]] = []

    @property
    def version(self) -> int:
        """Another one each time: tests change `records` as they like."""
        self.reads += 1
        return self.reads

    def workers(self) -> list[WorkerRecord]:
        return self.records

    def runs(self, names: Sequence[bytes]) -> Mapping[str, Run]:
        self.asked.append(names)
        held = self.held_under.get(tuple(names), self.held)
        return {
            worker: Run(num_blocks, min(num_blocks, self.in_host.get(worker, 0)))
            for worker, num_blocks in held.items()
        }


class FakeChannel:
    def __init__(self) -> None:
        self.closed = False

    async def close(self, grace: float | None) -> None:
        self.closed = True


class Leg:
    def __init__(self) -> None:
        self.reason = ""

    def lose(self, reason: str) -> None:
        self.reason = reason


class Bench:
    """A fleet whose mirror, clock and channels are in the test's hands."""

    def __init__(self) -> None:
        self.mirror = FakeMirror()
        self.clock = ManualClock()
        self.channels: list[FakeChannel] = []
        self.lines = io.StringIO()
        self.fleet = Fleet(
            self.mirror, MODEL.unfit, self.connect, self.clock, journal(self.lines), doubt_s=2.0
        )

    def connect(self, address: str) -> Any:
        self.channels.append(FakeChannel())
        return self.channels[-1]

    def show(self, *records: WorkerRecord) -> None:
        self.mirror.records = list(records)
        self.fleet.refresh()

    def snapshot(self, **options: Any) -> Snapshot:
        return self.fleet.snapshot(Asked(len(PROMPT), b"key"), names, **options)


def names(namespace: Namespace, block_size: int) -> list[BlockHash]:
    return name_blocks(namespace, PUBLIC, PROMPT, block_size)


def record(
    name: str, *, epoch: int = 1, load: Load = IDLE, manifest: Manifest = MANIFEST
) -> WorkerRecord:
    role = Role(name.partition("-")[0])
    address = "127.0.0.1:1"
    return WorkerRecord(
        name,
        role,
        f"{name}-life-{epoch}",
        epoch,
        address,
        "",
        (address,),
        ((0, 3),),
        manifest,
        load,
    )


def refusals(snapshot: Snapshot) -> dict[str, str]:
    replicas = [*snapshot.replicas.prefills, *snapshot.replicas.decodes]
    return {each.name: each.refused for each in replicas}
