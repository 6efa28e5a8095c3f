"""The environment tells what was measured on, and nobody's name."""

import getpass
import platform
import subprocess
from pathlib import Path

import pytest

from mrv2_diff.environment import collect, cpu_model


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    _git(tmp_path, "init", "--quiet")
    (tmp_path / "tracked").write_text("one")
    _git(tmp_path, "add", "tracked")
    _git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_every_version_is_told() -> None:
    found = collect("cpu", seed=3)
    expected = {"mrv2", "vllm", "torch", "triton", "transformers", "numpy", "python", "cuda"}
    assert expected <= set(found)
    assert all(isinstance(value, str) and value for value in found.values())
    assert found["python"] == platform.python_version()
    assert found["seed"] == "3"
    assert int(found["cores"]) >= 1


def test_no_path_host_or_user_is_told(checkout: Path) -> None:
    text = " ".join(collect("cpu", checkout=checkout).values())
    assert str(checkout) not in text
    assert str(Path.home()) not in text
    assert platform.node() not in text.split()
    assert getpass.getuser() not in text.split()


def test_the_commit_says_whether_tracked_files_changed(checkout: Path) -> None:
    head = _git(checkout, "rev-parse", "--short=12", "HEAD")
    assert collect("cpu", checkout=checkout)["commit"] == head
    (checkout / "untracked").write_text("two")
    assert collect("cpu", checkout=checkout)["commit"] == head
    (checkout / "tracked").write_text("two")
    changed = collect("cpu", checkout=checkout)["commit"]
    assert changed.startswith(f"{head}+dirty.")
    assert collect("cpu", checkout=checkout)["commit"] == changed
    (checkout / "tracked").write_bytes(b"t\xffree")
    assert collect("cpu", checkout=checkout)["commit"] not in (head, changed)


def test_without_a_checkout_the_commit_is_none(tmp_path: Path) -> None:
    assert collect("cpu", checkout=tmp_path)["commit"] == "none"


def test_a_folder_that_git_does_not_track_has_no_commit(checkout: Path) -> None:
    installed = checkout / "venv"
    installed.mkdir()
    (installed / "module.py").touch()
    assert collect("cpu", checkout=installed)["commit"] == "none"


def test_the_processor_has_a_name_everywhere(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(cpuinfo) == "Some CPU @ 2 GHz"
    cpuinfo.write_text("processor\t: 0\n")
    assert cpu_model(cpuinfo) == platform.machine()
    assert cpu_model(tmp_path / "missing") == platform.machine()
