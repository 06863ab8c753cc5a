"""A one-process worker around the checksum model, stepped by hand, its books checked each step."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from engine.clock import MonotonicClock
from engine.engine import Engine, EngineConfig
from engine.request import Admitted, Failed, Output, Request, TokenOutput
from engine.runner import SliceObserver
from engine.sampling_params import SamplingParams
from kvcache.block_hash import PUBLIC, Namespace, TenantKey
from kvcache.block_pool import BlockPool
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.checksum import ChecksumModel
from model.checksum_reference import checksum_continuation
from model.comm import Comm, SingleComm
from model.config import ChecksumConfig
from model.model import Model
from model.tokenizer import byte_tokenizer

torch.set_num_threads(1)

CONFIG = ChecksumConfig()
NAMESPACE = Namespace(b"small worker".ljust(32))


def truth(prompt: list[int], max_tokens: int) -> list[int]:
    return checksum_continuation(CONFIG, prompt, max_tokens)


def words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(length)]


@dataclass(eq=False)
class Heard:
    """What one request's listener was told, in order."""

    request_id: str
    num_choices: int = 1  # 0: it never ends by its tokens
    outputs: list[Output] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __call__(self, output: Output) -> None:
        assert not self.ended, f"{self.request_id} was told {output} after its end"
        self.outputs.append(output)
        if self.ended:
            self._end.set()

    def wait(self, timeout_s: float = 20.0) -> None:
        """For an engine with a thread of its own."""
        assert self._end.wait(timeout_s), f"{self.request_id} has not ended"

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Token ids by choice; raises if an index was skipped or repeated."""
        by_choice: dict[int, list[int]] = defaultdict(list)
        for output in self.outputs:
            if isinstance(output, TokenOutput):
                assert output.index == len(by_choice[output.choice])
                by_choice[output.choice].append(output.token_id)
        return dict(by_choice)

    @property
    def text(self) -> list[int]:
        """The tokens of choice 0."""
        return self.tokens.get(0, [])

    @property
    def finishes(self) -> dict[int, str]:
        return {
            output.choice: output.finish_reason
            for output in self.outputs
            if isinstance(output, TokenOutput) and output.finish_reason
        }

    @property
    def failure(self) -> Failed | None:
        last = self.outputs[-1] if self.outputs else None
        return last if isinstance(last, Failed) else None

    @property
    def num_cached(self) -> int:
        (admitted,) = [output for output in self.outputs if isinstance(output, Admitted)]
        return admitted.num_cached_tokens

    @property
    def ended(self) -> bool:
        return self.failure is not None or 0 < self.num_choices == len(self.finishes)


class SmallWorker:
    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = 16,
        comm: Comm | None = None,
        model: Model | None = None,
        observer: SliceObserver | None = None,
        tokenizer: bool = True,
        config: ChecksumConfig = CONFIG,
        lost_rank: Callable[[], str | None] = lambda: None,
        on_death: Callable[[Exception], None] = lambda error: None,
        random: Random | None = None,
        **engine: Any,
    ) -> None:
        comm = comm or SingleComm()
        self.heads = HeadMap.even(config.num_query_heads, config.num_kv_heads, comm.size)
        self.model = model or ChecksumModel(config, self.heads, comm, block_size)
        self.store = KvStore(self.model.spec, self.heads.kv[0], num_blocks)
        self.store.poison()
        self.other_stores: list[KvStore] = []  # of ranks 1 and up
        self.pool = BlockPool(num_blocks)
        self.engine = Engine(
            EngineConfig(**engine),
            self.model,
            self.store,
            self.pool,
            comm,
            NAMESPACE,
            MonotonicClock(),
            tokenizer=byte_tokenizer() if tokenizer else None,
            observer=observer,
            lost_rank=lost_rank,
            on_death=on_death,
            random=random or Random(7),
        )
        self.heard: list[Heard] = []

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        tenant: TenantKey = PUBLIC,
        hold: bool = False,
        max_chunk_tokens: int = 0,
        eos: tuple[int, ...] = (),
        name: str = "",
        **sampling: Any,
    ) -> tuple[Request, Heard]:
        sampling.setdefault("temperature", 0.0)
        params = SamplingParams(max_tokens, **sampling)
        heard = Heard(name or f"request {len(self.heard)}", 0 if hold else params.n)
        self.heard.append(heard)
        request = Request(
            heard.request_id,
            self.engine.new_key(),
            list(prompt),
            params,
            heard,
            tenant=tenant,
            eos_token_ids=eos,
            hold=hold,
            max_chunk_tokens=max_chunk_tokens,
        )
        return request, heard

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Heard:
        request, heard = self.request(prompt, max_tokens, **options)
        self.engine.add(request)
        return heard

    def step(self) -> bool:
        moved = self.engine.step()
        self.engine.check()
        return moved

    def drain(self, limit: int = 10_000) -> int:
        """Step until nothing moves; return how many steps that took."""
        for count in range(limit):
            if not self.step():
                return count
        raise AssertionError(f"still busy after {limit} steps")

    def ask(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Heard:
        heard = self.add(prompt, max_tokens, **options)
        self.drain()
        return heard

    def is_empty(self) -> bool:
        books = self.engine.books()
        blocks = books.used_blocks + books.promised_blocks
        return blocks + books.running_requests + books.waiting_requests == 0
