"""Relative links in the Markdown lead somewhere, and the feature table names what exists."""

import inspect
import re
from pathlib import Path
from typing import cast

import pytest

from mrv2.sampling.stages import STAGES
from mrv2_diff.catalog import CASES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "compat/*.md", "reports/**/*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if "latest" not in path.relative_to(ROOT).parts
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def dead_links(page: Path) -> list[str]:
    """Relative targets that do not exist, or name a heading that the target page lacks."""
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(target)
    return dead


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, spelled as Markdown hosts spell them."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


def test_every_page_is_ascii() -> None:
    strange = [str(page.relative_to(ROOT)) for page in PAGES if not page.read_text().isascii()]
    assert not strange


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](page.md#a-title) [b](gone.md) [c](#nowhere) [d](https://x.y)\n")
    assert dead_links(page) == ["gone.md", "#nowhere"]


def cases_in_table(text: str) -> set[str]:
    """What stands in backticks in the columns headed "Case" or "Cases" of a page's tables."""
    found: set[str] = set()
    column: int | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if column is None:
            headings = [cell.lower() in ("case", "cases") for cell in cells]
            column = headings.index(True) if any(headings) else len(cells)
        elif column < len(cells):
            found |= set(re.findall(r"`([^`]+)`", cells[column]))
    return found


def test_feature_table_names_every_case_and_no_other() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    assert cases_in_table(text) == set(CASES)


def test_feature_table_names_the_file_of_every_stage() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    files = [Path(inspect.getfile(cast("type", stage))) for stage in STAGES]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    assert not [name for name in names if name not in text]


def test_cases_are_read_from_their_column_only() -> None:
    table = "| Feature | Cases |\n|---|---|\n| `x` | `a.b`, `a.c` |\n\n| Other |\n|---|\n| `y` |\n"
    assert cases_in_table(table) == {"a.b", "a.c"}
