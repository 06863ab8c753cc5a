"""What all C sources have in common: how they are compiled, loaded and done without."""

import ctypes
import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import (
    best_tokens,
    chained_digests,
    compiled,
    crew,
    host_cells,
    host_decoder,
    host_exchange,
    kept_rows,
    packed_linear,
)
from kernels.compiled import Unfit, loaded
from prefix_index import compact_table
from tests.conftest import SANITIZED

EVERY = {
    "prompts are named by hashlib": chained_digests._load,
    "cells are gathered, scattered and digested by numpy": host_cells.load,
    "cells are copied by threads of Python": crew.load,
    "digests are kept by numpy": kept_rows.load,
    "the likeliest tokens are found by torch": best_tokens._load,
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


def refuse(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be made in the folder, whoever asks: root may where others may not."""
    make = tempfile.TemporaryDirectory

    def refused(dir: Path) -> "tempfile.TemporaryDirectory[str]":
        if dir == folder:
            raise OSError(number, os.strerror(number), str(dir))
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_where_the_sources_may_not_be_written_all_processes_of_a_user_share_one_library(
    source: Path, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    refuse(source.parent / "__pycache__", number, monkeypatch)
    assert load(source, lambda library: int(library.answer())) == 42
    (library,) = (tmp_path / "tmp").rglob("*.so")
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert compiled.compiled(source) == library


def test_a_library_is_not_taken_from_a_folder_that_others_may_write(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refuse(source.parent / "__pycache__", errno.EROFS, monkeypatch)
    open_to_all = tmp_path / f"kvferry-kernels-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert load(source, lambda library: int(library.answer())) is None
    assert caplog.messages == [
        f"nobody answers: {open_to_all} is not this user's alone: remove it, or set TMPDIR"
    ]


def test_a_sanitized_library_ends_who_reads_past_the_end_of_memory(source: Path) -> None:
    asked = ["cc", "-print-file-name=libasan.so"]
    library = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(library).is_file():
        pytest.skip("this compiler has no sanitizer")
    source.write_text("char answer(char *text) { return text[4]; }\n")
    script = (
        "import ctypes, sys; from pathlib import Path; from kernels.compiled import compiled;"
        "room = ctypes.CDLL(None).malloc; room.restype = ctypes.c_void_p;"
        "made = compiled(Path(sys.argv[1]), *sys.argv[2:]);"
        "ctypes.CDLL(str(made)).answer(ctypes.c_void_p(room(4)))"
    )
    for flags, says in (((), ""), (SANITIZED, "heap-buffer-overflow")):
        preloaded = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"} if flags else {}
        command, environment = [sys.executable, "-c", script, str(source)], os.environ | preloaded
        done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) == (not flags), done.stderr
        assert says in done.stderr
