import io
from dataclasses import replace
from datetime import datetime

from rich.console import Console

from kvferry.ps import quarantines, unusable_pairs, worker_table
from prefix_index.index import Load, Manifest, Role, WorkerRecord
from prefix_index.quarantine import Quarantine
from protos.worker_pb2 import InspectResponse, PoolBooks

MANIFEST = Manifest(
    protocol=1,
    model="smollm2",
    namespace="00",
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
LOAD = Load(
    running=1,
    waiting=2,
    queued_tokens=30,
    free_blocks=60,
    total_blocks=64,
    prefill_ms_per_token=1.0,
    decode_step_ms=10.0,
    draining=False,
)


def worker(name: str, role: Role, manifest: Manifest = MANIFEST) -> WorkerRecord:
    return WorkerRecord(
        name=name,
        role=role,
        instance="ab",
        epoch=7,
        address="127.0.0.1:1",
        system_address="127.0.0.1:2",
        rank_addresses=("127.0.0.1:1", "127.0.0.1:3"),
        kv_intervals=((0, 2), (2, 3)),
        manifest=manifest,
        load=LOAD,
    )


def test_a_pair_that_will_never_be_routed_is_named_with_its_reason() -> None:
    odd = worker("prefill-1", Role.PREFILL, replace(MANIFEST, dtype="bfloat16"))
    workers = [worker("prefill-0", Role.PREFILL), odd, worker("decode-0", Role.DECODE)]
    assert unusable_pairs(workers) == [
        "prefill-1 cannot serve decode-0: dtype differs: bfloat16 here, float32 there"
    ]
    assert unusable_pairs(workers[::2]) == []
    large = worker("prefill-2", Role.PREFILL, replace(MANIFEST, block_size=32))
    assert unusable_pairs([large, *workers[::2]]) == []


def test_a_missing_half_is_said() -> None:
    assert unusable_pairs([worker("prefill-0", Role.PREFILL)]) == [
        "no decode worker: nothing can be served"
    ]
    assert unusable_pairs([worker("decode-0", Role.DECODE)]) == [
        "no prefill worker: decode computes every prompt itself"
    ]


def test_the_table_shows_each_workers_own_books_or_that_it_does_not_answer() -> None:
    books = PoolBooks(total_blocks=64, free_blocks=50, cached_blocks=10, used_blocks=4)
    answer = InspectResponse(pool=books, running_requests=3, draining=True)
    workers = [worker("decode-0", Role.DECODE), worker("prefill-0", Role.PREFILL)]
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(worker_table(workers, [answer, "UNAVAILABLE: gone"]))
    shown = console.export_text()
    assert "[0..2) [2..3)" in shown
    assert "4 + 10 / 64" in shown
    assert "of 16 tokens, head-major" in shown
    assert "draining" in shown
    assert "no answer (UNAVAILABLE: gone)" in shown


def test_a_quarantine_is_told_with_pair_wire_time_and_reason() -> None:
    reason = "9 of the last 4,000 cells came damaged over gloo"
    held = Quarantine("prefill-0", 7, "gloo", 61.2, 58.8, reason)
    odd = Quarantine("prefill-1", 7, "", 5.0, 55.0, "cells came damaged over grpc and gloo")
    dead = replace(held, epoch=6)
    calls = Quarantine("prefill-0", 7, "call", 61.2, 58.8, "9 of 10 cells came damaged")
    load = replace(LOAD, quarantines=(held, odd, dead))
    decode = worker("decode-0", Role.DECODE).with_load(load)
    workers = [worker("prefill-0", Role.PREFILL), worker("prefill-1", Role.PREFILL), decode]
    fetcher = workers[1].with_load(replace(LOAD, quarantines=(calls,)))
    assert quarantines([workers[0], fetcher], datetime(2026, 1, 2, 10, 30)) == [
        "prefill-0 (epoch 7) to prefill-1: what calls bring is in quarantine since 10:28:58, "
        "for 59 s more: 9 of 10 cells came damaged"
    ]
    assert quarantines(workers, datetime(2026, 1, 2, 10, 30)) == [
        "prefill-0 (epoch 7) to decode-0: the wire gloo is in quarantine since 10:28:58, "
        f"for 59 s more: {reason}",
        "prefill-1 (epoch 7) to decode-0: every wire is in quarantine since 10:29:55, "
        "for 55 s more: cells came damaged over grpc and gloo",
    ]
    assert unusable_pairs(workers) == [
        "prefill-1 cannot serve decode-0: too much of what it sends comes damaged"
    ]
