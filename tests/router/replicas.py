"""Replicas for decisions, as plain values."""

from router.curves import LinkCurve
from router.ways import Candidate, Decision, Link, Prompt, Replica

LIGHT = Link(LinkCurve(0.0, 1e-9))
PROMPT = Prompt(num_tokens=1000, token_bytes=6_250, num_layers=30, key=b"p")


def prefill(name: str = "p0", **fields: object) -> Replica:
    known: dict[str, object] = {"ms_per_token": 1.0, "total_blocks": 1000, "block_size": 16}
    return Replica(name, **(known | {"wires": ("grpc",)} | fields))  # type: ignore[arg-type]


def decode(name: str = "d0", **fields: object) -> Replica:
    known: dict[str, object] = {"ms_per_token": 1.0, "total_blocks": 1000, "free_blocks": 1000}
    known |= {"block_size": 16, "wires": ("grpc",)}
    return Replica(name, **(known | fields))  # type: ignore[arg-type]


def names(decision: Decision) -> tuple[str, str]:
    assert decision.chosen is not None
    chosen = decision.chosen
    return chosen.prefill.name if chosen.prefill else "", chosen.decode.name


def candidate(decision: Decision, prefill_name: str) -> Candidate:
    (found,) = [
        each
        for each in decision.candidates
        if (each.prefill.name if each.prefill else "") == prefill_name
    ]
    return found
