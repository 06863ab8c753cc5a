"""Drives the ranks of one model through paged stores, the way an engine would."""

import random
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.batch import Batch
from model.comm import Comm, SingleComm, ThreadComm
from model.model import Model

MakeModel = Callable[[HeadMap, Comm], Model]


class PagedRun:
    """`tp` ranks as threads, each with its own poisoned store; blocks are dealt in random order."""

    def __init__(
        self, make: MakeModel, head_map: HeadMap, num_blocks: int = 64, seed: int = 0
    ) -> None:
        comms: Sequence[Comm] = ThreadComm.group(head_map.tp) if head_map.tp > 1 else [SingleComm()]
        self._comms = comms
        self.models = [make(head_map, comm) for comm in comms]
        spec = self.models[0].spec
        self.block_size = spec.block_size
        self.stores = [KvStore(spec, heads, num_blocks) for heads in head_map.kv]
        for store in self.stores:
            store.poison()
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.layers_seen: list[int] = []

    def step(self, work: dict[str, Sequence[int]], rows: Sequence[int] | None = None) -> Tensor:
        """Append each sequence's new tokens in one batch; logits of each last row, or of `rows`."""
        batch = self._batch(work, rows)
        results: list[Tensor | None] = [None] * len(self.models)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            on_layer = self.layers_seen.append if rank == 0 else lambda layer: None
            try:
                results[rank] = self.models[rank].forward(batch, self.stores[rank], on_layer)
            except BaseException as error:
                errors.append(error)
                self._abort(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert all(result is None for result in results[1:])
        logits = results[0]
        assert logits is not None and logits.dtype == torch.float32
        return logits

    def prefill(self, name: str, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
        """The logits of every position of a new sequence, computed in chunks."""
        size = chunk or len(tokens)
        parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return torch.cat([self.step({name: part}, range(len(part))) for part in parts])

    def greedy(self, name: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        output = [int(self.step({name: prompt})[0].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step({name: output[-1:]})[0].argmax()))
        return output

    def _abort(self, rank: int) -> None:
        comm = self._comms[rank]
        if isinstance(comm, ThreadComm):
            comm.abort()

    def _batch(self, work: dict[str, Sequence[int]], rows: Sequence[int] | None) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in work.items():
            table = self.tables.setdefault(name, [])
            start = self.lengths.get(name, 0)
            self.lengths[name] = start + len(tokens)
            while len(table) * self.block_size < start + len(tokens):
                table.append(self._free.pop())
            ids += tokens
            positions += range(start, start + len(tokens))
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, start + len(tokens))
            ]
            starts.append(len(ids))
        widest = max(len(self.tables[name]) for name in work)
        padded = [self.tables[name] + [0] * (widest - len(self.tables[name])) for name in work]
        if rows is None:
            rows = [start - 1 for start in starts[1:]]
        return Batch(
            token_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            query_starts_S1=torch.tensor(starts),
            context_lens_S=torch.tensor([self.lengths[name] for name in work]),
            block_tables_SB=torch.tensor(padded),
            logit_rows_R=torch.tensor(list(rows), dtype=torch.int64),
        )
