"""A run measures what it can, keeps it as it goes, and says what it could not."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.device_bench.bench import Bench, Outcome
from mrv2_diff.device_bench.channel import RunnerProcess
from mrv2_diff.device_bench.options import Options

Starting = Callable[[dict[str, dict[str, object]]], Callable[..., RunnerProcess]]


@pytest.fixture
def ran(starting: Starting, tmp_path: Path) -> Callable[..., Outcome]:
    def run(told: dict[str, dict[str, Any]], **options: Any) -> Outcome:
        asked: dict[str, Any] = {"runners": ("v1", "mrv2"), "parts": ("steady",), "batches": (2,)}
        asked |= {"temperatures": (0.0,), "limit_s": 60.0, "out": tmp_path / "bench.json"}
        bench = Bench(Options(**{**asked, **options}), lambda line: None, start=starting(told))
        return bench.run()

    return run


FAST = {"us": 20.0}


def test_ratios_come_with_intervals_and_a_verdict(ran: Callable[..., Outcome]) -> None:
    outcome = ran({"mrv2": FAST}, parts=("steady", "churn", "replay", "throughput"))
    assert outcome.passes
    tasks = outcome.record["tasks"]
    assert list(tasks) == [
        "steady b2-greedy-c64", "churn b2-greedy-c64-churn10%", "replay b2-greedy-c64", "throughput"
    ]  # fmt: skip
    ratio = tasks["steady b2-greedy-c64"]["ratios"]["host_us"]["mrv2/v1"]
    assert ratio["ratio"] == pytest.approx(0.2, rel=0.01)
    assert ratio["verdict"] == "NARROW"
    assert tasks["throughput"]["ratios"]["tokens_per_s"]["mrv2/v1"]["ratio"] == pytest.approx(5)
    assert "host_us mrv2/v1 = 0.200" in outcome.table


def test_other_steps_are_not_compared(ran: Callable[..., Outcome]) -> None:
    outcome = ran({"mrv2": {"stream": "other"}})
    task = outcome.record["tasks"]["steady b2-greedy-c64"]
    assert "v1 same, mrv2 other" in task["refused"]
    assert "ratios" not in task
    assert "REFUSED" in outcome.table
    assert not outcome.passes


@pytest.mark.parametrize("during", ["load", "start", "record", "block"])
def test_a_runner_that_fails_is_named_and_the_others_go_on(
    ran: Callable[..., Outcome], during: str
) -> None:
    outcome = ran({"v1": {during: {"error": "something"}}}, runners=("v1", "mrv2", "vllm-v2"))
    (failure,) = outcome.record["failures"]["v1"]
    assert "Traceback: something" in failure["message"]
    task = outcome.record["tasks"]["steady b2-greedy-c64"]
    assert {"mrv2", "vllm-v2"} <= set(task["medians"])
    assert set(task["ratios"]["host_us"]) == {"mrv2/vllm-v2"}
    assert "FAILED v1" in outcome.table
    assert not outcome.passes


def test_a_hang_is_ended_by_its_limit(ran: Callable[..., Outcome]) -> None:
    began = time.monotonic()
    outcome = ran({"v1": {"block": {"hangs": True}}}, answer_limit_s=2.0)
    assert time.monotonic() - began < 40
    (failure,) = outcome.record["failures"]["v1"]
    assert "no answer to 'block' after 2 s" in failure["message"]
    assert outcome.record["tasks"]["steady b2-greedy-c64"]["medians"]["mrv2"]["host_us"] > 0


def test_the_record_is_on_disk_before_the_end(starting: Starting, tmp_path: Path) -> None:
    out = tmp_path / "made" / "bench.json"
    seen = []

    def look(line: str) -> None:
        if "b2" in line and out.is_file():
            seen.append(json.loads(out.read_text()))

    options = Options(runners=("v1", "mrv2"), parts=("steady",), batches=(1, 2),
                      temperatures=(0.0,), limit_s=60.0, out=out)  # fmt: skip
    Bench(options, look, start=starting({})).run()
    assert "steady b1-greedy-c64" in seen[-1]["tasks"]
    kept = json.loads(out.read_text())
    assert kept["environment"] == {"device": "made up"}
    assert len(kept["tasks"]) == 2
    assert out.with_suffix(".txt").is_file()
    assert out.with_name("bench.v1.log").read_text().startswith("asked load")


def test_parts_for_a_gpu_are_skipped_aloud_on_a_cpu(ran: Callable[..., Outcome]) -> None:
    outcome = ran({}, parts=("memory", "profile"))
    assert outcome.record["memory"] == {"skipped": "needs a CUDA device"}
    assert outcome.record["tasks"]["profile b2-greedy-c64"]["skipped"] == "needs a CUDA device"
    assert "needs a CUDA device" in outcome.table
    assert not outcome.passes


def test_a_profile_gives_the_gap_of_the_step(ran: Callable[..., Outcome]) -> None:
    gpu = {"device": "cuda"}
    outcome = ran({"v1": gpu, "mrv2": {**gpu, **FAST}}, parts=("replay", "profile", "memory"))
    line = next(text for text in outcome.table.splitlines()
                if "mrv2" in text and text.endswith("1.0       1.0       1.0"))  # fmt: skip
    assert "-29.9" in line  # 20.05 us of wall less 50 us of the made-up device
    assert "64 KV tokens" in outcome.table
    assert outcome.passes


def test_growth_is_measured_in_few_rounds_and_drawn(
    ran: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = ran({}, parts=("growth",), growth_batches=(1, 2), growth_contexts=(8, 16),
                  growth_arrivals=(0.0, 0.5))  # fmt: skip
    assert len(outcome.record["tasks"]) == 6
    assert all(task["rounds"] == 2 for task in outcome.record["tasks"].values())
    picture = (tmp_path / "bench.svg").read_text()
    assert picture.count("<polyline") == 3 * 2 * 2
    assert outcome.passes


def test_host_times_are_drawn(ran: Callable[..., Outcome], tmp_path: Path) -> None:
    ran({"mrv2": FAST}, batches=(1, 2))
    picture = (tmp_path / "bench.host.svg").read_text()
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height', picture)]
    assert widths == pytest.approx([420.0, 84.0, 420.0, 84.0], rel=0.01)
    assert "batch 2, greedy" in picture
    assert not (tmp_path / "bench.svg").exists()


def test_no_time_is_said(ran: Callable[..., Outcome]) -> None:
    outcome = ran({}, limit_s=21.0, parts=("steady", "throughput"))
    states = [str(task) for task in outcome.record["tasks"].values()]
    assert states == [] or any("no time" in state or "out_of_time" in state for state in states)
    assert not outcome.passes
