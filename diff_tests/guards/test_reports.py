"""The committed parity page is what its records say, and nothing else."""

from pathlib import Path

from mrv2_diff.report import render_committed

REPORTS = Path(__file__).parents[2] / "reports"


def test_the_parity_page_is_rendered_from_the_kept_records() -> None:
    written = (REPORTS / "PARITY.md").read_text(encoding="utf-8")
    assert written == render_committed(REPORTS), (
        "reports/PARITY.md is stale; write it again: mrv2-diff report --committed"
    )
