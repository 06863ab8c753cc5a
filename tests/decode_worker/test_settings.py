"""What a decode worker is told about repair and quarantine reaches its transport."""

from dataclasses import asdict

import pytest
from pydantic import ValidationError

from decode_worker.settings import OPEN_WAIT_S, DecodeSettings
from transport.config import TransportConfig

TOLD = {
    "max_resends": 7,
    "max_link_asks": 8,
    "max_link_damages": 9,
    "max_calls": 10,
    "repair_wait_s": 1.5,
    "call_timeout_s": 2.5,
    "max_call_bytes": 1 << 20,
    "damage_window_s": 77.0,
    "max_damage_share": 0.25,
    "forgiven_chunks": 11,
    "suspect_wires": 3,
    "cool_down_s": 12.0,
    "max_cool_down_s": 99.0,
}


def test_every_number_of_repair_and_quarantine_reaches_the_transport() -> None:
    config = DecodeSettings.model_validate({"name": "d0"} | TOLD).transport()
    assert {name: asdict(config)[name] for name in TOLD} == TOLD


def test_what_nobody_sets_is_as_the_transport_has_it() -> None:
    config = DecodeSettings(name="d0").transport()
    usual = TransportConfig()
    differing = {k for k, v in asdict(config).items() if v != asdict(usual)[k]}
    assert differing == {"open_wait_s"}
    assert config.open_wait_s == DecodeSettings(name="d0").reserve_wait_s + OPEN_WAIT_S


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_damage_share", 0), ("max_damage_share", 1.5), ("cool_down_s", 0), ("suspect_wires", 0)],
)
def test_thresholds_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        DecodeSettings.model_validate({"name": "d0", name: value})
