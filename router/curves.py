"""How long a worker takes, as functions of what it is given; each fitted to what it took.

    PrefillCurve   a prompt, by the tokens to compute and those they look back at
    DecodeCurve    a step, by the sequences in its batch and the tokens of their contexts
    LinkCurve      a shipment, by the bytes that are on the link with it

A curve begins with what its worker reports of itself, and where that is nothing with what the other
workers of the fleet need. `PrefillFit`, `DecodeFit` and `LinkFit` learn; the curves are what they
know at one moment: plain numbers, which a decision may use as often as it likes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from router.least_squares import LeastSquares, Prior

KILO = 1000.0
MEGA = 1e6
# A prior is right to about a factor of two, and no coefficient is ever more than this times it.
FAR = 50.0
# One prompt alone does not tell what it takes besides its tokens: as much as so many of them.
FIXED_TOKENS = 256
FIXED_MS = 10.0  # what a prompt or a step may take besides, if nothing is known
MOST_FIXED_MS = 10_000.0
LEAST_TOKEN_MS = 1e-6
# Looking back costs as much as everything else at about this many tokens, or much later.
EVEN_TOKENS = 8192.0
EVEN_SEQUENCES = 16.0
FAST_BYTES_PER_MS = 500_000.0  # a link that nothing was sent over yet
WAITED = 0.1  # a shipment that took this much longer than its compute still waited for it


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Milliseconds a prompt, a token to compute, and a pair of such a token and one before it."""

    prompt_ms: float = 0.0
    token_ms: float = 0.0
    look_ms: float = 0.0

    def ms(self, uncached_tokens: int, cached_tokens: int) -> float:
        looks = looks_of(uncached_tokens, cached_tokens)
        return self.prompt_ms + self.token_ms * uncached_tokens + self.look_ms * looks

    def times(self, factor: float) -> "PrefillCurve":
        """Of a worker that takes so many times as long."""
        return PrefillCurve(self.prompt_ms * factor, self.token_ms * factor, self.look_ms * factor)


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Milliseconds a step, a sequence in it, and a token of all their contexts."""

    step_ms: float = 0.0
    sequence_ms: float = 0.0
    token_ms: float = 0.0

    def ms(self, num_sequences: float, context_tokens: float) -> float:
        return self.step_ms + self.sequence_ms * num_sequences + self.token_ms * context_tokens


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """Milliseconds a shipment and a byte; what else is on the link has to pass as well."""

    shipment_ms: float = 0.0
    byte_ms: float = 1 / FAST_BYTES_PER_MS

    def ms(self, num_bytes: float, in_flight_bytes: float = 0.0) -> float:
        return self.shipment_ms + self.byte_ms * (num_bytes + in_flight_bytes)


INSTANT = LinkCurve(0.0, 0.0)


def least_of(curves: Iterable[LinkCurve]) -> LinkCurve:
    """One that is never above any of them."""
    known = list(curves)
    return LinkCurve(
        min((each.shipment_ms for each in known), default=0.0),
        min((each.byte_ms for each in known), default=0.0),
    )


def looks_of(uncached_tokens: int, cached_tokens: int) -> float:
    """Pairs of a token to compute and one before it."""
    return uncached_tokens * (cached_tokens + uncached_tokens / 2)


class PrefillFit:
    """`about` is what is expected of the worker until it was observed."""

    def __init__(self, about: PrefillCurve) -> None:
        token_ms = max(LEAST_TOKEN_MS, about.token_ms)
        look_ms = max(about.look_ms, token_ms / EVEN_TOKENS)
        self._fit = LeastSquares(
            [
                Prior(about.prompt_ms, max(FIXED_MS, about.prompt_ms), MOST_FIXED_MS),
                Prior(KILO * token_ms, KILO * token_ms, FAR * KILO * token_ms),
                Prior(MEGA * about.look_ms, MEGA * look_ms, FAR * MEGA * look_ms),
            ]
        )
        self.curve = self._read()

    @classmethod
    def after_one(cls, uncached_tokens: int, ms: float) -> "PrefillFit":
        """Of a worker of which nothing is known but that such a prompt took so long."""
        return cls(PrefillCurve(token_ms=ms / (uncached_tokens + FIXED_TOKENS)))

    def learn(self, uncached_tokens: int, cached_tokens: int, ms: float) -> None:
        looks = looks_of(uncached_tokens, cached_tokens)
        self._fit.learn((1.0, uncached_tokens / KILO, looks / MEGA), ms)
        self.curve = self._read()

    def _read(self) -> PrefillCurve:
        prompt_ms, token_ms, look_ms = self._fit.coefficients
        return PrefillCurve(prompt_ms, token_ms / KILO, look_ms / MEGA)


class DecodeFit:
    """Begins with one step as the worker reported it."""

    def __init__(self, num_sequences: float, context_tokens: float, step_ms: float) -> None:
        each_ms = step_ms / EVEN_SEQUENCES
        context = max(KILO, context_tokens)
        self._fit = LeastSquares(
            [
                Prior(step_ms, step_ms, FAR * step_ms),
                Prior(0.0, each_ms, FAR * step_ms),
                Prior(0.0, KILO * step_ms / context, FAR * KILO * step_ms / context),
            ]
        )
        self.learn(num_sequences, context_tokens, step_ms)

    def learn(self, num_sequences: float, context_tokens: float, step_ms: float) -> None:
        """A step, or a mean over steps: the curve is linear, so means lie on it, too."""
        self._fit.learn((1.0, num_sequences, context_tokens / KILO), step_ms)
        step, sequence, token = self._fit.coefficients
        self.curve = DecodeCurve(step, sequence, token / KILO)


class DispatchFit:
    """What passes between a request's call and its answer besides the worker's own time."""

    def __init__(self) -> None:
        self._fit = LeastSquares([Prior(0.0, FIXED_MS, MOST_FIXED_MS)])

    @property
    def ms(self) -> float:
        return self._fit.coefficients[0]

    def learn(self, ms: float) -> None:
        self._fit.learn((1.0,), ms)


class LinkFit:
    """Shipments mostly wait for the compute they overlap, and say little of the link then."""

    def __init__(self) -> None:
        self._fit: LeastSquares | None = None
        self.curve = LinkCurve()

    @property
    def tried(self) -> bool:
        return self._fit is not None

    def learn(self, num_bytes: int, in_flight_bytes: int, ms: float, hidden_ms: float) -> None:
        """A shipment took `ms`, beside a compute of which `hidden_ms` could hide it.

        No longer than that compute, it was waiting: the link took anything up to that (a censored
        observation, as in Tobin 1958), half of it in the mean. Only a slower curve learns from it.
        """
        if ms <= hidden_ms * (1 + WAITED):
            ms /= 2
            if self.curve.ms(num_bytes, in_flight_bytes) <= ms:
                return
        megabytes = (num_bytes + in_flight_bytes) / MEGA
        if self._fit is None:
            each_ms = ms / megabytes
            fixed = Prior(0.0, FIXED_MS, MOST_FIXED_MS)
            self._fit = LeastSquares([fixed, Prior(each_ms, each_ms, FAR * each_ms)])
        self._fit.learn((1.0, megabytes), ms)
        shipment_ms, byte_ms = self._fit.coefficients
        self.curve = LinkCurve(shipment_ms, byte_ms / MEGA)
