"""One engine in a process, and an environment, of its own: does what a line of JSON asks for.

    python child.py NAME MODEL THREADS [WEIGHTS]

The first line out says that the first token has been made. Then:

    {"do": "prefill", "tokens": 512}                the seconds to the first token of a new prompt
    {"do": "grow", "batch": 4, "context": 512}      adds sequences of such a length, up to so many,
                                                    and steps once unless "step" is false
    {"do": "decode", "steps": 12}                   the seconds of so many steps of them all
    {"do": "end"}                                   lets go of the sequences
"""

import json
import random
import sys
import time
from typing import Any, Protocol

VOCABULARY = 49_000
LONGEST = 2_700  # tokens of a sequence
MOST = 16  # sequences
ROOM = 832  # tokens for each of so many


def prompt(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(17, VOCABULARY) for _ in range(num_tokens)]


class Engine(Protocol):
    @property
    def size(self) -> int:
        """How many sequences it holds."""

    def prefill(self, prompts: list[list[int]]) -> None:
        """To the first token of each; the sequences stay, beside those that were there."""

    def step(self) -> None:
        """One more token for every sequence."""

    def clear(self) -> None: ...


def share_of(model: str, threads: int, weights: Any, comm: Any, num_blocks: int) -> Any:
    """One rank's (source, loaded model, store)."""
    import torch

    from kvcache import host_memory
    from kvcache.head_map import HeadMap
    from kvcache.kv_store import KvStore
    from model.source import open_model

    host_memory.keep_freed()  # as every worker does
    torch.set_num_threads(threads)
    source = open_model(model)
    config: Any = source.config
    heads = HeadMap.even(config.num_query_heads, config.num_kv_heads, comm.size)
    loaded = source.load(heads, comm.rank, comm, weights=weights)
    return source, loaded, KvStore(loaded.spec, heads.kv[comm.rank], num_blocks)


class Kvferry:
    """The engine that workers run, stepped by hand: scheduling and sampling are part of it."""

    def __init__(
        self,
        model: str,
        threads: int,
        weights: Any = "dense",
        comm: Any = None,
        most: int = MOST,
        share: Any = share_of,
    ) -> None:
        from engine.clock import MonotonicClock
        from engine.engine import Engine as KvferryEngine
        from engine.engine import EngineConfig
        from kvcache.block_hash import Namespace
        from kvcache.block_pool import BlockPool
        from model.comm import SingleComm

        comm = comm or SingleComm()
        num_blocks = most * ROOM // 16
        _, loaded, store = share(model, threads, weights, comm, num_blocks)
        self.pool_bytes = num_blocks * loaded.spec.bytes_per_block(len(store.kv_heads))
        self._engine = KvferryEngine(
            EngineConfig(), loaded, store, BlockPool(num_blocks), comm,
            Namespace(b"bench".ljust(32)), MonotonicClock(),
        )  # fmt: skip
        self._requests: list[Any] = []
        self._heard: dict[str, int] = {}

    @property
    def size(self) -> int:
        return len(self._requests)

    def prefill(self, prompts: list[list[int]]) -> None:
        from engine.request import Request, TokenOutput
        from engine.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
        for number, tokens in enumerate(prompts, self.size):

            def hear(output: object, number: int = number) -> None:
                self._heard[str(number)] += isinstance(output, TokenOutput)

            self._heard[str(number)] = 0
            key = self._engine.new_key()
            request = Request(str(number), key, tuple(tokens), params, hear)
            self._engine.add(request)
            self._requests.append(request)
        while not all(self._heard.values()):
            self._engine.step()

    def step(self) -> None:
        self._engine.step()

    def clear(self) -> None:
        for request in self._requests:
            self._engine.cancel(request)
        while self._engine.step():
            pass
        self._engine.flush_cache()
        self._requests.clear()
        self._heard.clear()


class Transformers:
    """Eager, with its own cache; each sequence of the batch as long as the others, and all alike,
    since its cache cannot take in another one.
    """

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._cache: Any = None
        self._next: Any = None

    @property
    def size(self) -> int:
        return 0 if self._next is None else len(self._next)

    def prefill(self, prompts: list[list[int]]) -> None:
        if self.size:
            times = 1 + len(prompts) // self.size
            self._cache.batch_repeat_interleave(times)
            self._next = self._next.repeat_interleave(times, 0)
            return
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self._take(out)

    def step(self) -> None:
        with self._torch.inference_mode():
            self._take(self._model(self._next, past_key_values=self._cache, use_cache=True))

    def clear(self) -> None:
        self._cache = self._next = None

    def _take(self, out: Any) -> None:
        self._cache, self._next = out.past_key_values, out.logits[:, -1:].argmax(-1)


class Vllm:
    """Compiled, in this very process, without its prefix cache."""

    def __init__(self, model: str, threads: int) -> None:
        from vllm import LLM, SamplingParams

        self._engine = LLM(
            model, dtype="float32", max_model_len=LONGEST, max_num_seqs=MOST, seed=0,
            max_num_batched_tokens=4096, enable_prefix_caching=False, skip_tokenizer_init=True,
        ).llm_engine  # fmt: skip
        self._params = SamplingParams(
            max_tokens=LONGEST - 2100, temperature=0, ignore_eos=True, detokenize=False
        )
        self._ids: list[str] = []
        self._num = 0

    @property
    def size(self) -> int:
        return len(self._ids)

    def prefill(self, prompts: list[list[int]]) -> None:
        waiting = set()
        for tokens in prompts:
            self._num += 1
            name = str(self._num)
            self._engine.add_request(name, {"prompt_token_ids": tokens}, self._params)
            self._ids.append(name)
            waiting.add(name)
        while waiting:
            waiting -= {out.request_id.split("-")[0] for out in self._engine.step()}

    def step(self) -> None:
        self._engine.step()

    def clear(self) -> None:
        self._engine.abort_request(self._ids)
        self._ids.clear()
        self._engine.step()


