"""How much worse those are served who are served beside a shadow, with an interval and a verdict.

The unit is a round: one load of each server. Requests of one load have too much in common (the
minute, the batches) to be drawn one by one, so the bootstrap draws whole rounds, with the loads of
both servers together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BOUND = 0.03
"""Most that any figure may be worse."""
MIN_ROUNDS = 6
"""A bootstrap of fewer rounds knows too little of their spread."""
PASS = "PASS"
FAIL = "FAIL"
INCONCLUSIVE = "INCONCLUSIVE"
_RESAMPLES = 2000
_LEVELS = (2.5, 97.5)
"""Percentiles that a 95 % interval ends at."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one load of one server took."""

    latencies: list[float]
    """[num_requests] seconds."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worse:
    """By which part a figure is worse than V1's alone; below 0 where it is better."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    rounds: int

    @property
    def verdict(self) -> str:
        """Whether the whole interval is on one side of the bound."""
        if self.rounds < MIN_ROUNDS:
            return INCONCLUSIVE
        if self.high <= BOUND:
            return PASS
        return FAIL if self.low > BOUND else INCONCLUSIVE

    def __str__(self) -> str:
        return f"{self.value:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


def mean_s(latencies: Array, walls: Array) -> Array:
    """Return the mean latency in seconds.

    Args:
        latencies: [..., rounds, num_requests] seconds.
        walls: [..., rounds] seconds.
    """
    return np.asarray(latencies.mean(axis=(-2, -1)))


def p99_s(latencies: Array, walls: Array) -> Array:
    """Return the 99th percentile of latency in seconds, of all rounds together."""
    together = latencies.reshape(*latencies.shape[:-2], -1)
    return np.asarray(np.percentile(together, 99, axis=-1))


def requests_per_s(latencies: Array, walls: Array) -> Array:
    """Return the throughput."""
    return np.asarray(walls.shape[-1] * latencies.shape[-1] / walls.sum(axis=-1))


Figure = Callable[[Array, Array], Array]

FIGURES: dict[str, tuple[Figure, bool]] = {
    "mean_s": (mean_s, False),
    "p99_s": (p99_s, False),
    "requests_per_s": (requests_per_s, True),
}
"""Each figure, and whether more is better."""


def figures(loads: Sequence[Load]) -> dict[str, float]:
    """Return the figures of one server over all rounds."""
    latencies, walls = _arrays(loads)
    return {name: float(figure(latencies, walls)) for name, (figure, _) in FIGURES.items()}


def compare(candidate: Sequence[Load], reference: Sequence[Load]) -> dict[str, Worse]:
    """Return by how much each figure is worse.

    Args:
        candidate: One load for each round, all of as many requests.
        reference: Those of V1 alone, of the same rounds.

    Raises:
        ValueError: Rounds are missing on one side, or there is none.
    """
    if len(candidate) != len(reference) or not candidate:
        raise ValueError(
            f"{len(candidate)} and {len(reference)} rounds; both need the same, and at least one"
        )
    num_rounds = len(candidate)
    drawn = np.random.default_rng(0).integers(num_rounds, size=(_RESAMPLES, num_rounds))
    ours, theirs = _arrays(candidate), _arrays(reference)
    found = {}
    for name, (figure, more_is_better) in FIGURES.items():

        def worse(
            rows: Any, figure: Figure = figure, more_is_better: bool = more_is_better
        ) -> Array:
            mine, v1 = (figure(part[0][rows], part[1][rows]) for part in (ours, theirs))
            return (v1 / mine if more_is_better else mine / v1) - 1.0

        spread = np.concatenate([worse(rows) for rows in np.array_split(drawn, 40)])
        low, high = np.percentile(spread, _LEVELS)
        found[name] = Worse(
            value=float(worse(slice(None))), low=float(low), high=float(high), rounds=num_rounds
        )
    return found


def _arrays(loads: Sequence[Load]) -> tuple[Array, Array]:
    latencies = np.array([load.latencies for load in loads], dtype=np.float64)
    return latencies, np.array([load.wall_s for load in loads], dtype=np.float64)
