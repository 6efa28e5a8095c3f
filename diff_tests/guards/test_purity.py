"""The runner keeps no hidden state and touches nobody else's objects.

`mrv2` reads no environment (Triton's interpret switch in `ops/twin.py` apart), has no `global`
statement, calls no `setattr`, and assigns no attribute of a module that it imported.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "mrv2").rglob("*.py"))
READS_ENVIRONMENT = "ops/twin.py"


def impurities(source: str, *, reads_environment: bool = False) -> list[str]:
    """Every offence in a module's source, with its line."""
    tree = ast.parse(source)
    modules = set(_imported_modules(tree))
    found = []
    for node in ast.walk(tree):
        offence = _offence(node, modules)
        if offence and not (reads_environment and offence == "reads the environment"):
            found.append(f"line {getattr(node, 'lineno', 0)} {offence}")
    return found


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    """Names that `import x`, `import x as y` and `from x import y` bind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0]


def _offence(node: ast.AST, modules: set[str]) -> str | None:
    if isinstance(node, ast.Global):
        return "has a global statement"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
        return "calls setattr"
    if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
        return "reads the environment"
    if isinstance(node, ast.ImportFrom) and any(
        a.name in ("environ", "getenv") for a in node.names
    ):
        return "reads the environment"
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        base = node.value
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id in modules:
            return f"assigns {ast.unparse(node)}"
    return None


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_is_pure(module: Path) -> None:
    exempt = module.relative_to(ROOT / "mrv2").as_posix() == READS_ENVIRONMENT
    assert not impurities(module.read_text(), reads_environment=exempt)


@pytest.mark.parametrize(
    "planted",
    [
        "import os\nx = os.environ['A']",
        "from os import getenv",
        "def f():\n    global x\n    x = 1",
        "setattr(f, 'a', 1)",
        "import torch\ntorch.cuda.Stream = None",
        "import torch.nn as nn\nnn.Linear = None",
        "from torch import nn\ndel nn.Linear",
    ],
)
def test_planted_impurity_is_seen(planted: str) -> None:
    assert len(impurities(planted)) == 1


def test_own_attributes_are_not_offences() -> None:
    assert not impurities("class A:\n    def __init__(self):\n        self.x = 1\n")
