"""What a prefill worker is told about damage reaches its transport."""

from dataclasses import asdict

from prefill_worker.settings import PrefillSettings
from transport.config import TransportConfig

TOLD = {
    "max_call_bytes": 1 << 20,
    "damage_window_s": 77.0,
    "max_damage_share": 0.25,
    "forgiven_chunks": 11,
    "cool_down_s": 12.0,
    "max_cool_down_s": 99.0,
}


def test_what_prefill_is_told_about_damage_reaches_its_transport() -> None:
    config = PrefillSettings.model_validate({"name": "p0"} | TOLD).transport()
    assert {name: asdict(config)[name] for name in TOLD} == TOLD
    assert PrefillSettings(name="p0").transport() == TransportConfig()
