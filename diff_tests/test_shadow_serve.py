"""`MRV2_RUNNER=shadow vllm serve` with 30 clients: the same tokens, and counters at /metrics."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrv2_diff.drivers.server import free_port, serve_command, serve_environment
from mrv2_diff.drivers.shadow_load import ARGUMENTS, Arm, load, started
from mrv2_diff.models import ModelSpec, cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ExitStack() as stack:
        arms = started((None, 0.2), tmp_path_factory.mktemp("shadow"), stack)
        for arm in arms:
            load(arm, NUM_REQUESTS)
        yield arms


def test_tokens_are_those_without_a_shadow(arms: list[Arm]) -> None:
    alone, shadowed = arms
    assert alone.token_ids == shadowed.token_ids
    assert all(alone.token_ids[0])


def test_a_sample_was_followed_without_a_mismatch(arms: list[Arm]) -> None:
    report = arms[1].report(120)
    assert 0 < report["sampled_requests"] < NUM_REQUESTS / 2
    assert report["compared_tokens"] > 20
    assert (report["mismatches"], report["faults"], report["up"]) == (0, 0, 1)


def test_metrics_show_the_counters(arms: list[Arm]) -> None:
    report = arms[1].report(120)
    lines = httpx.get(f"{arms[1].server.url}/metrics/", follow_redirects=True).text.splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if line.startswith("mrv2_shadow"))
    for name in ("sampled_requests", "compared_tokens", "mismatches"):
        assert float(shown[f"mrv2_shadow_{name}_total"]) == report[name]
    assert float(shown["mrv2_shadow_up"]) == 1


def test_a_wrong_setting_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        serve_command(cached_model(ModelSpec()), free_port(), ARGUMENTS),
        env=serve_environment({"MRV2_RUNNER": "shadow", "MRV2_SHADOW_SHARE": "20"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "MRV2_SHADOW_SHARE=20: must be in [0, 1]" in said
    assert "EngineCore" not in said