class LlamaCpp:
    """The library itself, through its Python bindings; its cache is of its default, fp16."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        self._threads = threads
        self._several = self._context = self._make_context(MOST, ROOM)
        self._alone: Any = None  # for one sequence that is longer, made when it comes
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self._lengths: list[int] = []
        self._next: list[int] = []
        self._size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _make_context(self, num_sequences: int, room: int) -> Any:
        about = self._api.llama_context_default_params()
        about.n_ctx, about.n_seq_max = num_sequences * room, num_sequences
        about.n_batch = 2048
        about.n_threads = about.n_threads_batch = self._threads
        context = self._api.llama_init_from_model(self._model, about)
        assert context, "no context"
        return context

    @property
    def size(self) -> int:
        return len(self._lengths)

    def prefill(self, prompts: list[list[int]]) -> None:
        if max(map(len, prompts)) > ROOM:
            self._alone = self._alone or self._make_context(1, LONGEST)
            self._context = self._alone
        for sequence, tokens in enumerate(prompts, self.size):
            self._decode([(token, at, sequence) for at, token in enumerate(tokens)], [-1])
            self._lengths.append(len(tokens))

    def step(self) -> None:
        rows = [
            (token, length, sequence)
            for sequence, (token, length) in enumerate(zip(self._next, self._lengths, strict=True))
        ]
        self._next = []
        self._decode(rows, range(len(rows)))
        self._lengths = [length + 1 for length in self._lengths]

    def clear(self) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, True)
        self._context = self._several
        self._lengths, self._next = [], []

    def _decode(self, rows: list[tuple[int, int, int]], wanted: Any) -> None:
        import numpy as np

        batch, places = self._batch, [row % len(rows) for row in wanted]
        batch.n_tokens = len(rows)
        for number, (token, at, sequence) in enumerate(rows):
            batch.token[number], batch.pos[number] = token, at
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, sequence
            batch.logits[number] = number in places
        assert self._api.llama_decode(self._context, batch) == 0
        for place in places:
            logits = self._api.llama_get_logits_ith(self._context, place)
            found = np.ctypeslib.as_array(logits, (self._size,)).argmax()
            self._next.append(int(found))


class Limits:
    """What the machine gives: bytes read from memory, and a large product, by torch."""

    def __init__(self, model: str, threads: int) -> None:
        import torch

        from kernels.huge_pages import huge

        torch.set_num_threads(threads)
        self._torch = torch
        self._memory = huge(1 << 27).fill_(1.0)  # such pages are read faster, and ours lie there
        self._left, self._right = torch.randn(1024, 1536), torch.randn(3072, 1536)

    def read(self) -> float:
        """The best of a few passes by two ways: torch's sum uses all threads, its dot reads best
        with one.
        """
        rates: list[float] = []
        memory: Any = self._memory
        for _ in range(3):
            for pass_over in (memory.sum, lambda: memory.dot(memory)):
                began = time.perf_counter()
                pass_over()
                rates.append(memory.nbytes / (time.perf_counter() - began))
        return max(rates)

    def multiply(self) -> float:
        flops, began = 0, time.perf_counter()
        for _ in range(8):
            self._torch.nn.functional.linear(self._left, self._right)
            flops += 2 * self._left.numel() * len(self._right)
        return flops / (time.perf_counter() - began)


ENGINES: dict[str, Any] = {
    "kvferry": Kvferry,
    "transformers": Transformers,
    "vLLM": Vllm,
    "llama.cpp": LlamaCpp,
    "limits": Limits,
}


def answer(engine: Any, asked: dict[str, Any], source: random.Random) -> float:
    if asked["do"] == "prefill" and engine.size:
        engine.clear()
    began = time.perf_counter()
    match asked["do"]:
        case "prefill":
            engine.prefill([prompt(source, asked["tokens"])])
            taken = time.perf_counter() - began
            engine.clear()
            return taken
        case "grow":
            more = asked["batch"] - engine.size
            if more > 0:
                engine.prefill([prompt(source, asked["context"]) for _ in range(more)])
            if asked.get("step", True):
                engine.step()
        case "decode":
            for _ in range(asked["steps"]):
                engine.step()
        case "end":
            engine.clear()
        case "pool bytes":
            return float(engine.pool_bytes)
        case "limits":
            return float(getattr(engine, asked["what"])())
    return time.perf_counter() - began


def main() -> None:
    name, model, threads, *weights = sys.argv[1:]
    source = random.Random(5)
    engine = ENGINES[name](model, int(threads), *weights)
    if name != "limits":
        answer(engine, {"do": "prefill", "tokens": 16}, source)
    print("ANSWER " + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print("ANSWER " + json.dumps(answer(engine, json.loads(line), source)), flush=True)


if __name__ == "__main__":
    main()
