"""`PARITY.md`: the same feature table as text that a forge renders."""

import html
import re
from collections.abc import Sequence

from mrv2_diff.record import Record
from mrv2_diff.report.environments import environments
from mrv2_diff.report.figures import (
    MISSING,
    budget_text,
    count_text,
    headline,
    number_text,
    ratio_text,
)
from mrv2_diff.report.pairs import PairsTable
from mrv2_diff.report.summary import cases_text, counts_text, verdict_text
from mrv2_diff.selftest.result import Head
from mrv2_diff.verdict import Verdict

_COLUMNS = ("Feature", "Case", "Verdict", "Tokens compared", "Differing", "Logit difference",
            "Floor", "Memory", "Latency")  # fmt: skip
_ALIGNMENT = "|---|---|---|--:|--:|--:|--:|--:|--:|"

LEGEND = (
    "Logit difference: the largest, in spacings of float32 at the row's largest logit. Floor: the "
    "reference against itself, in the same unit. "
    "Memory and latency: candidate over reference, the peak of the phase that decides and a "
    "step's time on the host. Within, over: the case's budget (memory 1.02, latency 1.05 by "
    "default). Open: the interval of the ratio holds the budget. Neither is part of the verdict. "
    "In records without these words: the peak of a step, and the median step."
)

_SPECIAL = re.compile(r"([\\`*|\[\]~#]|(?<![^\W_])_|_(?![^\W_]))")


def escape(text: str) -> str:
    """Return `text` such that Markdown shows it as it is, on one line, in a cell or outside."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def section(records: Sequence[Record], title: str, absent: Sequence[Record] = ()) -> str:
    """Return one table with its heading, its counts and what it was measured on.

    Args:
        records: What was run.
        title: Heading.
        absent: Records from elsewhere of cases that were not run here.
    """
    not_run = f", {len(absent)} without a record here" if absent else ""
    lines = [
        f"## {escape(title)}",
        "",
        f"{cases_text(len(records))}: {counts_text(records)}{not_run}.",
    ]
    lines += ["", "| " + " | ".join(_COLUMNS) + " |", _ALIGNMENT]
    lines += [_row(record) for record in records] + [_absent_row(record) for record in absent]
    differing = [record for record in records if record.verdict is not Verdict.MATCH]
    if differing:
        lines += ["", "What differs:", ""]
        lines += [f"- {escape(record.id)}: {escape(record.summary)}" for record in differing]
    over = [
        f"- {escape(record.id)}: {escape(cost.summary)}"
        for record in records
        for cost in record.costs
        if cost.verdict is Verdict.OVER_BUDGET
    ]
    lines += ["", "Over budget:", "", *over] if over else []
    lines += ["", "Measured on:", ""]
    for environment in environments(records):
        facts = ", ".join(f"{name} {value}" for name, value in environment.facts.items())
        lines.append(f"- {cases_text(environment.cases)}: {escape(facts)}")
    return "\n".join(lines) + "\n"


def pairs_section(table: PairsTable, title: str = "Case by pair") -> str:
    """Return the table of cases by pairs, with its heading."""
    head = ["Case", *(" and ".join(pair) for pair in table.pairs)]
    lines = [f"## {escape(title)}", "", "| " + " | ".join(map(escape, head)) + " |"]
    lines.append("|" + "---|" * len(head))
    for case_id, records in table.rows:
        verdicts = [verdict_text(kept.verdict) if kept else MISSING for kept in records]
        lines.append("| " + " | ".join([escape(case_id), *verdicts]) + " |")
    return "\n".join(lines) + "\n"


def document(sections: Sequence[str], preface: str, tests: Sequence[tuple[str, Head]] = ()) -> str:
    """Return the whole file.

    Args:
        sections: A table each.
        preface: What the file is.
        tests: How far the harness can be trusted, each with where that was found out.
    """
    trust = [_trust(where, test) for where, test in tests]
    return "\n".join(["# Parity\n", *trust, f"{preface}\n", f"{LEGEND}\n", *sections])


def _trust(where: str, test: Head) -> str:
    on = ", ".join(f"{name} {value}" for name, value in test.facts.items())
    title = f"The harness tested, {where}" if where else "The harness tested"
    return f"**{escape(title)}: {escape(test.text)}.** {escape(on)}.\n"


def _row(record: Record) -> str:
    figures = headline(record)
    cells = (
        escape(record.feature),
        escape(record.id),
        verdict_text(record.verdict),
        count_text(figures.tokens_compared) if figures.tokens_compared else MISSING,
        count_text(figures.tokens_differing) if figures.tokens_compared else MISSING,
        number_text(figures.logit_diff),
        number_text(figures.logit_floor),
        f"{ratio_text(figures.memory_ratio)} {budget_text(figures.memory)}".rstrip(),
        f"{ratio_text(figures.latency_ratio)} {budget_text(figures.latency)}".rstrip(),
    )
    return "| " + " | ".join(cells) + " |"


def _absent_row(record: Record) -> str:
    named = (escape(record.feature), escape(record.id), verdict_text(Verdict.NOT_RUN))
    empty = (MISSING,) * (len(_COLUMNS) - len(named))
    return "| " + " | ".join(named + empty) + " |"
