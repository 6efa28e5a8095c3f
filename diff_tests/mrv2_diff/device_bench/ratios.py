"""Order of the rounds, and when a ratio of medians is known well enough.

The unit is a block: one runner's steps of one round, of which the median counts. Steps of a block
have too much in common (the clock, the caches) to be drawn one by one, so the bootstrap draws whole
rounds, with the blocks of both runners together.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt

MIN_ROUNDS = 6
"""A bootstrap of fewer blocks knows too little of their spread."""
MAX_WIDTH = 0.03
"""Of a confidence interval, over the ratio: a wider one is INCONCLUSIVE."""
_RESAMPLES = 2000
_CONFIDENCE = 0.95

Array = npt.NDArray[np.float64]

NARROW = "NARROW"
INCONCLUSIVE = "INCONCLUSIVE"


def balanced_orders(runners: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every order of the runners, each followed by its reverse: ABBA for two.

    A drift that is linear in time cancels over two rounds, and over all of them each runner stands
    in each place, and behind each other runner, equally often.
    """
    orders: list[tuple[str, ...]] = []
    for order in permutations(runners):
        if order not in orders:
            orders.append(order)
            if order[::-1] != order:
                orders.append(order[::-1])
    return orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of the medians of two runners."""

    value: float
    low: float
    high: float
    """Bounds of the 95 % confidence interval."""
    rounds: int

    @property
    def width(self) -> float:
        """Width of the interval over the ratio."""
        return (self.high - self.low) / self.value if self.value > 0 else math.inf

    @property
    def verdict(self) -> str:
        """Whether the interval is narrow enough to go by."""
        narrow = self.rounds >= MIN_ROUNDS and self.width < MAX_WIDTH
        return NARROW if narrow else INCONCLUSIVE

    def values(self) -> dict[str, float | int | str | None]:
        """Return what a record keeps; no bounds where one round says nothing of them."""
        known = math.isfinite(self.high)
        return {
            "ratio": self.value,
            "low": self.low if known else None,
            "high": self.high if known else None,
            "rounds": self.rounds,
            "verdict": self.verdict,
        }


def ratio_of_medians(candidate: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return the ratio of the medians with its interval.

    Args:
        candidate: One figure for each round.
        reference: The other runner's, of the same rounds.

    Raises:
        ValueError: Rounds are missing on one side, or there is none, or a figure is not positive.
    """
    if len(candidate) != len(reference) or not candidate:
        raise ValueError(
            f"{len(candidate)} and {len(reference)} rounds; a ratio needs the same rounds of both"
        )
    if min(*candidate, *reference) <= 0:
        raise ValueError("a figure is not above 0, so that there is no ratio")
    value = statistics.median(candidate) / statistics.median(reference)
    low, high = _interval(candidate, reference)
    return Ratio(value=value, low=low, high=high, rounds=len(candidate))


def _interval(candidate: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    if len(candidate) < 2:
        return 0.0, math.inf
    from scipy.stats import bootstrap  # type: ignore[import-untyped]  # half a second

    def statistic(left: Array, right: Array, axis: int = -1) -> Array:
        return np.median(left, axis=axis) / np.median(right, axis=axis)

    interval = bootstrap(
        (np.asarray(candidate), np.asarray(reference)),
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def pairs(runners: Sequence[str]) -> list[tuple[str, str]]:
    """Return (candidate, reference) of every ratio: ours over each other, or all over the first."""
    if "mrv2" in runners:
        return [("mrv2", name) for name in runners if name != "mrv2"]
    return [(name, runners[0]) for name in runners[1:]]


def ratios(blocks: Mapping[str, Sequence[float]]) -> dict[str, Ratio]:
    """Return each pair's ratio, by `candidate/reference`, over the rounds that both have.

    Args:
        blocks: One figure for each round, by runner.
    """
    found = {}
    for candidate, reference in pairs(list(blocks)):
        common = min(len(blocks[candidate]), len(blocks[reference]))
        if common:
            found[f"{candidate}/{reference}"] = ratio_of_medians(
                blocks[candidate][:common], blocks[reference][:common]
            )
    return found


def settled(found: Mapping[str, Ratio]) -> bool:
    """Return whether every ratio is narrow; nothing to compare needs its rounds only."""
    return all(ratio.verdict == NARROW for ratio in found.values())
