"""Where one request went and what it cost, gathered from what its workers say."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.clock import Clock
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.forecast import Forecast
from router.hit_rate import HitRate, Loss, account
from router.legs import Work


@dataclass(slots=True)
class Journey:
    """Times are the clock's, in seconds. The last attempt counts, save where a field says so."""

    clock: Clock
    prompt_tokens: int
    accepted_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    attempts: int = 0
    prefill: str = ""
    decode: str = ""
    wire: str = ""
    prefill_block_size: int = 1
    decode_block_size: int = 1
    # When the request was first routed; see `hit_rate`.
    oracle_tokens: int = 0
    anybodys_tokens: int = 0  # the oracle's, if tenants shared their blocks
    available_tokens: int = 0
    captured_tokens: int = 0
    promised_tokens: int = 0
    gone: Sequence[tuple[Loss, int]] = ()
    cached_tokens: int | None = None  # the least over all attempts: what nobody computed
    prefill_cached_tokens: int = 0
    fetched_tokens: int = 0  # of the cached ones, at most; the most over all attempts
    last_fetched_tokens: int = 0  # in the last one
    holder: str = ""
    fetched_bytes: int = 0
    fetch_ms: float = 0.0
    decode_cached_blocks: int = 0
    computed_tokens: int | None = None
    shipped_blocks: int = 0
    shipped_bytes: int = 0
    transfer_ms: float = 0.0
    queue_ms: float = 0.0  # as the worker that computed the prompt says
    compute_ms: float = 0.0
    forecast: Forecast | None = None  # of the last attempt

    def set_out(self, work: Work, forecast: Forecast | None = None) -> None:
        """Another attempt starts."""
        self.attempts += 1
        self.forecast = forecast
        self.queue_ms = self.compute_ms = 0.0
        self.prefill = work.prefill.name if work.prefill else ""
        self.decode = work.decode.name
        self.wire = work.wires[0] if work.wires else ""
        self.decode_block_size = work.decode.record.manifest.block_size
        source = work.prefill or work.decode
        self.prefill_block_size = source.record.manifest.block_size
        self.prefill_cached_tokens = 0
        self.holder = work.holder.name if work.holder else ""
        self.last_fetched_tokens = self.fetched_bytes = 0
        self.fetch_ms = 0.0
        self.decode_cached_blocks = 0
        self.computed_tokens = None
        self.shipped_blocks = self.shipped_bytes = 0
        self.transfer_ms = 0.0

    def token(self) -> None:
        self.last_token_at = self.clock.now()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at

    def prefill_cached(self, cached_tokens: int) -> None:
        """Said at admission, and again with the first tokens, recounted."""
        self.prefill_cached_tokens = cached_tokens
        self._cached(cached_tokens)

    def first_tokens(self, said: wpb.FirstTokens) -> None:
        self.prefill_cached(said.cached_tokens)
        self.queue_ms, self.compute_ms = said.queue_ms, said.compute_ms
        self.last_fetched_tokens = said.fetched_tokens
        self.fetched_tokens = max(self.fetched_tokens, said.fetched_tokens)
        self.fetched_bytes, self.fetch_ms = said.fetched_bytes, said.fetch_ms

    def prefill_done(self, done: wpb.PrefillDone) -> None:
        self.computed_tokens = done.computed_tokens
        self.shipped_bytes = max(self.shipped_bytes, done.shipped_bytes)
        self.transfer_ms = done.transfer_ms

    def decode_reserved(self, reserved: wpb.DecodeReserved) -> None:
        self.decode_cached_blocks = reserved.cached_blocks

    def decode_adopted(self, adopted: wpb.DecodeAdopted) -> None:
        self.shipped_blocks = adopted.shipped_blocks
        self.shipped_bytes = max(self.shipped_bytes, adopted.shipped_bytes)

    def decode_done(self, done: wpb.DecodeDone) -> None:
        if not self.prefill:
            self.computed_tokens = done.computed_tokens
            self.decode_cached_blocks = done.cached_tokens // self.decode_block_size
            self._cached(done.cached_tokens)
            self.queue_ms, self.compute_ms = done.queue_ms, done.compute_ms

    @property
    def computed(self) -> bool:
        """Whether the last attempt has computed its prompt, as far as anyone has said."""
        return self.first_token_at is not None or self.computed_tokens is not None

    @property
    def spared_tokens(self) -> int:
        """Prompt tokens that nobody computed."""
        return min(self.cached_tokens or 0, self.prompt_tokens)

    @property
    def _fetched(self) -> int:
        return min(self.fetched_tokens, self.spared_tokens)

    @property
    def hit_rate(self) -> HitRate:
        return account(
            prompt=self.prompt_tokens,
            oracle=self.oracle_tokens,
            available=self.available_tokens,
            captured=self.captured_tokens,
            promised=self.promised_tokens,
            delivered=self.spared_tokens - self._fetched,
            fetched=self._fetched,
            gone=self.gone,
            anybodys=self.anybodys_tokens,
        )

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.accepted_at

    @property
    def ttft_after_choice_s(self) -> float | None:
        """Since the only attempt set out; None where several were made, or no token came."""
        if self.forecast is None or self.first_token_at is None or self.attempts != 1:
            return None
        return self.first_token_at - self.forecast.made_at

    def tpot_s(self, tokens_per_choice: int) -> float | None:
        if self.first_token_at is None or self.last_token_at is None or tokens_per_choice < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (tokens_per_choice - 1)

    def usage(self, completion_tokens: int, tokens_per_choice: int) -> pb.Usage:
        computed = self.computed_tokens
        return pb.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=self.spared_tokens,
            journey=pb.Journey(
                prefill=self.prefill,
                decode=self.decode,
                wire=self.wire,
                prompt_blocks=-(-self.prompt_tokens // self.decode_block_size),
                prefill_cached_blocks=self.prefill_cached_tokens // self.prefill_block_size,
                decode_cached_blocks=self.decode_cached_blocks,
                prefill_block_size=self.prefill_block_size if self.prefill else 0,
                decode_block_size=self.decode_block_size,
                computed_tokens=(
                    self.prompt_tokens - self.spared_tokens if computed is None else computed
                ),
                shipped_blocks=self.shipped_blocks,
                shipped_bytes=self.shipped_bytes,
                transfer_ms=self.transfer_ms,
                ttft_ms=1000 * (self.ttft_s or 0.0),
                tpot_ms=1000 * (self.tpot_s(tokens_per_choice) or 0.0),
                attempts=self.attempts,
                holder=self.holder,
                fetched_tokens=self.last_fetched_tokens,
                fetched_bytes=self.fetched_bytes,
                fetch_ms=self.fetch_ms,
            ),
        )

    def _cached(self, cached_tokens: int) -> None:
        known = self.cached_tokens
        self.cached_tokens = cached_tokens if known is None else min(known, cached_tokens)
