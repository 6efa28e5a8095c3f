"""How much worse those are served who are served beside a shadow, with an interval and a verdict.

The unit is a block: one life of the servers, with all their loads. Two servers of the same differ
by more than two loads of one, and requests of one load have too much in common (the minute, the
batches) to be drawn one by one. So the bootstrap draws whole blocks, with the loads of both sides
together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BOUND = 0.03
"""Most that any figure may be worse."""
MIN_BLOCKS = 8
"""A bootstrap of fewer blocks knows too little of their spread."""
PASS = "PASS"
FAIL = "FAIL"
INCONCLUSIVE = "INCONCLUSIVE"
_RESAMPLES = 1000
_LEVELS = (2.5, 97.5)
"""Percentiles that a 95 % interval ends at."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one load of one server took."""

    latencies: Array
    """[num_requests] seconds."""
    wall_s: float


Block = Sequence[Load]
"""The loads of one side in one life of its servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worse:
    """By which part a figure is worse than V1's alone; below 0 where it is better."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    blocks: int

    @property
    def verdict(self) -> str:
        """Whether the whole interval is on one side of the bound."""
        if self.blocks < MIN_BLOCKS:
            return INCONCLUSIVE
        if self.high <= BOUND:
            return PASS
        return FAIL if self.low > BOUND else INCONCLUSIVE

    def __str__(self) -> str:
        return f"{self.value:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


def mean_s(loads: Block) -> float:
    """Return the mean latency in seconds."""
    return float(_latencies(loads).mean())


def p99_s(loads: Block) -> float:
    """Return the 99th percentile of latency in seconds, of all loads together."""
    return float(np.percentile(_latencies(loads), 99))


def requests_per_s(loads: Block) -> float:
    """Return the throughput."""
    return len(_latencies(loads)) / sum(load.wall_s for load in loads)


def _latencies(loads: Block) -> Array:
    return np.concatenate([load.latencies for load in loads])


Figure = Callable[[Block], float]

FIGURES: dict[str, tuple[Figure, bool]] = {
    "mean_s": (mean_s, False),
    "p99_s": (p99_s, False),
    "requests_per_s": (requests_per_s, True),
}
"""Each figure, and whether more is better."""


def figures(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the figures of one side over all blocks."""
    loads = [load for block in blocks for load in block]
    return {name: figure(loads) for name, (figure, _) in FIGURES.items()}


def compare(candidate: Sequence[Block], reference: Sequence[Block]) -> dict[str, Worse]:
    """Return by how much each figure is worse.

    Args:
        candidate: The loads of one side in each block.
        reference: Those of V1 alone in the same blocks; there may be more or fewer of them.

    Raises:
        ValueError: Blocks are missing on one side, or there is none.
    """
    if len(candidate) != len(reference) or not candidate:
        raise ValueError(
            f"{len(candidate)} and {len(reference)} blocks; both need the same, and at least one"
        )
    num_blocks = len(candidate)
    drawn = np.random.default_rng(0).integers(num_blocks, size=(_RESAMPLES, num_blocks))
    values = _worse(candidate, reference, range(num_blocks))
    spread = np.array(
        [list(_worse(candidate, reference, rows).values()) for rows in drawn.tolist()]
    )
    lows, highs = np.percentile(spread, _LEVELS, axis=0)
    return {
        name: Worse(value=value, low=float(low), high=float(high), blocks=num_blocks)
        for (name, value), low, high in zip(values.items(), lows, highs, strict=True)
    }


def _worse(
    candidate: Sequence[Block], reference: Sequence[Block], rows: Sequence[int]
) -> dict[str, float]:
    mine, v1 = (figures([side[row] for row in rows]) for side in (candidate, reference))
    return {
        name: (v1[name] / mine[name] if more_is_better else mine[name] / v1[name]) - 1.0
        for name, (_, more_is_better) in FIGURES.items()
    }
