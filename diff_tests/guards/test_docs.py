"""Relative links in the Markdown lead somewhere, and the feature table names what exists."""

import inspect
import re
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import cast

import pytest

from mrv2.sampling.stages import STAGES
from mrv2_compat.vllm_v1.requests import refusals
from mrv2_diff.catalog import CASES
from mrv2_diff.record import read
from mrv2_diff.report.summary import verdict_text

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
    written = [page for page in PAGES if page != ROOT / "reports" / "PARITY.md"]  # a rendered one
    strange = [str(page.relative_to(ROOT)) for page in written if not page.read_text().isascii()]
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


def feature_rows(text: str) -> dict[str, dict[str, str]]:
    """The cells of the table of served features, by case and by heading."""
    lines = dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    table = takewhile(lambda line: line.startswith("|"), lines)
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    cells = [dict(zip(headings, row, strict=True)) for row in rows]
    return {case: row for row in cells for case in re.findall(r"`([^`]+)`", row["Cases"])}


def test_feature_table_contradicts_no_kept_record() -> None:
    rows = feature_rows((ROOT / "docs" / "features.md").read_text())
    latest = {}
    for path in sorted((ROOT / "reports" / "parity").glob("*/*.jsonl")):
        for record in read(path):
            column = "CPU" if record.environment["cuda"] == "none" else "GPU"
            if record.pair == ("v1", "mrv2") and record.id in rows:
                latest[record.id, f"Parity on {column}"] = verdict_text(record.verdict)
    wrong = {
        f"{case}, {column}: {verdict}"
        for (case, column), verdict in latest.items()
        if verdict not in rows[case][column]
    }
    assert not wrong, f"docs/features.md says otherwise than the kept records: {sorted(wrong)}"


def test_feature_rows_are_read_by_case() -> None:
    table = "| F | Cases | Parity |\n|---|---|---|\n| x | `a.b`, `a.c` | match |\n\n| Refused | |\n"
    assert feature_rows(table)["a.c"]["Parity"] == "match"


def test_every_refusal_has_its_row() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    rules = [*refusals.CONFIG_RULES, *refusals.REQUEST_RULES]
    names = [*(rule.path for rule in rules), *refusals.ENVIRONMENT_FLAGS]
    assert not [name for name in names if f"`{name}`" not in text]
    assert not [rule.feature for rule in refusals.CONFIG_RULES if rule.feature not in text]


def tree_paths(text: str) -> set[str]:
    """Paths in the first fenced block of a page: two spaces of indent for each folder above."""
    found, above = set(), [""]
    for line in text.split("```")[1].splitlines()[1:]:
        if not line.strip():
            continue
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        path = above[depth] + name
        del above[depth + 1 :]
        above.append(path)
        found.add(path)
    return found


def test_architecture_names_what_exists_and_every_module_of_the_runner_and_adapter() -> None:
    paths = tree_paths((ROOT / "docs" / "architecture.md").read_text())
    assert not sorted(path for path in paths if not (ROOT / path).exists())
    modules = {
        path.relative_to(ROOT).as_posix()
        for folder in ("mrv2", "compat/mrv2_compat")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert not sorted(modules - paths), "give these a line in the tree of docs/architecture.md"


def test_architecture_names_every_op_and_no_other() -> None:
    sources = (path.read_text() for path in (ROOT / "mrv2").rglob("*.py"))
    ops = {name for source in sources for name in re.findall(r'TwinOp\(\s*"([\w.]+)"', source)}
    assert len(ops) > 20
    tables = (ROOT / "docs" / "architecture.md").read_text().split("| what | ops |")[1]
    named = re.findall(r"`([\w.]+)`", tables.partition("\n\n")[0])
    assert sorted(named) == sorted(ops)


def test_a_tree_is_read_by_its_indent() -> None:
    text = "```\na/        x\n  b/\n    c.py    y\n  d.py  z\n\ne/f/\n  g.py\n```"
    assert tree_paths(text) == {"a/", "a/b/", "a/b/c.py", "a/d.py", "e/f/", "e/f/g.py"}


def test_index_links_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    pages = set((ROOT / "docs").rglob("*.md")) - {index}
    assert not sorted(page.name for page in pages - linked)


def test_cases_are_read_from_their_column_only() -> None:
    table = "| Feature | Cases |\n|---|---|\n| `x` | `a.b`, `a.c` |\n\n| Other |\n|---|\n| `y` |\n"
    assert cases_in_table(table) == {"a.b", "a.c"}
