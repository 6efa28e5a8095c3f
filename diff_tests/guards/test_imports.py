"""The import contracts hold, vLLM stays where it may be imported, and both checks can fail."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "mrv2": "mrv2",
    "mrv2_compat": "compat/mrv2_compat",
    "mrv2_diff": "diff_tests/mrv2_diff",
}
VLLM_DOORS = (
    "mrv2_diff/device_bench/",
    "mrv2_diff/drivers/",
    "mrv2_diff/lockstep.py",
    "mrv2_diff/lockstep/",
    "mrv2_diff/schedules/",
    "mrv2_diff/shadow/build.py",
    "mrv2_diff/shadow/follower.py",
    "mrv2_diff/shadow/worker.py",
    "mrv2_diff/traces/",
)


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(root / folder) for folder in (".", "compat", "diff_tests"))
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The three packages and their contracts, free to be broken."""
    for folder in PACKAGES.values():
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold() -> None:
    result = _lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("planted", ["import mrv2_compat", "import vllm", "import mrv2.runner"])
def test_planted_import_breaks_a_contract(copied: Path, planted: str) -> None:
    victim = copied / "mrv2" / "errors.py"
    victim.write_text(f"{victim.read_text()}\n{planted}\n")
    result = _lint_imports(copied)
    assert result.returncode != 0
    assert "BROKEN" in result.stdout


def test_unplaced_module_breaks_a_contract(copied: Path) -> None:
    (copied / "mrv2" / "utils.py").write_text('"""Nobody said where this belongs."""\n')
    assert _lint_imports(copied).returncode != 0


def vllm_imports(source: str) -> list[int]:
    """Lines that import vLLM or anything in it, at any depth of the code."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == "vllm" for name in names):
            lines.append(node.lineno)
    return lines


def test_harness_imports_vllm_only_where_it_may() -> None:
    found = []
    for path in sorted((ROOT / "diff_tests" / "mrv2_diff").rglob("*.py")):
        name = path.relative_to(ROOT / "diff_tests").as_posix()
        if not name.startswith(VLLM_DOORS):
            found += [f"{name}:{line}" for line in vllm_imports(path.read_text())]
    assert not found, f"vLLM is imported outside {', '.join(VLLM_DOORS)}: {found}"


def test_vllm_imports_are_seen_inside_functions() -> None:
    assert vllm_imports("def f():\n    from vllm.config import VllmConfig\n") == [2]
    assert vllm_imports("import vllm_cpu\nfrom .vllm import x\n") == []
