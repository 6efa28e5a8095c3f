"""The committed `PARITY.md` is what its records say, and so are the tables of other figures."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrv2_diff.drivers.shadow_cost import Worse, compare_figures
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


GPU = REPORTS / "gpu"
SIDES = ("mrv2", "v1", "v2")


def figures(name: str) -> dict[str, Any]:
    (path,) = GPU.glob(f"{name}-*.json")
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def gpu_rows() -> Iterator[str]:
    """The rows of the tables in `reports/gpu/README.md`, from the kept files."""
    for name, batches in figures("sampling")["times"].items():
        for batch, sides in batches.items():
            times = [sides[side].get("median_us", "-") for side in SIDES]
            peaks = [sides[side].get("peak_bytes") for side in SIDES]
            mib = ["-" if peak is None else f"{peak / 2**20:.2f}" for peak in peaks]
            yield row(name, batch, *times, *mib)
    for entry in figures("logprobs")["logprobs"]:
        if entry["count"] == 5:
            sides = [entry["sides"][side] for side in SIDES]
            name = f"5 logprobs, {entry['dtype'].removeprefix('torch.')}"
            times, mib = ([side[key] for side in sides] for key in ("us", "peak_mib"))
            yield row(name, entry["batch"], *times, *mib)
    for entry in figures("logprobs")["prompts"]:
        sides = [entry["sides"][side] for side in ("mrv2", "v2")]
        times, peaks = ([side[key] for side in sides] for key in ("ms", "peak_mb"))
        yield row(entry["prompt"], entry["count"], *times, *peaks)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def test_gpu_tables_are_the_kept_figures() -> None:
    lines = (GPU / "README.md").read_text().splitlines()
    written = [line for line in lines if re.match(r"\| [^|]+ \| \d+ \|", line)]
    assert written == list(gpu_rows())


SHADOWS = {
    "V1 again": ("v1 again", ("v1",)),
    "a share of 1 %": ("shadow 1 %", ("v1", "v1 again")),
    "a share of 20 %": ("shadow 20 %", ("v1", "v1 again")),
}
"""Rows of the table in `docs/shadow.md`: a server, and those that it is compared with."""


def percents(one: Worse) -> str:
    value, low, high = (f"{100 * part:.1f}" for part in (one.value, one.low, one.high))
    return f"{value} % [{low}, {high}]"


def test_the_cost_of_a_shadow_is_that_of_its_record() -> None:
    (path,) = (REPORTS / "shadow").glob("cost-*.json")
    record = json.loads(path.read_text())
    page = (REPORTS.parent / "docs" / "shadow.md").read_text()
    for name, (server, references) in SHADOWS.items():
        lives = record["lives"]
        found = compare_figures(lives[server], *(lives[one] for one in references))
        cells = [percents(found[figure]) for figure in ("mean_s", "p99_s", "requests_per_s")]
        assert row(name, *cells) in page
        for figure, one in found.items():
            assert record["worse"][server][figure]["value"] == one.value
    assert record["environment"]["commit"][:7] in page
