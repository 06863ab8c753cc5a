"""Why a way cannot be used, in words for whoever asked."""

from collections.abc import Collection

from prefix_index.worker_record import shared_wires
from router.ways import Candidate, Pins, Prompt, Replica


def too_late(prompt: Prompt, candidate: Candidate) -> str:
    """Why it cannot keep to what the request insists on, as far as its speed was measured."""
    ttft_ms, targets = candidate.terms.ttft_ms, prompt.targets
    if ttft_ms > prompt.left_ms and candidate.computing.measured:
        return (
            f"{candidate.computing.name} would take {ttft_ms:.0f} ms to the first token,"
            f" {max(0.0, prompt.left_ms):.0f} ms are left"
        )
    if too_slow(prompt, candidate.decode):
        return (
            f"{candidate.decode.name} would take {candidate.decode.joined_step_ms:.1f} ms"
            f" for each token, the target is {targets.token_ms:g} ms"
        )
    return ""


def too_slow(prompt: Prompt, decode: Replica) -> bool:
    """Whether its steps are slower than the request insists on."""
    targets = prompt.targets
    return targets.strict and 0 < targets.token_ms < decode.joined_step_ms


def over_bar(replica: Replica, pins: Pins, bar_ms: float) -> bool:
    return replica.queue_ms > bar_ms and replica.name not in (pins.prefill, pins.decode)


def decode_refusal(prompt: Prompt, decode: Replica, pins: Pins) -> str:
    if decode.refused:
        return f"{decode.name} {decode.refused}"
    if pins.decode not in ("", decode.name):
        return f"the request is pinned to decode {pins.decode}"
    return _too_small(prompt, decode)


def prefill_refusal(prompt: Prompt, prefill: Replica, pins: Pins) -> str:
    if prefill.refused:
        return f"{prefill.name} {prefill.refused}"
    if pins.no_prefill:
        return "the request asks for decode alone"
    if pins.prefill not in ("", prefill.name):
        return f"the request is pinned to prefill {pins.prefill}"
    return _too_small(prompt, prefill)


def _too_small(prompt: Prompt, replica: Replica) -> str:
    num_blocks = replica.blocks_for(prompt.num_tokens)
    if num_blocks <= replica.total_blocks:
        return ""
    return f"{replica.name} has {replica.total_blocks} blocks in all, the prompt needs {num_blocks}"


def usable_wires(
    prefill: Replica, decode: Replica, pins: Pins, quarantined: Collection[str]
) -> tuple[tuple[str, ...], str]:
    """The wires this pair may use, or why there is none."""
    shared = shared_wires(prefill, decode)
    if pins.wire:
        shared = [wire for wire in shared if wire == pins.wire]
    left = tuple(wire for wire in shared if wire not in quarantined)
    if left:
        return left, ""
    if shared:
        names = " and ".join(shared)
        return (), f"{prefill.name} and {decode.name} have {names} in quarantine"
    asked = f"the wire {pins.wire} that the request asks for" if pins.wire else "a wire in common"
    return (), (
        f"{prefill.name} ({', '.join(prefill.wires)}) and {decode.name}"
        f" ({', '.join(decode.wires)}) do not have {asked}"
    )
