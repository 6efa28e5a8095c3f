"""The committed `PARITY.md` is what its records say."""

import shutil
from pathlib import Path

from mrv2_diff.report.render import render_committed

REPORTS = Path(__file__).resolve().parents[2] / "reports"
REMEDY = "write it again: mrv2-diff report --committed"


def test_parity_page_is_rendered_from_the_records() -> None:
    assert (REPORTS / "PARITY.md").read_text() == render_committed(REPORTS), REMEDY


def test_a_missing_record_is_seen(tmp_path: Path) -> None:
    files = sorted((REPORTS / "parity").glob("*/*.jsonl"))
    assert files, "no record is kept: copy reports/latest/records.jsonl, see reports/README.md"
    shutil.copytree(REPORTS / "parity", tmp_path / "parity")
    victim = tmp_path / files[0].relative_to(REPORTS)
    victim.write_text("".join(victim.read_text().splitlines(keepends=True)[1:]))
    assert render_committed(tmp_path) != render_committed(REPORTS)
