import io

import pytest
from rich.console import Console

from kvferry.errors import CommandError
from kvferry.plan import Workload, as_asked, estimates, geometry_of, plan


def shown(workload: Workload) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    plan(workload, console)
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    (found,) = (cells for cells in rows if cells[0] == name)
    return found


def test_the_70b_geometry_needs_what_the_formula_says() -> None:
    text = shown(Workload("llama-70b", 128_000, batch=32))
    assert row(text, "as it is") == ["as it is", "39.1 GiB", "1250.0 GiB", "1.0x"]
    assert row(text, "FP8")[2:] == ["625.0 GiB", "2.0x"]
    assert row(text, "layers shared by pairs")[2:] == ["625.0 GiB", "2.0x"]
    assert row(text, "window of 32,000 tokens")[2:] == ["312.5 GiB", "4.0x"]
    assert row(text, "FP8 and pairs") == ["FP8 and pairs", "9.8 GiB", "312.5 GiB", "4.0x"]
    assert "8,000 blocks of 16 tokens a sequence, 256,000 in all" in text


@pytest.mark.parametrize(
    ("workload", "gib"),
    [
        (Workload("llama-70b", 128_000, 32, share_layers=2), 625.0),
        (Workload("llama-70b", 128_000, 32, window=32_000), 312.5),
        (Workload("llama-70b", 128_000, 32, dtype="float8_e4m3fn", share_layers=2), 312.5),
        (Workload("llama-70b", 128_000, 32, bytes_per_value=0.5, share_layers=4), 78.125),
    ],
)
def test_what_was_asked_for_stands_in_the_first_row(workload: Workload, gib: float) -> None:
    spec = geometry_of(workload).spec
    first = estimates(spec, as_asked(spec, workload), workload, 128_000)[0]
    assert first.name == "as asked"
    assert first.batch_bytes == gib * 2**30


def test_each_rank_is_told_its_own_heads_and_share() -> None:
    text = shown(Workload("llama-70b", 128_000, batch=32, tp=3))
    assert "rank 0: KV heads 0, 1, 2: 468.8 GiB" in text
    assert "rank 2: KV heads 6, 7: 312.5 GiB" in text


def test_a_real_model_is_planned_from_its_own_file() -> None:
    text = shown(Workload("smollm2", None))
    assert "30 layers, 3 KV heads  8,192 tokens x 1 sequence " in text
    # 2 planes x 30 layers x 3 heads x 64 x 8,192 tokens x 2 bytes
    assert row(text, "as it is")[1:3] == ["180.0 MiB", "180.0 MiB"]


@pytest.mark.parametrize(
    ("workload", "sentence"),
    [
        (Workload("llama-70b", 10, dtype="float3"), "float3"),
        (Workload("llama-70b", 10, block_size=3), "block size 3 is not a power of two"),
        (Workload("llama-70b", 10, tp=65), "65"),
        (Workload("llama-70b", 10, share_layers=2, window=5), "full"),
        (Workload("/nonexistent.gguf", 10), "nonexistent.gguf .* a plan knows llama-70b, too"),
        (Workload("llama-70b", 10, bytes_per_value=-1), "--bytes-per-value must be .* got -1"),
        (Workload("llama-70b", 10, bytes_per_value=float("nan")), "at most 16, got nan"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_sentence(
    workload: Workload, sentence: str
) -> None:
    with pytest.raises(CommandError, match=sentence):
        shown(workload)
