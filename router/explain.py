"""A decision in the words of the API."""

from protos import inference_pb2 as pb
from router.admission import Action, LineView, Option, Verdict, options
from router.ways import Candidate, Decision, Prompt


def explanation(
    prompt: Prompt, decision: Decision, line: LineView, verdict: Verdict
) -> pb.Explanation:
    """Every candidate with its terms, waiting and refusing among them; costs of refused ones are
    what they would have been.
    """
    chosen = decision.chosen if verdict.action is Action.SERVE else None
    decode = chosen or next(iter(decision.candidates), None)
    num_blocks = prompt.num_tokens // decode.decode.block_size if decode else 0
    return pb.Explanation(
        prompt_tokens=prompt.num_tokens,
        prompt_blocks=num_blocks,
        chosen_prefill=chosen.prefill.name if chosen and chosen.prefill else "",
        chosen_decode=chosen.decode.name if chosen else "",
        chosen_holder=chosen.fetch.holder.name if chosen and chosen.fetch else "",
        reason=verdict.reason or decision.reason,
        candidates=[
            *(_candidate(each) for each in decision.candidates),
            *(_option(each) for each in options(prompt, decision, line, verdict)),
        ],
        action=verdict.action.value,
        retry_after_ms=verdict.retry_after_ms,
    )


def _option(option: Option) -> pb.Candidate:
    return pb.Candidate(
        cost_ms=option.cost_ms,
        terms_ms=option.terms,
        refused=option.refused,
        action=option.action.value,
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
        holder=candidate.fetch.holder.name if candidate.fetch else "",
        fetched_tokens=candidate.fetch.num_tokens if candidate.fetch else 0,
    )
