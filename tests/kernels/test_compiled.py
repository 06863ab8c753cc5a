"""What all C sources have in common: how they are compiled, loaded and done without."""

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import (
    chained_digests,
    compiled,
    host_cells,
    host_decoder,
    host_exchange,
    packed_linear,
)
from kernels.compiled import Unfit, loaded
from prefix_index import compact_table

EVERY = {
    "prompts are named by hashlib": chained_digests._load,
    "cells are gathered, scattered and digested by numpy": host_cells.load,
    "ranks exchange what they compute over gloo": host_exchange.load,
    "the decoder is computed by torch": host_decoder.load,
    "packed weights are multiplied by torch": packed_linear.load,
    "the prefix table is kept in Python": compact_table.load,
}
ANSWER = "int answer(void) { return 42; }\n"
SIGNATURES: compiled.Signatures = {"answer": (ctypes.c_int, [])}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text(ANSWER)
    return path


def load(source: Path, make: Callable[[ctypes.CDLL], int]) -> int | None:
    return loaded(source, signatures=SIGNATURES, make=make, otherwise="nobody answers")


@pytest.mark.parametrize("otherwise", EVERY)
def test_where_nothing_compiles_the_log_says_what_does_the_work_instead(
    otherwise: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise FileNotFoundError("cc")

    monkeypatch.setattr(compiled, "compiled", fail)
    assert EVERY[otherwise].__wrapped__() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(otherwise)
    assert record.getMessage().endswith(": cc")


def test_what_is_made_of_the_library_is_what_loaded_gives(source: Path) -> None:
    assert load(source, lambda library: int(library.answer())) == 42


def test_a_source_that_does_not_compile_is_said_in_the_compiler_s_first_line(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int answer(void) { return 42 }\n")
    assert load(source, lambda library: int(library.answer())) is None
    assert caplog.messages[0].startswith("nobody answers: ")
    assert "answer.c" in caplog.messages[0] and "\n" not in caplog.messages[0]


def test_a_library_that_does_not_do_what_it_should_is_not_used(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tried(library: ctypes.CDLL) -> int:
        raise Unfit("the answer is not 43")

    assert load(source, tried) is None
    assert caplog.messages == ["nobody answers: the answer is not 43"]


def test_a_source_that_needs_linux_is_not_compiled_elsewhere(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = loaded(
        source, signatures=SIGNATURES, make=id, otherwise="nobody answers", needs_linux=True
    )
    assert found is None
    assert caplog.messages == ["nobody answers: answer.c needs Linux"]
    assert not (source.parent / "__pycache__").exists()


def test_a_changed_source_or_flag_is_another_library(source: Path) -> None:
    first = compiled.compiled(source)
    assert compiled.compiled(source) == first
    assert compiled.compiled(source, "-lm") != first
    source.write_text(ANSWER.replace("42", "43"))
    assert compiled.compiled(source) != first
    assert load(source, lambda library: int(library.answer())) == 43
