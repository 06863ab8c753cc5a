"""What the benchmark plans, counts and leaves behind; one small run of it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvferry.bench_report import Row, row, table
from kvferry.cli import app
from kvferry.errors import CommandError
from kvferry.transfer_bench import alone
from kvferry.transfer_bench.case import BLOCK_BYTES, NUM_KV_HEADS, NUM_LAYERS, Case, spec
from kvferry.transfer_bench.plan import Wanted, cases, parse_pairs, wanted_of

KNOWN = ", digests known"


def test_each_dimension_is_varied_by_itself() -> None:
    wanted = Wanted(("tcp",), (16, 2), (1, 3), ((1, 1), (2, 4)), (True, False))
    assert [str(case) for case in cases(wanted)] == [
        "tcp: 1 x 8 MiB, TP 1 to 1",
        "tcp: 1 x 8 MiB, TP 1 to 1, no digests",
        "tcp: 1 x 8 MiB, TP 1 to 1, digested as sealed",
        "tcp: 1 x 8 MiB, TP 1 to 1, no digests, just written",
        "tcp: 1 x 8 MiB, TP 1 to 1, digests known",
        "tcp: 1 x 1 MiB, TP 1 to 1",
        "tcp: 1 x 1 MiB, TP 1 to 1, digested as sealed",
        "tcp: 3 x 8 MiB, TP 1 to 1",
        "tcp: 1 x 8 MiB, TP 2 to 4",
    ]


def test_shm_is_measured_without_a_pool_to_read_too() -> None:
    wanted = Wanted(("shm",), (16,), (1,), ((1, 1),), (True,))
    assert [str(case) for case in cases(wanted)] == [
        "shm: 1 x 8 MiB, TP 1 to 1",
        "shm: 1 x 8 MiB, TP 1 to 1, digested as sealed",
        "shm: 1 x 8 MiB, TP 1 to 1, digests known",
        "shm: 1 x 8 MiB, TP 1 to 1, by the ring",
    ]


def test_a_case_counts_all_its_bytes() -> None:
    case = Case("tcp", num_blocks=16, concurrency=3, chunk_bytes=1 << 20, window_bytes=8 << 20)
    assert (case.total_bytes, case.in_flight, case.num_tokens) == (24 << 20, 2, 256)
    assert case.message_bytes == 4 << 20


def test_a_message_of_the_limit_is_as_large_as_a_chunk_of_ours_can_be() -> None:
    """A chunk is of one pair of ranks: 64 KiB a block and layer, shared by their heads. Over tcp it
    may be of several layers.
    """
    sizes = [
        Case("tcp", 16, chunk_bytes=8 << 20, window_bytes=32 << 20),
        Case("tcp", 256, chunk_bytes=8 << 20, window_bytes=32 << 20),
        Case("tcp", 100, chunk_bytes=8 << 20, window_bytes=32 << 20),
        Case("tcp", 128, 1, 4, 2, chunk_bytes=8 << 20, window_bytes=32 << 20),
        Case("gloo", 128, 1, 4, 2, chunk_bytes=8 << 20, window_bytes=32 << 20),
    ]
    found = [(case.message_bytes >> 20, case.in_flight) for case in sizes]
    assert found == [(8, 4), (32, 1), (25, 1), (16, 2), (2, 16)]


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    assert parse_pairs(["1x4", "2x2"]) == ((1, 4), (2, 2))
    with pytest.raises(CommandError, match="looks like 1x4, not '0x1'"):
        parse_pairs(["0x1"])
    with pytest.raises(CommandError, match="no wire 'pigeon'"):
        wanted_of(["pigeon"], None, None, None, "both", None)
    with pytest.raises(CommandError, match="not 'maybe'"):
        wanted_of(None, None, None, None, "maybe", None)


def test_a_row_compares_medians() -> None:
    found = row("tcp", [1.0, 2.0, 4.0], [2.0, 4.0, 5.0], "mooncake", [1.0, 1.0, 9.0])
    assert found == Row("tcp", 2.0, "GB/s", "mooncake", 1.0, 2.0, 4.0, 0.5, 3, 1.5)
    console = Console(width=200, record=True)
    console.print(table([found]))
    assert "2.00 GB/s" in console.export_text()


@pytest.mark.timeout(120)
def test_where_two_processes_copy_the_cells_calls_alone_are_measured_too(tmp_path: Path) -> None:
    out, wires = tmp_path / "transfer.json", ("tcp", "grpc", "gloo")
    flags = ["--blocks", "2", "--concurrency", "1", "--pair", "1x1", "--runs", "1"]
    flags += [word for wire in wires for word in ("--wire", wire)]
    flags += ["--digests", "on", "--peer-python", sys.executable, "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "transfer", *flags])
    assert done.exit_code == 0, done.output
    rows = [each for each in json.loads(out.read_text())["rows"] if "without" in each["what"]]
    cases = [f"{wire}: 1 x 1 MiB, TP 1 to 1{how}" for wire in wires for how in ("", KNOWN)]
    assert [each["what"] for each in rows] == [f"{case}: without the transport" for case in cases]
    assert all(each["ours"] > 0 and each["limit"] > 0 for each in rows)


@pytest.mark.parametrize("wire", ["tcp", "grpc", "gloo"])
async def test_the_cells_calls_alone_carry_every_cell(wire: str) -> None:
    case = Case(wire, num_blocks=5, chunk_bytes=2 * BLOCK_BYTES, window_bytes=6 * BLOCK_BYTES)
    source, sink = (KvStore(spec(), HeadInterval(0, NUM_KV_HEADS), 5) for _ in range(2))
    for layer in range(NUM_LAYERS):
        source.layer(layer).uniform_()
        sink.layer(layer).zero_()
    there = await alone.serve(case, sink, [4, 0, 3, 1, 2])
    await alone.push(case, source, [0, 1, 2, 3, 4], there[0])
    await there[1]
    for layer in range(NUM_LAYERS):
        assert torch.equal(sink.layer(layer)[[4, 0, 3, 1, 2]], source.layer(layer))


@pytest.mark.timeout(120)
def test_a_small_run_leaves_its_rows_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "out" / "transfer.json"
    flags = ["--blocks", "2", "--concurrency", "2", "--pair", "1x2", "--runs", "1"]
    wires = ["--wire", "shm", "--wire", "tcp", "--wire", "grpc"]
    flags += ["--peer-python", sys.executable, "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "transfer", *wires, *flags])
    assert done.exit_code == 0, done.output
    as_it_goes = done.output.partition("┏")[0]
    # 16 cases with a second limit, six with their CPU, and one of each wire with what its digests
    # took before it.
    assert as_it_goes.count("2 x 1 MiB, TP 1 to 2") == 41
    rows = json.loads(out.read_text())["rows"]
    cold = [each for each in rows if each["what"].endswith(": beside the limit, cold to cold")]
    measured = [each["what"] for each in rows if each["unit"] == "GB/s" and each not in cold]
    special = (", digested as sealed", ", no digests, just written", KNOWN)
    usual = ("", ", no digests", *special)
    ways = {"shm": (*usual, ", by the ring"), "tcp": usual, "grpc": usual}
    assert measured == [f"{wire}: 2 x 1 MiB, TP 1 to 2{how}" for wire in ways for how in ways[wire]]
    assert [each["what"].partition(": beside")[0] for each in cold] == measured
    keys = [
        "what",
        "ours",
        "unit",
        "peer",
        "peer_value",
        "ratio",
        "limit",
        "share_of_limit",
        "runs",
        "spread",
    ]
    assert [list(each) for each in rows] == [keys] * len(rows)
    assert all(each["ours"] > 0 and each["limit"] > 0 for each in rows if each["unit"] == "GB/s")
    sealing = [each for each in rows if each["unit"] == "ms"]
    sealed = [what for what in measured if what.endswith(special[0])]
    assert [each["what"] for each in sealing] == [f"{what}: digesting before it" for what in sealed]
    assert all(each["ours"] > 0 for each in sealing)
    costs = [each["what"] for each in rows if each["unit"] == "ms/MiB"]
    plain = [what for what in measured if not what.endswith((*special, ", by the ring"))]
    assert costs == [f"{what}: CPU of both ends" for what in plain]
    assert out.with_suffix(".png").stat().st_size > 0
