"""Groups records by what they were measured on, since a resumed run may span several."""

from collections.abc import Sequence
from dataclasses import dataclass

from mrv2_diff.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """One environment and how many cases ran in it."""

    facts: dict[str, str]
    cases: int


def environments(records: Sequence[Record]) -> list[MeasuredOn]:
    """Return the distinct environments in the order in which they first occur."""
    tally: dict[tuple[tuple[str, str], ...], int] = {}
    for record in records:
        key = tuple(record.environment.items())
        tally[key] = tally.get(key, 0) + 1
    return [MeasuredOn(facts=dict(key), cases=cases) for key, cases in tally.items()]


def pairs_text(records: Sequence[Record]) -> str:
    """Return the pairs that occur, in order: `v1 and mrv2`."""
    pairs = dict.fromkeys(" and ".join(record.pair) for record in records)
    return "; ".join(pairs) or "no pair"
