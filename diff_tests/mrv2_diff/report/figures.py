"""The headline figures of a record, and how numbers are written for people.

A figure that was not measured is None, and is written as a dash, never as zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from mrv2_diff.record import Latency, Memory, Record
from mrv2_diff.verdict import Verdict

MISSING = "–"  # noqa: RUF001  an en dash is what people expect in an empty cell

BUDGET_WORDS = {
    Verdict.MATCH: "within",
    Verdict.OVER_BUDGET: "over",
    Verdict.INCONCLUSIVE: "open",
}
"""Of a budget. It is open where the interval holds it, or where too little was measured."""

Figure = TypeVar("Figure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What the first table shows of a record."""

    tokens_compared: int
    tokens_differing: int
    values_compared: int
    logit_diff: float | None
    logit_floor: float | None
    memory_ratio: float | None
    """Candidate's peak over the reference's, of the phase that its budget is judged by; in records
    without one, of a step, tensors and Python heap together."""
    latency_ratio: float | None
    """Candidate's step over the reference's, on the host."""
    memory: Verdict | None
    """On the budget; None where the record has none."""
    latency: Verdict | None


def headline(record: Record) -> Headline:
    """Return the headline figures of `record`."""
    tokens = record.agreements.get("tokens")
    logits = record.agreements.get("logits")
    costs = {cost.quantity: cost for cost in record.costs}
    memory, latency = costs.get("memory"), costs.get("host time")
    return Headline(
        tokens_compared=tokens.compared if tokens else 0,
        tokens_differing=tokens.differing if tokens else 0,
        values_compared=sum(agreement.compared for agreement in record.agreements.values()),
        logit_diff=logits.required_tolerance if logits else None,
        logit_floor=record.noise_floor.get("logits"),
        memory_ratio=memory.ratio if memory else _memory_ratio(*sides(record.memory, record.pair)),
        latency_ratio=(
            latency.ratio if latency else _latency_ratio(*sides(record.latency, record.pair))
        ),
        memory=memory.verdict if memory else None,
        latency=latency.verdict if latency else None,
    )


def sides(
    figures: Mapping[str, Figure], pair: tuple[str, str]
) -> tuple[Figure | None, Figure | None]:
    """Return the reference's and the candidate's figure.

    A runner that is compared with itself has one name; its second figure then has the other key.
    """
    reference, candidate = pair
    if reference == candidate:
        candidate = next((name for name in figures if name != reference), candidate)
    return figures.get(reference), figures.get(candidate)


def ratio(candidate: float, reference: float) -> float | None:
    """Return candidate over reference, or None where the reference is zero."""
    return candidate / reference if reference else None


def _memory_ratio(reference: Memory | None, candidate: Memory | None) -> float | None:
    if reference is None or candidate is None:
        return None
    return ratio(step_peak_bytes(candidate), step_peak_bytes(reference))


def _latency_ratio(reference: Latency | None, candidate: Latency | None) -> float | None:
    if reference is None or candidate is None:
        return None
    return ratio(candidate.total_us.median, reference.total_us.median)


def step_peak_bytes(memory: Memory) -> int:
    """Return the peak of a step: tensors and Python heap together."""
    return memory.step_peak_tensor_bytes + memory.step_peak_python_bytes


def count_text(value: int) -> str:
    """Return a whole number with its thousands apart: `12,345`."""
    return f"{value:,}"


def number_text(value: float | None) -> str:
    """Return a number to three significant digits: `0`, `0.125`, `3.1e-06`."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if not math.isfinite(value) or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}"


def ratio_text(value: float | None) -> str:
    """Return a ratio with its sign: `0.62x` with a multiplication sign."""
    return MISSING if value is None else f"{value:.2f}\N{MULTIPLICATION SIGN}"


def budget_text(verdict: Verdict | None) -> str:
    """Return how a budget was kept: `within`, `over`, `open`, or nothing where there is none."""
    return "" if verdict is None else BUDGET_WORDS[verdict]


def bytes_text(value: int) -> str:
    """Return a size in the largest unit that leaves at least one: `1.5 MiB`."""
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def time_text(microseconds: float) -> str:
    """Return a duration with its unit: `412 us` (with a micro sign) or `1.24 ms`."""
    if microseconds >= 1000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds:.0f} \N{MICRO SIGN}s"
