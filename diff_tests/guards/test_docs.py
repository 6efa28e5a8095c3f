"""Relative links in the Markdown lead somewhere, and the feature table names what exists."""

import re
from pathlib import Path

import pytest

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
