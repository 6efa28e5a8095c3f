"""Memory and time against a case's budget: from what was measured to verdicts.

No runner and no torch here, so that every way to judge can be tested by hand.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import numpy.typing as npt

from mrv2_diff.case import Budget
from mrv2_diff.record import Cost, HeldBy, Memory
from mrv2_diff.verdict import Verdict

START_PHASES = ("weights", "profile", "kv", "graphs")
"""Of a runner's start, in order. Each counts all that is held since the start began."""
STEP_PHASES = ("execute", "sample")
"""Of a step, which is judged by its highest. What is kept between steps counts; weights and KV
cache, which are equal by construction, do not. A runner that is not asynchronous returns its output
from sample, so that what the output takes is part of that."""
STEP = "step"
HELD = "kept between steps"
"""Stands for an operation: the runner's state."""

ROUND_PAIRS = 4
"""Pairs of steps in a round. The runners take turns in going first, so that a pair has each order
once, and a drift of the machine is the same for both."""
MIN_ROUNDS = 10
"""A bootstrap of fewer knows too little of their spread."""
_RESAMPLES = 2000
_CONFIDENCE = 0.95

Array = npt.NDArray[np.float64]
Times = dict[int, dict[str, tuple[Sequence[float], Sequence[float]]]]
"""By step and kind: seconds of the reference's parts and of the candidate's, such as execute and
sample."""


@dataclass(slots=True)
class StepTimes:
    """Times of steps that both runners ran, in passes over the same workload."""

    passes: list[Times] = field(default_factory=list)

    def rounds(self, kind: str) -> list[float]:
        """Return the candidate's time over the reference's in each whole round of each pass."""
        found = []
        for steps in self.passes:
            ratios = _pair_ratios({n: by[kind] for n, by in steps.items() if kind in by})
            for start in range(0, len(ratios) - ROUND_PAIRS + 1, ROUND_PAIRS):
                found.append(median(ratios[start : start + ROUND_PAIRS]))
        return found

    def excess(self, kind: str) -> list[float]:
        """Return by how much the candidate's phases are longer in the median, in seconds."""
        rows = [by[kind] for steps in self.passes for by in steps.values() if kind in by]
        phases = min((min(len(r), len(c)) for r, c in rows), default=0)
        return [median(c[phase] - r[phase] for r, c in rows) for phase in range(phases)]


