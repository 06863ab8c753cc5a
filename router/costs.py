"""The terms of a way's cost, in milliseconds; `router.policy` says what each stands for.

A way's terms are those of the replica that computes, those of the one that streams, and what only
the two together decide; the search for the cheapest adds up each by itself.
"""

from typing import NamedTuple

from router.fetching import fetch_ms
from router.ways import Fetch, Link, Prompt, Replica, Terms, Weights


def late_first_ms(prompt: Prompt, computing: Replica, compute_ms: float, weights: Weights) -> float:
    target_ms = prompt.targets.ttft_ms
    if not target_ms:
        return 0.0
    ttft_ms = computing.queue_ms + compute_ms + computing.dispatch_ms
    return weights.lateness * max(0.0, ttft_ms - target_ms)


def late_tokens_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    target_ms = prompt.targets.token_ms
    if not target_ms:
        return 0.0
    late_ms = max(0.0, decode.joined_step_ms - target_ms)
    return weights.lateness * prompt.output_tokens * late_ms


def left_prefill_ms(prompt: Prompt, prefill: Replica, weights: Weights) -> float:
    """For leaving the one that its session was at."""
    moved = prompt.session is not None and prompt.session[0] not in ("", prefill.name)
    return weights.session_ms * moved


def left_decode_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    moved = prompt.session is not None and prompt.session[1] != decode.name
    return weights.session_ms * moved


def shipping_ms(
    prompt: Prompt,
    prefill: Replica,
    decode: Replica,
    link: Link,
    weights: Weights,
    fetch: Fetch | None = None,
) -> tuple[float, float, float]:
    """The time on the link, how much of it the compute hides at most, and how far it goes."""
    num_bytes = prompt.shipped_bytes(prefill, decode)
    if not num_bytes:
        return 0.0, 0.0, 0.0
    link_ms = link.curve.ms(num_bytes, link.in_flight_bytes)
    compute_ms = fetch.compute_ms if fetch else prompt.compute_ms(prefill)
    return link_ms, hides_ms(prompt, compute_ms), _distance_ms(prefill, decode, weights)


def hides_ms(prompt: Prompt, compute_ms: float) -> float:
    """Layer by layer: all but the first layer's compute can hide the sending of the one before."""
    return compute_ms * (prompt.num_layers - 1) / prompt.num_layers


class ComputePart(NamedTuple):
    """What the replica decides that computes a prompt; the sum is what it costs."""

    queue_ms: float
    fetch_ms: float
    compute_ms: float
    dispatch_ms: float
    followers_ms: float
    interference_ms: float
    lateness_ms: float
    session_ms: float
    admission_ms: float


class StreamPart(NamedTuple):
    """And the one that streams the answer."""

    admission_ms: float
    streaming_ms: float
    lateness_ms: float
    session_ms: float


def prefill_part(
    prompt: Prompt,
    prefill: Replica,
    followers: float,
    weights: Weights,
    compute_ms: float,
    waits_ms: float,
) -> ComputePart:
    """`waits_ms` for blocks that are elsewhere, besides computing."""
    return ComputePart(
        prefill.queue_ms,
        waits_ms,
        compute_ms,
        prefill.dispatch_ms,
        followers * compute_ms,
        0.0,
        late_first_ms(prompt, prefill, waits_ms + compute_ms, weights),
        left_prefill_ms(prompt, prefill, weights),
        weights.handoff_ms,
    )


def alone_part(
    prompt: Prompt,
    decode: Replica,
    followers: float,
    weights: Weights,
    compute_ms: float,
    waits_ms: float,
) -> ComputePart:
    """Of decode, where it computes the prompt itself."""
    return ComputePart(
        decode.queue_ms,
        waits_ms,
        compute_ms,
        decode.dispatch_ms,
        followers * compute_ms,
        weights.interference * compute_ms * (decode.running + 1),
        late_first_ms(prompt, decode, waits_ms + compute_ms, weights),
        0.0,
        0.0,
    )


def stream_part(prompt: Prompt, decode: Replica, weights: Weights) -> StreamPart:
    return StreamPart(
        wait_ms(prompt, decode, weights),
        weights.streaming * prompt.output_tokens * decode.joined_step_ms,
        late_tokens_ms(prompt, decode, weights),
        left_decode_ms(prompt, decode, weights),
    )


def pair_terms(
    prompt: Prompt,
    prefill: Replica,
    decode: Replica,
    link: Link,
    followers: float,
    weights: Weights,
    fetch: Fetch | None = None,
) -> Terms:
    compute_ms = fetch.compute_ms if fetch else prompt.compute_ms(prefill)
    waits_ms = fetch_ms(prompt, prefill, weights, fetch)
    link_ms, hidden_ms, distance_ms = shipping_ms(prompt, prefill, decode, link, weights, fetch)
    return _terms(
        prefill_part(prompt, prefill, followers, weights, compute_ms, waits_ms),
        stream_part(prompt, decode, weights),
        max(0.0, link_ms - hidden_ms),
        distance_ms,
    )


def alone_terms(prompt: Prompt, decode: Replica, followers: float, weights: Weights) -> Terms:
    compute_ms, waits_ms = prompt.compute_ms(decode), fetch_ms(prompt, decode, weights)
    return _terms(
        alone_part(prompt, decode, followers, weights, compute_ms, waits_ms),
        stream_part(prompt, decode, weights),
    )


def _terms(
    computing: ComputePart, streaming: StreamPart, link_ms: float = 0.0, distance_ms: float = 0.0
) -> Terms:
    return Terms(
        queue_ms=computing.queue_ms,
        fetch_ms=computing.fetch_ms,
        compute_ms=computing.compute_ms,
        dispatch_ms=computing.dispatch_ms,
        link_ms=link_ms,
        interference_ms=computing.interference_ms,
        admission_ms=computing.admission_ms + streaming.admission_ms,
        followers_ms=computing.followers_ms,
        streaming_ms=streaming.streaming_ms,
        lateness_ms=computing.lateness_ms + streaming.lateness_ms,
        session_ms=computing.session_ms + streaming.session_ms,
        distance_ms=distance_ms,
    )


def _distance_ms(prefill: Replica, decode: Replica, weights: Weights) -> float:
    """Of labels that both have and that differ, the widest counts."""
    if prefill.zone and decode.zone and prefill.zone != decode.zone:
        return weights.zone_ms
    if prefill.node and decode.node and prefill.node != decode.node:
        return weights.node_ms
    return 0.0


def wait_ms(prompt: Prompt, decode: Replica, weights: Weights) -> float:
    """Until decode's first own token: a step for each that waits, its own, and room for its KV."""
    lacking = max(0, decode.blocks_for(prompt.num_tokens) - decode.matched_blocks)
    full_ms = weights.full_pool_ms if lacking > decode.free_blocks else 0.0
    if decode.joined_step_ms:
        return (decode.waiting + 1) * decode.joined_step_ms + full_ms
    steps = decode.waiting + 1 + weights.crowding * decode.running
    return steps * decode.step_ms + full_ms
