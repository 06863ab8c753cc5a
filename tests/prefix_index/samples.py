"""Workers, pools and blocks to test with."""

from collections.abc import Iterable

from kvcache.block_hash import BlockHash
from kvcache.block_pool import Removed, Stored, Tier
from prefix_index.index import BlockEvent, Load, Manifest, Role, WorkerRecord

MANIFEST = Manifest(
    protocol=1,
    model="smollm2",
    namespace="ab" * 32,
    block_size=16,
    dtype="float32",
    num_layers=30,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    vocab_size=49152,
    wires=("grpc", "gloo"),
)

IDLE = Load(
    running=0,
    waiting=0,
    queued_tokens=0,
    free_blocks=100,
    total_blocks=100,
    prefill_ms_per_token=0.5,
    decode_step_ms=20.0,
    draining=False,
)


def worker(name: str = "w0", epoch: int = 1, load: Load = IDLE) -> WorkerRecord:
    return WorkerRecord(
        name=name,
        role=Role.PREFILL,
        instance=f"{name}-{epoch}",
        epoch=epoch,
        address="127.0.0.1:50061",
        system_address="127.0.0.1:9090",
        rank_addresses=("127.0.0.1:50062", "127.0.0.1:50063"),
        kv_intervals=((0, 2), (2, 3)),
        manifest=MANIFEST,
        load=load,
    )


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def blocks(numbers: Iterable[int]) -> list[BlockHash]:
    return [block(number) for number in numbers]


def stored(*numbers: int) -> list[BlockEvent]:
    return [Stored(block(number), None) for number in numbers]


def removed(*numbers: int) -> list[BlockEvent]:
    return [Removed(block(number)) for number in numbers]


class Pool:
    """A worker's cache as its announcer sees it."""

    def __init__(self, load: Load = IDLE) -> None:
        self.names: dict[BlockHash, Stored] = {}
        self.events: list[BlockEvent] = []
        self.load = load

    def store(self, *numbers: int, tier: Tier = Tier.DEVICE) -> None:
        """A block that is there moves to `tier`. Its depth is its number."""
        for number in numbers:
            entry = Stored(block(number), None, number, tier)
            if self.names.get(entry.name) != entry:
                self.names[entry.name] = entry
                self.events.append(entry)

    def remove(self, *numbers: int) -> None:
        for name in blocks(numbers):
            if self.names.pop(name, None) is not None:
                self.events.append(Removed(name))

    def source(self) -> tuple[Load, list[BlockEvent]]:
        events, self.events = self.events, []
        return self.load, events

    def resident(self) -> list[BlockEvent]:
        return list(self.names.values())


def walk(names: list[BlockHash], held: Iterable[bytes]) -> int:
    """The longest run from the first on, the plain way."""
    present = set(held)
    length = 0
    while length < len(names) and names[length] in present:
        length += 1
    return length
