"""Every format gives the same thing: arrivals with lengths and named blocks."""

import json
from pathlib import Path

import pytest

from kvferry.errors import CommandError
from kvferry.replay.trace import read_trace


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def mooncake(at_ms: int, length: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": length, "output_length": 3, "hash_ids": ids}


def test_equal_ids_after_equal_ids_are_equal_blocks(tmp_path: Path) -> None:
    lines = [
        mooncake(2000, 1536, [0, 1, 2]),
        mooncake(1000, 1536, [0, 1, 3]),
        mooncake(3000, 1536, [9, 1, 2]),
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    first, second, third = trace.arrivals
    assert trace.block_tokens == 512
    assert [each.at_s for each in trace.arrivals] == [0.0, 1.0, 2.0]
    assert first.names[:2] == second.names[:2] and first.names[2] != second.names[2]
    assert not set(third.names) & set(second.names)


def test_a_partial_last_block_has_no_name(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", mooncake(0, 1535, [0, 1, 2])))
    assert len(trace.arrivals[0].names) == 2


def test_token_ids_are_named_in_blocks_of_sixteen(tmp_path: Path) -> None:
    line = {"t": 5.0, "prompt_token_ids": list(range(40)), "max_tokens": 7}
    (arrival,) = read_trace(write(tmp_path / "t.jsonl", line)).arrivals
    assert (arrival.num_tokens, arrival.output_tokens, len(arrival.names)) == (40, 7, 2)


def test_a_session_that_goes_on_shares_its_text_so_far(tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    text = "What was said before is said again. " * 20
    write(
        tmp_path / "sessions" / "a.jsonl",
        {"timestamp": 1_000_000, "input": text, "output": "yes", "session_id": "a"},
        {"timestamp": 3_000_000, "input": text + "And more. " * 9, "output": "", "session_id": "a"},
    )
    first, second = read_trace(tmp_path / "sessions").arrivals
    assert (first.num_tokens, len(first.names)) == (180, 11)
    assert second.names[:11] == first.names and second.at_s == 2.0


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,1100,10\n"
        "2023-11-16 18:17:04.4799600,1100,8\n"
    )
    first, second = read_trace(path).arrivals
    assert len(first.names) == len(second.names) == 2
    assert not set(first.names) & set(second.names)
    assert second.at_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no request"),
        ('{"timestamp": 0, "hash_ids": []}', "line 1 is no request: KeyError: 'input_length'"),
        ('{"hash_ids": [', "line 1 is no request: JSONDecodeError"),
        ('\n\n{"input": ["a"], "timestamp": 0}', "line 3 is no request: AttributeError"),
        (json.dumps(mooncake(0, 9, [])) + "\n7", "line 2 is no request: TypeError"),
        ('{"t": NaN, "prompt_token_ids": [1], "max_tokens": 1}', "line 1: it comes at nan s"),
        (json.dumps(mooncake(0, 0, [])), "line 1: impossible lengths: 0 and 3 tokens"),
    ],
)
def test_what_cannot_be_read_says_where(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=reason):
        read_trace(path)


def test_blank_lines_are_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(mooncake(0, 600, [1])) + "\n\n")
    assert [each.num_tokens for each in read_trace(path).arrivals] == [600]


def test_what_is_no_text_and_a_folder_without_sessions_are_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    for name in ("t.jsonl", "t.csv"):
        (tmp_path / name).write_bytes(bytes(range(128, 256)))
        with pytest.raises(CommandError, match=f"{name} is no trace: 'utf-8' codec"):
            read_trace(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CommandError, match="holds no request: a folder is read for its"):
        read_trace(tmp_path / "empty")
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01,5\n")
    with pytest.raises(CommandError, match="line 2 is no request: TypeError"):
        read_trace(tmp_path / "t.csv")
