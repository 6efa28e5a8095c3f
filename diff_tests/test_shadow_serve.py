"""`MRV2_RUNNER=shadow vllm serve` with 30 clients: the same tokens whatever the shadow does.

One server has no shadow; beside it, another's is ended and started again, with one fault after the
other. `test_shadow.py` has mutants of the runner.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrv2_diff.drivers.server import free_port, serve_command, serve_environment
from mrv2_diff.drivers.shadow_load import Arm, load, repeatable, serve_arguments, started
from mrv2_diff.models import ModelSpec, cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_REQUESTS = 60
SHARE = 0.2
LIMIT_S = 8
FAULTS = {
    "raise": "a planted fault",
    "hang": f"hung: no answer within {LIMIT_S} s",
    "memory": "can't allocate memory",
    "die": "died: ended by SIGKILL",
}
WORKER = "mrv2_diff.drivers.faulty_shadow_worker.FaultyShadowWorker"


@dataclass(frozen=True)
class Served:
    """What one shadow's load came to."""

    token_ids: list[list[int]]
    report: dict[str, Any]
    metrics: dict[str, float]
    findings: list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shadow")


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    """The loads, by fault: `alone` without a shadow, `none` of one without a fault."""
    settings = {
        "MRV2_SHADOW_LIMIT_S": str(LIMIT_S),
        # The shadow is to come to an end, however many other tests run beside this one.
        "MRV2_SHADOW_PRIORITY": "normal",
        "MRV2_SHADOW_MAX_BEHIND": "100000",
    }
    with ExitStack() as stack:
        alone, shadowed = started(
            {"alone": None, "none": SHARE},
            folder,
            stack,
            further=settings,
            arguments=(f"--worker-cls={WORKER}",),
        )
        bodies = repeatable(alone, NUM_REQUESTS)
        load(alone, bodies)
        load(alone, bodies)
        found = {"none": _serve(shadowed, bodies, folder / "none.jsonl")}
        for fault in FAULTS:
            file = folder / f"{fault}.jsonl"
            environ = {
                "MRV2_SHADOW_SHARE": "1",
                "MRV2_SHADOW_FILE": str(file),
                "MRV2_DIFF_FAULT": fault,
            }
            shadowed.call("mrv2_shadow_restart", environ)
            assert shadowed.report(240)["up"]
            found[fault] = _serve(shadowed, bodies, file)
        yield {"alone": alone.token_ids, **found}


def _serve(arm: Arm, bodies: list[dict[str, Any]], file: Path) -> Served:
    load(arm, bodies)
    report = arm.report(120)
    text = httpx.get(f"{arm.server.url}/metrics/", follow_redirects=True).text
    shown = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("mrv2_shadow")]
    load(arm, bodies)  # after a fault, as before
    assert arm.token_ids[-1] == arm.token_ids[-2]
    return Served(
        token_ids=arm.token_ids[-1],
        report=report,
        metrics={name: float(value) for name, value in shown},
        findings=[json.loads(line) for line in file.read_text().splitlines()],
    )


def test_v1_repeats_itself(served: dict[str, Any]) -> None:
    first, second = served["alone"]
    assert len(first) == NUM_REQUESTS
    assert all(first)
    assert first == second


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_tokens_are_those_without_a_shadow(served: dict[str, Any], fault: str) -> None:
    assert served[fault].token_ids == served["alone"][0]


def test_a_sample_was_followed_without_a_mismatch(served: dict[str, Any]) -> None:
    report = served["none"].report
    assert 0 < report["sampled_requests"] < NUM_REQUESTS / 2
    assert report["compared_tokens"] > 20
    assert (report["mismatches"], report["faults"], report["dropped_requests"]) == (0, 0, 0)
    assert (report["up"], report["is_idle"]) == (1, True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_contained_and_said(served: dict[str, Any], fault: str) -> None:
    found = served[fault]
    assert (found.report["faults"], found.report["up"]) == (1, 0)
    assert found.report["sampled_requests"] > 0
    assert FAULTS[fault] in found.report["fault"]
    assert found.findings[-1]["kind"] == "abandoned"
    assert FAULTS[fault] in found.findings[-1]["reason"]


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_metrics_show_the_counters(served: dict[str, Any], fault: str) -> None:
    found = served[fault]
    for name in ("sampled_requests", "compared_tokens", "mismatches", "faults"):
        assert found.metrics[f"mrv2_shadow_{name}_total"] == found.report[name]
    assert found.metrics["mrv2_shadow_up"] == found.report["up"]


def test_a_wrong_setting_is_refused_in_one_line_before_an_engine_starts() -> None:
    done = subprocess.run(
        serve_command(cached_model(ModelSpec()), free_port(), serve_arguments()),
        env=serve_environment({"MRV2_RUNNER": "shadow", "MRV2_SHADOW_SHARE": "20"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "MRV2_SHADOW_SHARE=20: must be in [0, 1]" in said.splitlines()[-1]
    assert "EngineCore" not in said
