"""How every benchmark ends."""

import json
from pathlib import Path

from rich.console import Console

from kvferry.bench_report import publish, row

ROWS = [
    row("quick", [0.25, 0.5, 0.75], [1.0], unit="ms"),
    row("slow", [2.0, 2.0], [1.0], "another", [4.0], unit="ms"),
]


def test_a_benchmark_ends_with_its_rows_the_machines_load_and_what_it_missed(
    tmp_path: Path,
) -> None:
    console = Console(file=(tmp_path / "said").open("w"), width=150)
    out = tmp_path / "folder" / "route.json"
    assert publish(out, ROWS, console, 0.5, {"threads": 2}, bars=True) == 1
    console.file.close()
    *_, load, missed = (tmp_path / "said").read_text().splitlines()
    assert load.startswith("load of the machine before and after: 0.5, ")
    assert load.endswith(f"; rows: {out}") and missed == "MISSED: slow"
    written = json.loads(out.read_text())
    assert (written["bench"], written["threads"]) == ("route", 2)
    assert written["machine"]["load"][0] == 0.5 and written["machine"]["cpus"] >= 1
    assert written["rows"][1] == {
        "what": "slow",
        "ours": 2.0,
        "unit": "ms",
        "peer": "another",
        "peer_value": 4.0,
        "ratio": 0.5,
        "limit": 1.0,
        "share_of_limit": 2.0,
        "runs": 2,
        "spread": 0.0,
    }


def test_what_nothing_can_exceed_is_no_bar(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        assert publish(tmp_path / "wire.json", ROWS, Console(file=file), 0.5) == 0
    assert "MISSED" not in (tmp_path / "said").read_text()