def _pair_ratios(steps: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    """Return the ratio of each pair of steps that follow each other; a step is in one pair."""
    ratios, numbers = [], sorted(steps)
    while len(numbers) > 1:
        first, second, *rest = numbers
        if second != first + 1:
            numbers = numbers[1:]
            continue
        reference = sum(steps[first][0]) + sum(steps[second][0])
        candidate = sum(steps[first][1]) + sum(steps[second][1])
        if reference > 0:
            ratios.append(candidate / reference)
        numbers = rest
    return ratios


def judge_memory(reference: Memory, candidate: Memory, budget: Budget) -> Cost:
    """Return the verdict on the phase of the start, or the step, whose ratio is the largest."""
    ratios = {
        phase: _ratio(footprint(candidate, phase), footprint(reference, phase))
        for phase in (*START_PHASES, STEP)
        if _parts(reference, phase) and _parts(candidate, phase)
    }
    if not ratios:
        return Cost(
            quantity="memory", verdict=Verdict.INCONCLUSIVE, budget=budget.memory, ratio=None,
            samples=0, phase="", summary="memory: no phase was measured in both runners",
        )  # fmt: skip
    decides = max(ratios, key=lambda name: ratios[name])
    ratio, phase = ratios[decides], _highest(candidate, decides)
    within = ratio <= budget.memory
    op, more = _heaviest(reference, candidate, decides)
    said = f"memory: {_bytes(footprint(candidate, decides))} in {phase}, {ratio:.3f} times V1's"
    said += f", budget {budget.memory:g}, required {ratio:.3f}"
    return Cost(
        quantity="memory",
        verdict=Verdict.MATCH if within else Verdict.OVER_BUDGET,
        budget=budget.memory,
        ratio=ratio,
        low=ratio,
        high=ratio,
        samples=len(ratios),
        phase=phase,
        op=op,
        summary=said if within else f"{said}: {op} holds {_bytes(more)} more than in V1",
    )


def footprint(memory: Memory, phase: str) -> int:
    """Return the bytes that count of a phase of the start, or of a step."""
    held = memory.state_held_bytes if phase == STEP else 0
    return held + max(memory.phases[part].peak_bytes for part in _parts(memory, phase))


def _parts(memory: Memory, phase: str) -> list[str]:
    return [part for part in (STEP_PHASES if phase == STEP else (phase,)) if part in memory.phases]


def _highest(memory: Memory, phase: str) -> str:
    return max(_parts(memory, phase), key=lambda part: memory.phases[part].peak_bytes)


def _heaviest(reference: Memory, candidate: Memory, phase: str) -> tuple[str, int]:
    """Return what the candidate's peak has most of beyond the reference's, and how much.

    An operation counts by what its function holds more than the same function in the reference, and
    by no more than all operations of its name do: the runners call other functions for one purpose.
    """
    ours = candidate.phases[_highest(candidate, phase)].held_by
    theirs = reference.phases[_highest(reference, phase)].held_by
    more = {
        held.op: min(
            _held(ours, held.op) - _held(theirs, held.op),
            _held(ours, _name(held.op), whole=False) - _held(theirs, _name(held.op), whole=False),
        )
        for held in ours
    }
    if phase == STEP:
        more[HELD] = candidate.state_held_bytes - reference.state_held_bytes
    op = max(more, key=lambda each: more[each], default="")
    return op, more.get(op, 0)


def _held(held_by: Sequence[HeldBy], op: str, *, whole: bool = True) -> int:
    """Return the bytes of an operation, in one function or in all."""
    return sum(held.bytes for held in held_by if (held.op if whole else _name(held.op)) == op)


def _name(op: str) -> str:
    return op.partition(" in ")[0]


def _ratio(candidate: int, reference: int) -> float:
    if reference:
        return candidate / reference
    return math.inf if candidate else 1.0


def judge_time(
    quantity: str, times: StepTimes, kind: str, budget: Budget, *, by_turns: bool = True
) -> Cost:
    """Return the verdict on a time: none where the interval of its ratio holds the budget.

    Args:
        quantity: What it is called.
        times: Of steps.
        kind: Of times.
        budget: Of the case.
        by_turns: Whether the runners took turns in going first; there is no verdict without.
    """
    rounds = times.rounds(kind)
    ratio = median(rounds) if rounds else None
    low, high = interval(rounds)
    excess = times.excess(kind)
    phase = STEP_PHASES[excess.index(max(excess))] if len(excess) == len(STEP_PHASES) else "step"
    verdict, why = Verdict.INCONCLUSIVE, "the interval holds the budget"
    if low is None or high is None:
        why = f"{len(rounds)} rounds of {2 * ROUND_PAIRS} steps, and {MIN_ROUNDS} say something"
    elif not by_turns:
        why = "one runner went first in every step"
    elif high <= budget.latency:
        verdict, why = Verdict.MATCH, ""
    elif low > budget.latency:
        verdict, why = Verdict.OVER_BUDGET, f"most of it in {phase}"
    said = f"{quantity}: not measured" if ratio is None else f"{quantity}: {ratio:.3f} times V1's"
    said += f" ({low:.3f} to {high:.3f})" if low is not None and high is not None else ""
    said += f", budget {budget.latency:g}"
    said += f", required {high:.3f}" if high is not None else ""
    return Cost(
        quantity=quantity,
        verdict=verdict,
        budget=budget.latency,
        ratio=ratio,
        low=low,
        high=high,
        samples=len(rounds),
        phase=phase,
        summary=f"{said}: {why}" if why else said,
    )


def interval(rounds: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the bounds of the 95 % interval of the median; None of too few."""
    if len(rounds) < MIN_ROUNDS:
        return None, None
    if min(rounds) == max(rounds):
        return rounds[0], rounds[0]
    from scipy.stats import bootstrap  # type: ignore[import-untyped]  # half a second

    def statistic(sample: Array, axis: int = -1) -> Array:
        return np.median(sample, axis=axis)

    bounds = bootstrap(
        (np.asarray(rounds),),
        statistic,
        vectorized=True,
        method="percentile",
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(bounds.low), float(bounds.high)


def _bytes(value: int) -> str:
    return f"{value / 1024:.1f} KiB" if value < 1 << 20 else f"{value / (1 << 20):.2f} MiB"
