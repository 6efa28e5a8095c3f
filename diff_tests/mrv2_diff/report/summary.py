"""Counts by verdict, the line that ends every command, and `summary.json`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from mrv2_diff.record import Record
from mrv2_diff.report.figures import BUDGET_WORDS, budget_text, headline
from mrv2_diff.verdict import Verdict


def verdict_text(verdict: Verdict) -> str:
    """Return a verdict in words: `near tie`."""
    return verdict.value.lower().replace("_", " ")


def counts(records: Iterable[Record]) -> dict[Verdict, int]:
    """Return how many records ended in each verdict that occurs, in the enum's order."""
    found = Counter(record.verdict for record in records)
    return {verdict: found[verdict] for verdict in Verdict if found[verdict]}


def counts_text(records: Sequence[Record]) -> str:
    """Return `N match, N near tie, ...`; matches are always told, the rest where they occur."""
    tally = {Verdict.MATCH: 0, **counts(records)}
    return ", ".join(f"{number} {verdict_text(verdict)}" for verdict, number in tally.items())


def cases_text(number: int) -> str:
    """Return `1 case` or `N cases`."""
    return f"{number} {'case' if number == 1 else 'cases'}"


def parity_line(records: Sequence[Record]) -> str:
    """Return the last line of a run and of a report."""
    return f"parity: {cases_text(len(records))}, {counts_text(records)}"


def budgets_line(records: Sequence[Record]) -> str | None:
    """Return how the budgets of memory and time were kept; None where nothing was measured.

    `budgets: memory 40 within, 2 over; host time 9 within, 3 over, 30 open`
    """
    by_quantity: dict[str, Counter[str]] = {}
    for record in records:
        for cost in record.costs:
            by_quantity.setdefault(cost.quantity, Counter())[budget_text(cost.verdict)] += 1
    if not by_quantity:
        return None
    told = [
        f"{quantity} " + ", ".join(f"{found[word]} {word}" for word in BUDGET_WORDS.values()
                                   if found[word] or word == "within")
        for quantity, found in by_quantity.items()
    ]  # fmt: skip
    return f"budgets: {'; '.join(told)}"


def summary_json(records: Sequence[Record]) -> bytes:
    """Return `summary.json`. Figures that are not finite are written as null."""
    summary = {
        "passes": bool(records) and all(record.verdict.passes for record in records),
        "counts": {verdict.value: number for verdict, number in counts(records).items()},
        "cases": [_case(record) for record in records],
    }
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def _case(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "area": record.area,
        "feature": record.feature,
        "pair": record.pair,
        "verdict": record.verdict,
        "summary": record.summary,
        "figures": {
            "steps": record.steps,
            "request_steps": record.request_steps,
            **msgspec.to_builtins(headline(record)),
        },
        "costs": msgspec.to_builtins(record.costs),
    }
