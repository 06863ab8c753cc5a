"""A decision in the words of the API."""

from protos import inference_pb2 as pb
from router.policy import Candidate, Decision, Prompt


def explanation(prompt: Prompt, decision: Decision) -> pb.Explanation:
    """Every candidate with its terms; costs of refused ones are what they would have been."""
    chosen = decision.chosen
    decode = chosen or next(iter(decision.candidates), None)
    num_blocks = prompt.num_tokens // decode.decode.block_size if decode else 0
    return pb.Explanation(
        prompt_tokens=prompt.num_tokens,
        prompt_blocks=num_blocks,
        chosen_prefill=chosen.prefill.name if chosen and chosen.prefill else "",
        chosen_decode=chosen.decode.name if chosen else "",
        reason=decision.reason,
        candidates=[_candidate(each) for each in decision.candidates],
    )


def _candidate(candidate: Candidate) -> pb.Candidate:
    prefill = candidate.prefill
    return pb.Candidate(
        prefill=prefill.name if prefill else "",
        decode=candidate.decode.name,
        cost_ms=candidate.terms.cost_ms,
        terms_ms=candidate.terms.named(),
        prefill_matched_blocks=prefill.matched_blocks if prefill else 0,
        decode_matched_blocks=candidate.decode.matched_blocks,
        prefill_matched_tokens=prefill.matched_tokens if prefill else 0,
        decode_matched_tokens=candidate.decode.matched_tokens,
        refused=candidate.refused,
    )
