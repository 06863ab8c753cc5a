"""What keeps a cluster from being started at all: said before any process is."""

from pathlib import Path

import pytest

from engine.clock import MonotonicClock
from kvferry.cluster import running_cluster
from kvferry.errors import PartFailed
from kvferry.flags import flags_of
from kvferry.launcher import PartEvent
from kvferry.settings import load


@pytest.mark.parametrize(
    ("assignments", "sentence"),
    [
        (
            ["prefill.port=50061"],
            "prefill-0 and prefill-1 would both listen on 127.0.0.1:50061: "
            "set prefill.port to 0, and the system chooses",
        ),
        (
            ["num_prefill=1", "prefill.port=50061", "decode.system_port=50061"],
            "prefill-0 and decode-0 would both listen on 127.0.0.1:50061: "
            "set decode.system_port to 0, and the system chooses",
        ),
        (
            ["decode.port=8000"],
            "the router and decode-0 would both listen on 127.0.0.1:8000: "
            "set decode.port to 0, and the system chooses",
        ),
    ],
)
async def test_two_parts_on_one_port_are_named_before_anything_starts(
    assignments: list[str], sentence: str, tmp_path: Path
) -> None:
    settings = load(flags=flags_of(assignments, state_dir=tmp_path))
    events: list[PartEvent] = []
    with pytest.raises(PartFailed) as failure:
        async with running_cluster(settings, events.append, MonotonicClock()):
            pass
    assert str(failure.value) == sentence
    assert events == []
