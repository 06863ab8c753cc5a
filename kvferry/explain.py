"""Where one request went and what it cost, as tables."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvferry.client import Answer
from protos.inference_pb2 import Candidate, Explanation, Usage

MAX_CANDIDATES_SHOWN = 6
OPTIONS = {"wait": "wait at the router", "reject": "refuse"}


def explain_table(answer: Answer) -> Group:
    """The journey, and above it the choice that started it when the answer carries it."""
    parts = [] if answer.explanation is None else _choice(answer.explanation)
    return Group(*parts, _journey_table(answer.usage))


def _choice(explanation: Explanation) -> list[Table | Text]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("pair", no_wrap=True)
    table.add_column("tokens matched", justify="right")
    table.add_column("predicted ms", justify="right")
    table.add_column("made of")
    ways = [each for each in explanation.candidates if not each.action]
    others = [each for each in explanation.candidates if each.action]
    for candidate in (*ways[:MAX_CANDIDATES_SHOWN], *others):
        way = (candidate.prefill, candidate.decode, candidate.holder)
        chosen = not candidate.action and way == (
            explanation.chosen_prefill,
            explanation.chosen_decode,
            explanation.chosen_holder,
        )
        table.add_row(
            OPTIONS.get(candidate.action) or _way(candidate),
            "" if candidate.action else _matched(candidate, explanation.prompt_tokens),
            "-" if candidate.refused else f"{candidate.cost_ms:.1f}",
            candidate.refused or _terms(candidate),
            style="bold green" if chosen else "dim" if candidate.refused else None,
        )
    return [Text(f"route: {explanation.reason}", style="bold"), table]


def _way(candidate: Candidate) -> str:
    pair = _pair(candidate.prefill, candidate.decode)
    return f"{candidate.holder} -> {pair}" if candidate.holder else pair


def _matched(candidate: Candidate, prompt_tokens: int) -> str:
    held = f"{candidate.prefill_matched_tokens} + {candidate.decode_matched_tokens}"
    fetched = f", {candidate.fetched_tokens} fetched" if candidate.holder else ""
    return f"{held} of {prompt_tokens}{fetched}"


def _pair(prefill: str, decode: str) -> str:
    return f"{prefill} -> {decode}" if prefill else f"{decode} alone"


def _terms(candidate: Candidate) -> str:
    terms = sorted(candidate.terms_ms.items(), key=lambda term: -term[1])
    return " + ".join(f"{name} {value:.1f}" for name, value in terms if value >= 0.05)


def _journey_table(usage: Usage) -> Table:
    journey = usage.journey
    sizes = (journey.prefill_block_size, journey.decode_block_size)
    differ = all(sizes) and len(set(sizes)) > 1
    of_prefill, of_decode = (f" of {size} tokens" if differ else "" for size in sizes)
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column("what", style="cyan")
    table.add_column("how much")
    rows = {
        "replicas": _pair(journey.prefill, journey.decode)
        + (f" over {journey.wire}" if journey.wire else ""),
        "prompt": f"{_count(usage.prompt_tokens, 'token')} in "
        + _count(journey.prompt_blocks, "block"),
        "matched": f"{_count(journey.prefill_cached_blocks, 'block')} on prefill{of_prefill}, "
        f"{journey.decode_cached_blocks} on decode{of_decode}",
        "computed": f"{_count(journey.computed_tokens, 'prompt token')}, "
        f"{usage.cached_tokens} reused",
        "fetched": f"{_count(journey.fetched_tokens, 'token')} of {journey.holder}, "
        f"{size(journey.fetched_bytes)} in {journey.fetch_ms:.0f} ms",
        "shipped": f"{_count(journey.shipped_blocks, 'block')}, {size(journey.shipped_bytes)}"
        + (f" in {journey.transfer_ms:.0f} ms" if journey.shipped_blocks else ""),
        "first token": f"{journey.ttft_ms:.0f} ms",
        "each token": f"{journey.tpot_ms:.1f} ms, {_count(usage.completion_tokens, 'token')}",
    }
    if not journey.holder:
        del rows["fetched"]
    if journey.attempts > 1:
        rows["attempts"] = str(journey.attempts)
    for what, how_much in rows.items():
        table.add_row(what, how_much)
    return table


def _count(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
