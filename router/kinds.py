"""Which workers are alike, so that what is noise between them does not decide.

The curves of equal machines are never quite equal. If the least of differences counted, the one
that looks fastest would get every prompt that finds all queues empty, a new one none, and the
prompt's hash would never share them out. So curves that agree to within `ALIKE` are used as one:
that of the first worker, by name, of their kind.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TypeVar

from prefix_index.index import Role
from router.curves import MEGA, DecodeCurve, LinkCurve, PrefillCurve
from router.worker import UNTRIED, Link, Worker

ALIKE = 0.05  # of a time
ALIKE_MS = 2.0  # of what passes besides the worker's own time
NO_SPEED_YET_MS = 1.0  # per prompt token, until any worker has measured it
# (uncached, cached) tokens, and (sequences, tokens of context), of which times are compared.
PROMPTS = ((64, 0), (1024, 0), (1024, 7168))
SHIPMENTS = (64e3, 16e6)
STEPS = ((1, 512), (16, 16_384))

Curve = TypeVar("Curve")


def compare(workers: Iterable[Worker]) -> None:
    """Set what each worker is taken for: `curve`, `steps` and `dispatch_ms`."""
    fit = sorted((each for each in workers if not each.unfit), key=lambda each: each.name)
    for role in Role:
        alike = [each for each in fit if each.record.role is role]
        seen = _mean([curve for each in alike if (curve := each.fitted_curve)])
        for worker in alike:
            worker.usual = seen
    usual = _usual_curve(fit)
    prompts: list[tuple[PrefillCurve, tuple[float, ...]]] = []
    steps: list[tuple[DecodeCurve, tuple[float, ...]]] = []
    for worker in fit:
        curve = worker.prefill_curve(usual)
        times = tuple(curve.ms(*each) for each in PROMPTS)
        worker.curve = _kind(curve, times, prompts)
        if (batch := worker.decode_curve) is not None:
            worker.steps = _kind(batch, tuple(batch.ms(*each) for each in STEPS), steps)
    _share_dispatch(fit)


def _kind(
    curve: Curve, times: tuple[float, ...], kinds: list[tuple[Curve, tuple[float, ...]]]
) -> Curve:
    """The first curve of `kinds` that this one is like; itself, as a new kind, if there is none."""
    for known, theirs in kinds:
        if all(abs(a - b) <= ALIKE * b for a, b in zip(times, theirs, strict=True)):
            return known
    kinds.append((curve, times))
    return curve


def _usual_curve(workers: Sequence[Worker]) -> PrefillCurve:
    """What to expect of a worker that has computed no prompt yet: what the others need."""
    known = [curve for each in workers if (curve := each.measured_curve)]
    return _mean(known) or PrefillCurve(token_ms=NO_SPEED_YET_MS)


def _mean(curves: Sequence[PrefillCurve]) -> PrefillCurve | None:
    if not curves:
        return None
    return PrefillCurve(
        fmean(each.prompt_ms for each in curves),
        fmean(each.token_ms for each in curves),
        fmean(each.look_ms for each in curves),
    )


def compare_links(
    links: Mapping[tuple[str, str], Link], nothing_known: LinkCurve = UNTRIED
) -> LinkCurve:
    """Set what each link is taken for; returns what to expect of one over which nothing went yet:
    no less than of the fastest, or it would never be tried.
    """
    kinds: list[tuple[LinkCurve, tuple[float, ...]]] = []
    untried = []
    for _, link in sorted(links.items(), key=lambda each: each[0]):
        if link.fit.tried:
            curve = link.fit.curve
            link.curve = _kind(curve, tuple(map(curve.ms, SHIPMENTS)), kinds)
        else:
            untried.append(link)
    fastest = min(
        (known for known, _ in kinds), key=lambda each: each.ms(MEGA), default=nothing_known
    )
    for link in untried:
        link.curve = fastest
    return fastest


def _share_dispatch(workers: Sequence[Worker]) -> None:
    if not workers:
        return
    usual_ms = median(each.dispatch.ms for each in workers)
    for worker in workers:
        own_ms = worker.dispatch.ms
        alike = abs(own_ms - usual_ms) <= max(ALIKE_MS, usual_ms / 4)
        worker.dispatch_ms = usual_ms if alike else own_ms
