"""A sum of terms, fitted one observation at a time: recursive least squares that forgets.

    predict   features times coefficients
    learn     each coefficient moves by what the error says, as far as it is still uncertain
    change    several errors in a row beyond the usual, all on one side: it is as uncertain again as
              it was at first, from where it is

Errors are relative, so that long and short prompts weigh alike. One that is far beyond the usual
error is cut to what is usual (Huber, Robust Statistics, 1981): a hiccup moves little. Old
observations fade by `FORGETTING` a step; what is never observed stays as uncertain as it was at
first and no more, so that a month of equal prompts does not make the curve jump at the first
different one. Coefficients stay within their bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FORGETTING = 0.98  # of an observation's weight at each later one: about fifty count
NOISE = 0.1  # relative error of one observation that does not surprise
UNKNOWN_ERROR = 1.0  # usual before anything was observed: the prior is a guess
LEAST_ERROR = 0.05  # a curve that fits for long must still be able to move
CUT = 2.0  # times the usual error
ADAPT = 0.1  # of the newest error in the usual one
NUM_SURPRISES = 5  # in a row: no hiccups any more
DRIFT = 1e-3  # of a coefficient's first spread, at each observation: rounding is less than that
LEAST_MS = 0.01  # smaller times are compared as if they were this


@dataclass(frozen=True, slots=True)
class Prior:
    """What is thought of one coefficient before anything was observed."""

    value: float
    spread: float  # standard deviation; 0: known
    most: float  # and never below 0


class LeastSquares:
    def __init__(self, priors: Sequence[Prior]) -> None:
        self._priors = tuple(priors)
        self._size = range(len(priors))
        self.coefficients = [each.value for each in priors]
        self._drift = [(DRIFT * each.spread) ** 2 for each in priors]
        self._be_uncertain()

    def predict(self, features: Sequence[float]) -> float:
        return sum(a * x for a, x in zip(self.coefficients, features, strict=True))

    def learn(self, features: Sequence[float], ms: float) -> None:
        predicted, ms = max(LEAST_MS, self.predict(features)), max(LEAST_MS, ms)
        scale = (predicted * ms) ** 0.5  # twice as long is as wrong as half as long
        error = self._cut((ms - predicted) / scale)
        self._move([each / scale for each in features], error)
        self._stay_within_priors()
        self._stay_within_bounds()

    def _be_uncertain(self) -> None:
        variances = [each.spread**2 for each in self._priors]
        self._covariance = [[variances[i] * (i == j) for j in self._size] for i in self._size]
        self._usual_error = UNKNOWN_ERROR
        self._surprises = 0  # in a row; negative where it was faster than predicted

    def _cut(self, error: float) -> float:
        most = CUT * self._usual_error
        side = (error > most) - (error < -most)
        self._surprises = self._surprises + side if side * self._surprises >= 0 and side else side
        if abs(self._surprises) >= NUM_SURPRISES:
            self._be_uncertain()
            most = CUT * self._usual_error
        error = max(-most, min(most, error))
        self._usual_error += ADAPT * (1.25 * abs(error) - self._usual_error)
        self._usual_error = max(LEAST_ERROR, self._usual_error)
        return error

    def _move(self, x: Sequence[float], error: float) -> None:
        size, covariance = self._size, self._covariance
        px = [sum(covariance[i][j] * x[j] for j in size) for i in size]
        seen = FORGETTING * NOISE**2 + sum(px[i] * x[i] for i in size)
        gain = [each / seen for each in px]
        for i in size:
            self.coefficients[i] += gain[i] * error
        for i in size:
            for j in size[: i + 1]:
                left = (covariance[i][j] - gain[i] * px[j]) / FORGETTING
                covariance[i][j] = covariance[j][i] = left + (i == j) * self._drift[i]

    def _stay_within_priors(self) -> None:
        """No coefficient becomes more uncertain than it was; its correlations shrink with it."""
        for i in self._size:
            variance, most = self._covariance[i][i], self._priors[i].spread ** 2
            if variance > most:
                shrink = (most / variance) ** 0.5
                for j in self._size:
                    self._covariance[i][j] *= shrink
                    self._covariance[j][i] *= shrink

    def _stay_within_bounds(self) -> None:
        """Move what is beyond its bound onto it, and the others as that makes them most likely:
        so what was observed is still predicted.
        """
        for i in self._size:
            value = self.coefficients[i]
            short = max(0.0, min(self._priors[i].most, value)) - value
            if short:
                row = self._covariance[i]
                for j in self._size:
                    self.coefficients[j] += short * row[j] / row[i]
        for i, prior in enumerate(self._priors):
            self.coefficients[i] = max(0.0, min(prior.most, self.coefficients[i]))
