"""What is measured: one load over one wire, and what the same machine could do at most."""

from dataclasses import asdict, dataclass
from typing import Any

from kvcache.spec import CacheSpec
from transport.config import CHUNK_BYTES, WINDOW_BYTES
from transport.outgoing_pair import STREAMED_CHUNKS

NUM_LAYERS = 8
NUM_KV_HEADS = 8
NUM_QUERY_HEADS = 32
BLOCK_BYTES = 64 << 10  # of one layer, all heads: 16 tokens, 8 heads, K and V of 64 float32


@dataclass(frozen=True, slots=True)
class Case:
    """`concurrency` prompts at once, of `num_blocks` blocks each."""

    wire: str
    num_blocks: int
    concurrency: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    digests: bool = True  # off only here, to see what they cost
    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = WINDOW_BYTES
    show_pool: bool = True  # on shm: decode reads prefill's pool; else all goes through a ring
    known: bool = False  # prefill has the digests from before, and need not make them
    # Prefill writes its blocks before each transfer, as steps do, layer by layer, and digests them
    # as it seals them: that is timed by itself, and the transfer from the last seal on.
    sealed: bool = False
    host: str = "127.0.0.1"  # decode's, as prefill reaches it; another one for grpc and tcp only

    @property
    def total_bytes(self) -> int:
        return self.concurrency * self.num_blocks * NUM_LAYERS * BLOCK_BYTES

    @property
    def message_bytes(self) -> int:
        """Of one message: a chunk, or what a pair of ranks has of a layer if that is less; over
        tcp, of as many layers as a chunk takes and all are a multiple of.
        """
        layer_bytes = self.num_blocks * BLOCK_BYTES // max(self.prefill_tp, self.decode_tp)
        if self.wire != "tcp":
            return min(self.chunk_bytes, layer_bytes)
        chunk_bytes = STREAMED_CHUNKS * self.chunk_bytes
        whole = (n for n in range(NUM_LAYERS, 0, -1) if NUM_LAYERS % n == 0)
        num_layers = next((n for n in whole if n * layer_bytes <= chunk_bytes), 1)
        return min(chunk_bytes, num_layers * layer_bytes)

    @property
    def in_flight(self) -> int:
        """Messages that may be under way at once, for the limit to be measured alike."""
        return max(1, self.window_bytes // self.message_bytes)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * spec().block_size

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Case":
        return cls(**fields)

    def __str__(self) -> str:
        size = self.num_blocks * NUM_LAYERS * BLOCK_BYTES / 2**20
        digests = "" if self.digests else ", no digests"
        if self.known:
            digests += ", digests known"
        if self.sealed:
            digests += ", digested as sealed" if self.digests else ", just written"
        if not self.show_pool:
            digests += ", by the ring"
        return (
            f"{self.wire}: {self.concurrency} x {size:.0f} MiB, "
            f"TP {self.prefill_tp} to {self.decode_tp}{digests}"
        )


def spec() -> CacheSpec:
    return CacheSpec.full(NUM_LAYERS, NUM_KV_HEADS, 64, block_size=16, dtype="float32")
