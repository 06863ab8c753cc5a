"""Which blocks of a prompt a prefill replica could take from another worker, and what that costs.

A prefix that is in demand is held where it was computed first; when the queue there is long, its
prompts go elsewhere. There the holder's blocks come over a link in less time than computing them
takes, and are one more copy of the prefix, which the next prompts find in place.
"""

from collections.abc import Sequence

from router.ways import Fetch, Prompt, Replica, Replicas, Weights

MOST_HOLDERS = 3  # that are considered: those that hold most


def holders(prompt: Prompt, replicas: Replicas, weights: Weights) -> Sequence[Replica]:
    """Those that hold most of the prompt, the longest prefix first."""
    if not weights.fetches:
        return ()
    known = (*replicas.prefills, *replicas.decodes)
    holding = [each for each in known if each.matched_blocks and not each.refused]
    return sorted(holding, key=lambda each: (-prompt.held_tokens(each), each.name))[:MOST_HOLDERS]


def fetch_for(
    prompt: Prompt,
    prefill: Replica,
    compute_ms: float,
    known: Sequence[Replica],
    replicas: Replicas,
) -> Fetch | None:
    """From the first of the holders `known` that has something it lacks, over a link that can be
    used; None where computing it all is as quick, which takes `compute_ms`.
    """
    for holder in known:
        num_tokens = prompt.fetched_tokens(prefill, holder)
        if not num_tokens:
            return None  # nor has anybody after it
        num_bytes = num_tokens * prompt.token_bytes
        if replicas.fastest_fetch.ms(num_bytes) - prefill.queue_ms >= compute_ms:
            continue  # over any link: this is asked of every prefill replica
        alike = (holder.naming, holder.block_size) == (prefill.naming, prefill.block_size)
        link = replicas.fetches.get((holder.name, prefill.name))
        if holder.name == prefill.name or not alike or link is None:
            continue
        ms = link.curve.ms(num_bytes, link.in_flight_bytes)
        left_ms = prompt.compute_ms(prefill, num_tokens)
        saved_ms = compute_ms - left_ms
        if max(0.0, ms - prefill.queue_ms) >= saved_ms:
            return None
        num_blocks = prompt.held_tokens(holder) // holder.block_size
        return Fetch(holder, num_blocks, num_tokens, num_bytes, ms, left_ms, saved_ms)
    return None


def fetch_ms(
    prompt: Prompt, computing: Replica, weights: Weights, fetch: Fetch | None = None
) -> float:
    """What the prompt waits for blocks that are elsewhere: with another worker, or in the host
    memory of who computes it. While others are computed before it, it does not.
    """
    if fetch is None and not computing.host_blocks:
        return 0.0
    host_ms = prompt.host_bytes(computing) / weights.host_bytes_per_ms
    return max(0.0, host_ms + (fetch.ms if fetch else 0.0) - computing.queue_ms)
