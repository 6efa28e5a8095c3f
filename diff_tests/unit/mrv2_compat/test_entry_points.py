"""The entry point that VLLM_PLUGINS cannot hide, and what it lets through."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mrv2_compat import entry_points
from mrv2_diff.drivers.variables import clean_environment

HIDDEN = {"MRV2_RUNNER": "mrv2", "VLLM_PLUGINS": "other"}


def run(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in an environment in which nothing else chooses a runner."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean_environment(os.environ), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.vllm
@pytest.mark.parametrize("value", ["other", ""])
def test_vllm_does_not_start_where_a_set_runner_would_be_ignored(value: str) -> None:
    done = run("import vllm; print('STARTED')", {**HIDDEN, "VLLM_PLUGINS": value})
    assert done.returncode != 0
    assert "STARTED" not in done.stdout
    assert "MRV2_RUNNER='mrv2' cannot act" in done.stderr
    assert f"VLLM_PLUGINS={value!r} hides the entry point 'mrv2'" in done.stderr
    assert "add 'mrv2' to VLLM_PLUGINS, or unset it" in done.stderr
    assert "mrv2-hidden-by-VLLM_PLUGINS" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"VLLM_PLUGINS": "other"},
        {"MRV2_RUNNER": "mrv2"},
        {"MRV2_RUNNER": "no such runner"},
        {"MRV2_RUNNER": "mrv2", "VLLM_PLUGINS": "other,mrv2"},
    ],
)
def test_nothing_is_said_where_one_is_loaded_or_nothing_is_set(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    entry_points.on_torch_import()


def test_where_one_is_loaded_the_function_behind_it_speaks(
    split_plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(split_plugin), *sys.path])
    monkeypatch.setenv("MRV2_RUNNER", "mrv2")
    monkeypatch.setenv("VLLM_PLUGINS", "mrv2_general")
    entry_points.on_torch_import()


def test_a_program_that_imports_torch_pays_for_nothing_but_a_look() -> None:
    code = (
        "import sys; before = set(sys.modules); import mrv2_compat.entry_points;"
        "print({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - sys.stdlib_module_names)"
    )
    assert run(code, {}).stdout.strip() == "{'mrv2_compat'}"


def test_torch_finds_the_door_as_installed() -> None:
    (name,) = {
        point.name
        for point in metadata.entry_points(group="torch.backends")
        if point.value == "mrv2_compat.entry_points:on_torch_import"
    }
    assert name == "mrv2-hidden-by-VLLM_PLUGINS"


def test_both_entry_points_are_seen_as_installed() -> None:
    assert entry_points.hidden_entry_points({}) == []
    assert entry_points.hidden_entry_points({entry_points.PLUGINS_VAR: "other,mrv2"}) == []


def test_one_hidden_entry_point_is_reported_alone(
    split_plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(split_plugin), *sys.path])
    hidden = entry_points.hidden_entry_points({entry_points.PLUGINS_VAR: "mrv2_platform"})
    assert len(hidden) == 1
    assert "vllm.general_plugins" in hidden[0]
