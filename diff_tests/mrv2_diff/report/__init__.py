"""From records to `summary.json`, `PARITY.md` and `index.html`, with no state and no clock."""

from mrv2_diff.report.pairs import pairs_table
from mrv2_diff.report.render import render, render_committed
from mrv2_diff.report.summary import budgets_line, parity_line

__all__ = ["budgets_line", "pairs_table", "parity_line", "render", "render_committed"]
