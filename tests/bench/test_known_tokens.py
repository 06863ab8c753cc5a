"""The benchmark of known tokens, run whole on a tiny model."""

from pathlib import Path

import pytest

from bench import known_tokens
from tests.model.tiny_checkpoints import save_tiny


def test_it_says_what_is_kept_and_times_every_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama MQA", tmp_path / "model")
    rows = known_tokens.measure(str(tmp_path / "model"), rounds=1)
    width = (4 + 2 * 1) * 8  # of q, k and v
    assert rows[0].ours == pytest.approx(101 * width * 4 / 2**20, abs=1e-3)
    assert [each.unit for each in rows] == ["MiB", "ms", "tokens/s", "tokens/s", "tokens/s"]
    assert all(each.ours > 0 for each in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(known_tokens.SHAPES)
