"""The wheel holds the three packages and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"mrv2", "mrv2_compat", "mrv2_diff"}
SOURCES = ("pyproject.toml", "README.md", "mrv2", "compat", "diff_tests", "reports", "docs")


def strangers(names: list[str]) -> list[str]:
    """Files that have no place in the wheel."""
    found = []
    for name in names:
        top, _, rest = name.partition("/")
        inside = top in PACKAGES or (top.startswith("mrv2-") and top.endswith(".dist-info"))
        parts = rest.split("/")
        is_test = parts[-1].startswith("test_") or parts[-1] == "conftest.py"
        if not inside or is_test or name.endswith((".md", ".jsonl")):
            found.append(name)
    return found


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy, so that no `build/` of an earlier day slips in."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "latest", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    result = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_no_strangers(wheel_names: list[str]) -> None:
    assert not strangers(wheel_names)


def test_wheel_holds_every_module(wheel_names: list[str]) -> None:
    for package, folder in {
        "mrv2": ROOT / "mrv2",
        "mrv2_compat": ROOT / "compat" / "mrv2_compat",
        "mrv2_diff": ROOT / "diff_tests" / "mrv2_diff",
    }.items():
        expected = {
            f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")
        }
        assert expected, f"{folder} holds no module"
        assert expected <= set(wheel_names)


def test_strangers_are_seen() -> None:
    planted = ["compat/README.md", "mrv2/test_x.py", "reports/a.html", "mrv2/a.py"]
    assert strangers(planted) == planted[:3]
