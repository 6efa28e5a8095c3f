"""One file of the project asks which vLLM there is: `mrv2_compat/vllm_v1/versions.py`.

Elsewhere no failed import of a part of vLLM is caught, no part is probed for, and vLLM's version is
compared with no other that is written down, so that a new version is prepared for in one place.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AUTHORITY = "compat/mrv2_compat/vllm_v1/versions.py"
NEEDS_NO_VLLM = {
    "diff_tests/gpu/bench_logprobs.py": "measures parts of vLLM where there are any",
    "diff_tests/gpu/bench_sampling.py": "measures parts of vLLM where there are any",
}
MODULES = sorted(
    path
    for folder in ("mrv2", "compat/mrv2_compat", "diff_tests")
    for path in (ROOT / folder).rglob("*.py")
)
_CATCHES_ABSENCE = {"ImportError", "ModuleNotFoundError"}
_VERSION_OF_VLLM = re.compile(
    r"\bvllm\.__version__|\binstalled_vllm\(|\bvllm_version\b|\bversion\(['\"]vllm['\"]\)"
)


def branches(source: str) -> list[str]:
    """Every place of a module where it does something else under another vLLM, with its line."""
    tree = ast.parse(source)
    names = _names_of_the_version(tree)
    found = []
    for node in ast.walk(tree):
        offence = _offence(node, names)
        if offence:
            found.append(f"line {getattr(node, 'lineno', 0)} {offence}")
    return found


def _names_of_the_version(tree: ast.AST) -> set[str]:
    """Names that `from vllm import __version__` binds."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "vllm"
        for alias in node.names
        if alias.name == "__version__"
    }


def _offence(node: ast.AST, version_names: set[str]) -> str | None:
    if isinstance(node, ast.Try) and _catches_absence(node) and any(_imports_vllm(node.body)):
        return "catches that a part of vLLM is absent"
    if isinstance(node, ast.Compare) and _orders_or_names_one(node):
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if used & version_names or _VERSION_OF_VLLM.search(ast.unparse(node)):
            return "compares vLLM's version"
    if (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("find_spec")
        and any(isinstance(a, ast.Constant) and "vllm." in str(a.value) for a in node.args)
    ):
        return "looks whether vLLM has a part"
    return None


def _orders_or_names_one(node: ast.Compare) -> bool:
    """Say whether a comparison orders values or has a literal, unlike one of two records."""
    sides = (node.left, *node.comparators)
    return any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops) or any(
        isinstance(side, ast.Constant | ast.Tuple) for side in sides
    )


def _catches_absence(node: ast.Try) -> bool:
    caught = [
        name.id
        for handler in node.handlers
        if handler.type is not None
        for name in ast.walk(handler.type)
        if isinstance(name, ast.Name)
    ]
    return bool(_CATCHES_ABSENCE & set(caught))


def _imports_vllm(body: list[ast.stmt]) -> Iterator[bool]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                yield (node.module or "").partition(".")[0] == "vllm"
            elif isinstance(node, ast.Import):
                yield any(alias.name.partition(".")[0] == "vllm" for alias in node.names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                yield "vllm" in ast.unparse(node)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_other_module_branches_on_vllms_version(module: Path) -> None:
    name = module.relative_to(ROOT).as_posix()
    found = branches(module.read_text())
    if name == AUTHORITY or name in NEEDS_NO_VLLM:
        assert found, f"{name} branches on nothing: take it from the list"
    else:
        assert not found


@pytest.mark.parametrize(
    "planted",
    [
        "try:\n    from vllm.v1 import x\nexcept ImportError:\n    x = None",
        "try:\n    import vllm.v1.x\nexcept (KeyError, ModuleNotFoundError):\n    pass",
        "def f():\n    try:\n        if a:\n            import vllm\n    except ImportError as e:\n"
        "        raise A from e",
        "import importlib\ntry:\n    importlib.import_module('vllm.x')\nexcept ImportError: ...",
        "import vllm\nx = vllm.__version__ >= '0.33'",
        "from vllm import __version__ as v\nif v[:4] == '0.32': ...",
        "from importlib.metadata import version\nx = version('vllm') < '1'",
        "from mrv2_compat.vllm_v1.versions import installed_vllm\nx = '0.32' in installed_vllm()",
        "from importlib.util import find_spec\nx = find_spec('vllm.v1.core.x')",
    ],
)
def test_planted_branch_is_seen(planted: str) -> None:
    assert len(branches(planted)) == 1


@pytest.mark.parametrize(
    "innocent",
    [
        "from vllm.v1 import x\ntry:\n    x()\nexcept ImportError:\n    pass",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "try:\n    from vllm import x\nexcept ValueError:\n    pass",
        "import torch\nx = torch.__version__ > '2'",
        "import vllm\nsaid = vllm.__version__",
        "from vllm import __version__\nis_other = head.vllm != __version__",
    ],
)
def test_what_is_no_branch_is_let_through(innocent: str) -> None:
    assert branches(innocent) == []
