"""Three runners or more: which pairs of them agree, case by case."""

from collections.abc import Sequence
from dataclasses import dataclass

from mrv2_diff.record import Record
from mrv2_diff.report.figures import MISSING
from mrv2_diff.report.summary import verdict_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsTable:
    """Cases by pairs."""

    pairs: list[tuple[str, str]]
    rows: list[tuple[str, list[Record | None]]]
    """Each case's id and its record on each pair, None where it has none."""

    @property
    def lines(self) -> list[str]:
        """The table for a terminal."""
        names = ["case", *(",".join(pair) for pair in self.pairs)]
        cells = [names] + [
            [case_id, *(verdict_text(kept.verdict) if kept else MISSING for kept in records)]
            for case_id, records in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]


def pairs_table(records: Sequence[Record]) -> PairsTable | None:
    """Return the table of records of three runners or more; None of fewer."""
    pairs = list(dict.fromkeys(record.pair for record in records))
    if len({name for pair in pairs for name in pair}) < 3:
        return None
    kept = {(record.id, record.pair): record for record in records}
    ids = dict.fromkeys(record.id for record in records)
    rows = [(case_id, [kept.get((case_id, pair)) for pair in pairs]) for case_id in ids]
    return PairsTable(pairs=pairs, rows=rows)
