"""What docs/transfer.md promises has a test or a benchmark; no frame and no state is left out. What
any page calls by its dotted name is there.
"""

import re
from pathlib import Path

from protos.transfer_pb2 import Frame
from transport.shipment import Receiving, Sending

ROOT = Path(__file__).parents[1]
TRANSFER = (ROOT / "docs" / "transfer.md").read_text()
NAMED = re.compile(r"`(test_\w+|make bench-\w+)`")
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)\(", flags=re.MULTILINE)

FOLDERS = "kernels|protos|kvcache|model|engine|transport|prefix_index|worker|router|kvferry"
DOTTED = re.compile(rf"`((?:prefill_|decode_)?(?:{FOLDERS})(?:\.\w+)+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of every row, without the heads of the tables."""
    tables = re.findall(r"^\|.*\n\| ---.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def first_cells(heading: str) -> set[str]:
    section = TRANSFER.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {row[0] for row in rows(section)}


def test_every_test_and_benchmark_that_is_named_exists() -> None:
    defined = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(DEFINED.findall(path.read_text()))
    defined |= {f"make bench-{path.stem}" for path in (ROOT / "bench").glob("*.py")}
    missing = sorted(set(NAMED.findall(TRANSFER)) - defined)
    assert not missing, f"docs/transfer.md names tests that are not there: {', '.join(missing)}"


def test_every_row_names_a_test_or_a_benchmark() -> None:
    promised = TRANSFER.partition("\n## Thousands of broken transfers\n")[0]  # then: one run's
    bare = [row[0] for row in rows(promised) if not NAMED.search(row[-1])]
    assert not bare, f"rows of docs/transfer.md without a test: {bare}"


def test_no_frame_and_no_state_is_left_out() -> None:
    frames = {field.name for field in Frame.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert first_cells("The frames") == frames
    assert first_cells("The states of a prefill rank") == {state.name for state in Sending}
    assert first_cells("The states of a decode rank") == {state.name for state in Receiving}


def is_there(name: str) -> bool:
    """Whether a folder, or a module and what is defined in it, has this dotted name."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:stop])
        if place.with_suffix(".py").is_file():
            text = place.with_suffix(".py").read_text()
            defined = r"^ *(?:(?:async )?def|class) {}\b|^ *{}\b[^=\n]*="
            return all(
                re.search(defined.format(part, part), text, re.MULTILINE) for part in parts[stop:]
            )
    return ROOT.joinpath(*parts).is_dir()


def test_every_function_that_a_page_names_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in DOTTED.findall(page.read_text())}
    assert "router.generation.Handler.generate" in named
    missing = sorted(name for name in named if not is_there(name))
    assert not missing, f"pages name what is not there: {', '.join(missing)}"
