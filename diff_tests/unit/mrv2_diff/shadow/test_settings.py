"""The shadow's variables, its counters, and the value of MRV2_RUNNER that it stands behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrv2.errors import ConfigError
from mrv2_compat import selection as sel
from mrv2_compat.entry_points import RUNNER_VAR
from mrv2_diff.shadow.choice import ShadowChoice, register
from mrv2_diff.shadow.counters import COUNTERS, Collector, Counters, read_all
from mrv2_diff.shadow.settings import Settings, check_file, read_settings


def test_defaults() -> None:
    settings = read_settings({"PATH": "/bin"})
    assert settings.share == 0.01
    assert settings.kv_bytes == 256 << 20
    assert settings.file == Path("mrv2_shadow.jsonl").absolute()


def test_every_value_is_read() -> None:
    settings = read_settings(
        {
            "MRV2_SHADOW_SHARE": "0.2",
            "MRV2_SHADOW_KV_BYTES": "1e6",
            "MRV2_SHADOW_FILE": "/tmp/x",
            "MRV2_SHADOW_LIMIT_S": "2.5",
            "MRV2_SHADOW_MAX_BEHIND": "7",
            "MRV2_SHADOW_GATHER_S": "0.5",
            "MRV2_SHADOW_PRIORITY": "normal",
        }
    )
    assert settings == Settings(
        share=0.2,
        kv_bytes=1_000_000,
        file=Path("/tmp/x"),
        limit_s=2.5,
        max_behind=7,
        gather_s=0.5,
        priority="normal",
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MRV2_SHADOW_SHARE", "1.5", "must be in [0, 1]"),
        ("MRV2_SHADOW_SHARE", "nan", "must be in [0, 1]"),
        ("MRV2_SHADOW_SHARE", "1%", "is no number"),
        ("MRV2_SHADOW_KV_BYTES", "0", "above 0"),
        ("MRV2_SHADOW_KV_BYTES", "2.5", "whole number"),
        ("MRV2_SHADOW_KV_BYTES", "inf", "whole number"),
        ("MRV2_SHADOW_LIMIT_S", "0", "above 0"),
        ("MRV2_SHADOW_MAX_BEHIND", "0", "above 0"),
        ("MRV2_SHADOW_MAX_BEHIND", "many", "is no number"),
        ("MRV2_SHADOW_GATHER_S", "-1", "must be a number of seconds, 0 or more"),
        ("MRV2_SHADOW_GATHER_S", "nan", "must be a number of seconds, 0 or more"),
        ("MRV2_SHADOW_PRIORITY", "high", "must be one of idle, normal"),
        ("MRV2_SHADOW_SHARES", "1", "no such setting"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings({name: value})
    assert name in str(raised.value)
    assert said in str(raised.value)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        check_file(Settings(file=tmp_path / "gone" / "x.jsonl"))


def test_shadow_is_a_value_where_the_harness_is_installed_and_an_error_where_not() -> None:
    added = {
        point.name: point
        for point in sel.added_choices().values()
        if point.value == "mrv2_diff.shadow.choice:choice"
    }
    assert list(added) == ["shadow"], "the installed entry points are old: run `make setup`"
    selection = sel.read_selection({RUNNER_VAR: "shadow"}, added)
    assert selection is not None
    assert selection.load_choice is not None
    assert isinstance(selection.load_choice(), ShadowChoice)
    with pytest.raises(ConfigError, match="'shadow' is not a runner; the values are: v1, mrv2"):
        sel.read_selection({RUNNER_VAR: "shadow"}, {})


def test_a_wrong_setting_is_refused_before_vllm_builds_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MRV2_SHADOW_SHARE", "20")
    monkeypatch.setenv(RUNNER_VAR, "v1")
    register()
    monkeypatch.setenv(RUNNER_VAR, "shadow")
    with pytest.raises(ConfigError, match="MRV2_SHADOW_SHARE=20"):
        register()


def test_another_platform_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu'"):
        ShadowChoice().worker_class("tpu")


def test_counters_of_all_workers_are_added_up(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    counters.add("mismatches", 3)
    counters.add("mismatches")
    counters.set_up(True)
    own = next(tmp_path.iterdir())
    (tmp_path / "1.counts").write_bytes(own.read_bytes())
    (tmp_path / "2.counts").write_bytes(b"cut")
    totals = read_all(tmp_path)
    assert (totals["mismatches"], totals["up"], totals["faults"]) == (8, 2, 0)
    assert counters["mismatches"] == 4


def test_metrics_show_every_counter(tmp_path: Path) -> None:
    Counters(tmp_path).add("near_ties", 2)
    metrics = {
        sample.name: sample.value
        for metric in Collector(tmp_path).collect()
        for sample in metric.samples
    }
    assert metrics["mrv2_shadow_near_ties_total"] == 2
    assert set(metrics) == {f"mrv2_shadow_{name}_total" for name in COUNTERS} | {"mrv2_shadow_up"}


def test_counts_reach_the_metrics_that_processes_share(tmp_path: Path) -> None:
    """With PROMETHEUS_MULTIPROC_DIR vLLM shows what any process has written into that folder."""
    count = "from mrv2_diff.shadow.counters import Counters\nCounters(None).add('mismatches', 5)\n"
    show = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": path}
    for program in (count, show):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        )
    assert "mrv2_shadow_mismatches_total 5.0" in done.stdout
