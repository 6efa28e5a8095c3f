"""Writes the three files of a report, each whole or not at all."""

from collections.abc import Sequence
from pathlib import Path

from mrv2_diff import record as records_file
from mrv2_diff.record import Record
from mrv2_diff.report import markdown
from mrv2_diff.report.environments import pairs_text
from mrv2_diff.report.page import page
from mrv2_diff.report.pairs import pairs_table
from mrv2_diff.report.summary import summary_json
from mrv2_diff.selftest.result import SelfTest, head, read

FILES = ("summary.json", "PARITY.md", "index.html")

TESTED = ".mutants.json"
"""Ends the name of a file that says how the harness was tested, beside the records."""

_RUN_PREFACE = "Written by `mrv2-diff report` from the records of one run."
_COMMITTED_PREFACE = (
    "Written by `mrv2-diff report --committed` from the records under `parity/`; "
    "the latest record of a case counts. Not edited by hand."
)
_NO_RECORDS = "No records are kept yet.\n"
_SMALL = ", small form"
"""What a title says of cases that were cut down."""


def render(records: Sequence[Record], out: Path, tested: SelfTest | None = None) -> None:
    """Write `summary.json`, `PARITY.md` and `index.html` into `out`.

    Args:
        records: Of a run.
        out: Folder.
        tested: What testing the harness found, for the head; None where it was not tested.

    Raises:
        OSError: The folder cannot be written or the disk is full.
    """
    out.mkdir(parents=True, exist_ok=True)
    table = pairs_table(records)
    if table is None:
        sections = [markdown.section(records, f"Pair {pairs_text(records)}")]
    else:
        sections = [markdown.pairs_section(table)]
        for pair in table.pairs:
            of_pair = [record for record in records if record.pair == pair]
            sections.append(markdown.section(of_pair, f"Pair {pairs_text(of_pair)}"))
    found = None if tested is None else head(tested)
    tests = [("", found)] if found is not None else []
    _replace(out / "summary.json", summary_json(records, found))
    _replace(out / "PARITY.md", markdown.document(sections, _RUN_PREFACE, tests).encode())
    _replace(out / "index.html", page(records, found).encode())


def render_committed(root: Path) -> str:
    """Return the text of `PARITY.md` for the records kept under `root/parity`.

    A case that has a record on one device is told as not run on every device that has none.

    Raises:
        ValueError: A file there holds something that is no record. Names file and line.
    """
    kept = [
        (path, pair, said, records)
        for path in sorted((root / "parity").glob("*/*.jsonl"))
        for (pair, said), records in _latest(path).items()
    ]
    sections = []
    for path, pair, said, here in kept:
        alike = (
            held for _, other, form, held in kept
            if other == pair and (_SMALL in form) == (_SMALL in said)
        )  # fmt: skip
        known = {case_id: record for held in alike for case_id, record in held.items()}
        absent = [record for case_id, record in known.items() if case_id not in here]
        title = f"{_place(path)}: {' and '.join(pair)}{said}"
        sections.append(markdown.section(list(here.values()), title, absent))
    for path, said in dict.fromkeys((path, said) for path, _, said, _ in kept):
        records = [
            record
            for other, _, form, held in kept
            if (other, form) == (path, said)
            for record in held.values()
        ]
        table = pairs_table(records)
        if table is not None:
            sections.append(markdown.pairs_section(table, f"{_place(path)}: case by pair{said}"))
    tests = [
        (f"vLLM {path.parent.name}, {path.name.removesuffix(TESTED)}", head(read(path)))
        for path in sorted((root / "parity").glob(f"*/*{TESTED}"))
    ]
    return markdown.document(sections or [_NO_RECORDS], _COMMITTED_PREFACE, tests)


def _place(path: Path) -> str:
    return f"vLLM {path.parent.name}, {path.stem}"


def _latest(path: Path) -> dict[tuple[tuple[str, str], str], dict[str, Record]]:
    """Return the last record of each case in a file that is only ever appended to.

    By pair and by what a title says of CUDA graphs and the cases' form, nothing where there were no
    graphs and the cases are whole.
    """
    latest: dict[tuple[tuple[str, str], str], dict[str, Record]] = {}
    for kept in records_file.read(path):
        graphs = kept.environment.get("graphs", "none")
        said = "" if graphs == "none" else f", CUDA graphs {graphs}"
        said += _SMALL if kept.environment.get("form") == "small" else ""
        latest.setdefault((kept.pair, said), {})[kept.id] = kept
    return latest


def write_committed(root: Path) -> Path:
    """Write `root/PARITY.md` anew and return its path."""
    path = root / "PARITY.md"
    _replace(path, render_committed(root).encode())
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write `content` beside `path` first, so that a full disk leaves the former file whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
