"""How much worse those are served who are served beside a shadow, with an interval and a verdict.

The unit is a life of the servers, with all its loads: two servers of the same differ by more than
two loads of one, and requests of one load have too much in common (the minute, the batches) to be
taken one by one. Each life gives one ratio of each figure; their mean, and Student's interval of
it, are taken of the logarithms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BOUND = 0.03
"""Most that any figure may be worse."""
MIN_LIVES = 6
"""An interval of fewer is wide, and leans on the normal distribution."""
PASS = "PASS"
FAIL = "FAIL"
INCONCLUSIVE = "INCONCLUSIVE"
_LEVEL = 0.975
"""Of the upper end of a 95 % interval."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one load of one server took."""

    latencies: Array
    """[num_requests] seconds."""
    wall_s: float


Loads = Sequence[Load]
"""Those of one server in one life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worse:
    """By which part a figure is worse than V1's alone; below 0 where it is better."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    lives: int

    @property
    def verdict(self) -> str:
        """Whether the whole interval is on one side of the bound."""
        if self.lives < MIN_LIVES:
            return INCONCLUSIVE
        if self.high <= BOUND:
            return PASS
        return FAIL if self.low > BOUND else INCONCLUSIVE

    def values(self) -> dict[str, float | None]:
        """Return what a record keeps; no bounds where one life says nothing of them."""
        known = np.isfinite(self.high)
        return {
            "value": self.value,
            "low": self.low if known else None,
            "high": self.high if known else None,
            "lives": self.lives,
        }

    def __str__(self) -> str:
        return f"{self.value:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


def mean_s(loads: Loads) -> float:
    """Return the mean latency in seconds."""
    return float(_latencies(loads).mean())


def p99_s(loads: Loads) -> float:
    """Return the 99th percentile of latency in seconds, of all loads together."""
    return float(np.percentile(_latencies(loads), 99))


def requests_per_s(loads: Loads) -> float:
    """Return the throughput."""
    return len(_latencies(loads)) / sum(load.wall_s for load in loads)


def _latencies(loads: Loads) -> Array:
    return np.concatenate([load.latencies for load in loads])


Figure = Callable[[Loads], float]

FIGURES: dict[str, tuple[Figure, bool]] = {
    "mean_s": (mean_s, False),
    "p99_s": (p99_s, False),
    "requests_per_s": (requests_per_s, True),
}
"""Each figure, and whether more is better."""


def figures(loads: Loads) -> dict[str, float]:
    """Return the figures of loads."""
    return {name: figure(loads) for name, (figure, _) in FIGURES.items()}


def compare(candidate: Sequence[Loads], *references: Sequence[Loads]) -> dict[str, Worse]:
    """Return by how much each figure is worse, as `compare_figures`.

    Args:
        candidate: The loads of one server in each life.
        references: Those of servers of V1 alone in the same lives.
    """
    mine, *theirs = ([figures(loads) for loads in lives] for lives in (candidate, *references))
    return compare_figures(mine, *theirs)


def compare_figures(
    candidate: Sequence[Mapping[str, float]], *references: Sequence[Mapping[str, float]]
) -> dict[str, Worse]:
    """Return by how much each figure is worse.

    Args:
        candidate: The figures of one server in each life.
        references: Those of servers of V1 alone in the same lives. Their geometric mean counts.

    Raises:
        ValueError: Lives are missing on one side, or there is none.
    """
    numbers = [len(lives) for lives in (candidate, *references)]
    if len(numbers) < 2 or len(set(numbers)) > 1 or not numbers[0]:
        raise ValueError(f"{numbers} lives of each; both sides need the same, and at least one")
    return {
        name: _interval(
            (-1.0 if more_is_better else 1.0)
            * (_logs(candidate, name) - np.mean([_logs(one, name) for one in references], axis=0))
        )
        for name, (_, more_is_better) in FIGURES.items()
    }


def _logs(lives: Sequence[Mapping[str, float]], name: str) -> Array:
    return np.log([figures[name] for figures in lives])


def _interval(logs: Array) -> Worse:
    """Return mean and interval of one logarithm of a ratio for each life."""
    from scipy.stats import t  # type: ignore[import-untyped]  # half a second

    mean, half = float(logs.mean()), float("inf")
    if len(logs) > 1:
        half = float(t.ppf(_LEVEL, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    low, value, high = np.exp([mean - half, mean, mean + half]) - 1.0
    return Worse(value=float(value), low=float(low), high=float(high), lives=len(logs))
