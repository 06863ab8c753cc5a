"""Prompts are as equal as the trace says, in every process, and no more."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from kvferry.errors import CommandError
from kvferry.replay.trace import Trace, read_trace
from kvferry.serve_bench.command import paced
from kvferry.serve_bench.workload import Workload


def mooncake(folder: Path, *requests: tuple[int, list[int]], **more: object) -> Trace:
    lines = [
        {"timestamp": 1000 * at, "input_length": length, "output_length": 64, "hash_ids": ids}
        | more
        for at, (length, ids) in enumerate(requests)
    ]
    path = folder / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return read_trace(path)


def test_equal_blocks_are_equal_tokens_and_tails_are_like_no_other(tmp_path: Path) -> None:
    requests = [(1100, [0, 1, 2]), (1100, [0, 1, 2]), (1100, [0, 3, 4]), (1100, [9, 1, 5])]
    workload = Workload(mooncake(tmp_path, *requests), vocabulary=256)
    first, again, forked, other = (workload.ask(at).prompt for at in range(4))
    assert len(first) == 1100 and set(first) <= set(range(256))
    assert first[:1024] == again[:1024] and first[1024:] != again[1024:]
    assert first[:512] == forked[:512] and first[512:1024] != forked[512:1024]
    assert first[512:1024] != other[512:1024], "a block stands for what is before it, too"


def test_prompts_are_the_same_in_every_process_and_others_for_another_seed(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, (600, [7, 8]))
    prompts = [Workload(trace, 256, seed).ask(0).prompt for seed in (0, 0, 1)]
    digest = sha256(bytes(prompts[0])).hexdigest()
    assert digest == "a5939692743776aa6889b40404d22b586e656480fea1d765fe08bff3e8fbd7df"
    assert prompts[0] == prompts[1] and prompts[0][:512] != prompts[2][:512]


def test_shrinking_divides_every_length_and_keeps_what_is_equal(tmp_path: Path) -> None:
    small = mooncake(tmp_path, (1100, [0, 1, 2]), (1025, [0, 1, 4])).shrunk(32)
    assert small.block_tokens == 16
    assert [each.num_tokens for each in small.arrivals] == [32 + 3, 32 + 1]
    assert [each.output_tokens for each in small.arrivals] == [2, 2]
    assert small.arrivals[0].names == small.arrivals[1].names
    with pytest.raises(CommandError, match="--shrink 7 does not divide the trace's blocks of 512"):
        small = mooncake(tmp_path, (1100, [0, 1, 2])).shrunk(7)


def test_a_rate_keeps_the_bursts(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, *[(600, [at]) for at in range(5)])
    assert [each.at_s for each in paced(trace, 4.0, 1.0).arrivals] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert paced(trace, None, 8.0).duration_s == 0.5
    with pytest.raises(CommandError, match="--rate 4 and --speed-up 8 contradict each other"):
        paced(trace, 4.0, 8.0)


def test_tenants_sessions_and_priorities_are_read_and_tenants_share_nothing(tmp_path: Path) -> None:
    known = mooncake(tmp_path, (512, [0]), tenant="a", session_id="s", priority=2).arrivals[0]
    assert (known.tenant, known.session, known.priority) == ("a", "s", 2)
    assert mooncake(tmp_path, (512, [0]), tenant="b").arrivals[0].names != known.names
