"""`mrv2-diff bench --runners v1,mrv2` with real engines on a CPU, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.catalog.prompts import TINY
from mrv2_diff.device_bench.bench import Bench, Outcome
from mrv2_diff.device_bench.channel import COMMON, RUNNERS
from mrv2_diff.device_bench.options import Options
from mrv2_diff.device_bench.points import Workload
from mrv2_diff.drivers.one_engine import OURS
from mrv2_diff.drivers.variables import clean_environment
from mrv2_diff.models.checkpoint import cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS = 6


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of every part that needs no GPU, of two rounds each where it may be cut."""
    options = Options(
        runners=("v1", "mrv2"),
        parts=("steady", "churn", "replay", "throughput", "growth", "profile"),
        batches=(4,),
        temperatures=(0.0,),
        churn=0.5,
        steps=STEPS,
        limit_s=150.0,
        workload=Workload(requests=6, low=4, high=12),
        growth_batches=(1, 2),
        growth_contexts=(8,),
        growth_arrivals=(0.25,),
        out=tmp_path_factory.mktemp("bench") / "bench.json",
    )
    return Bench(options, lambda line: None).run()


def test_nobody_failed(outcome: Outcome) -> None:
    assert outcome.record["failures"] == {}, outcome.table


def test_each_engine_has_its_runner(outcome: Outcome) -> None:
    runners = outcome.record["runners"]
    assert runners["mrv2"]["runner_class"] == OURS
    assert runners["v1"]["runner_class"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert runners["v1"]["engine"] == runners["mrv2"]["engine"]
    assert runners["v1"]["kv_tokens"] == runners["mrv2"]["kv_tokens"]


def test_both_are_sent_the_same_steps(outcome: Outcome) -> None:
    tasks = outcome.record["tasks"].values()
    assert not any("refused" in task for task in tasks)
    streams = {task["stream"] for task in tasks if task["part"] in ("steady", "churn")}
    assert len(streams) == 2


@pytest.mark.parametrize("part", ["steady", "churn", "replay", "growth"])
def test_steps_are_measured(outcome: Outcome, part: str) -> None:
    tasks = [task for task in outcome.record["tasks"].values() if task["part"] == part]
    assert tasks
    for task in tasks:
        assert task["rounds"] >= 2
        for figures in task["medians"].values():
            assert 0 < figures["execute_us"] < figures["host_us"]
            assert figures["host_us"] < figures["wall_us"]
            assert figures["wait_us"] == 0  # no event on a CPU


def test_the_whole_workload_is_run(outcome: Outcome) -> None:
    medians = outcome.record["tasks"]["throughput"]["medians"]
    tokens = sum(output for _, output in Workload(requests=6, low=4, high=12).lengths())
    for figures in medians.values():
        assert figures["tokens_per_s"] * figures["seconds"] == pytest.approx(tokens, rel=0.3)
        assert 0 < figures["ttft_ms_median"] <= figures["ttft_ms_p99"]
        assert figures["ttft_ms_p99"] < 1e3 * figures["seconds"] * 1.5


def test_a_profile_needs_a_gpu(outcome: Outcome) -> None:
    (task,) = [t for t in outcome.record["tasks"].values() if t["part"] == "profile"]
    assert task["skipped"] == "needs a CUDA device"
    assert not outcome.passes


def test_what_a_process_printed_is_kept(outcome: Outcome) -> None:
    assert outcome.record["environment"]["vllm"]
    assert "steady: whole engines" in outcome.table


def test_a_model_that_does_not_start_is_reported_with_its_traceback(tmp_path: Path) -> None:
    options = Options(
        runners=("v1",),
        parts=("steady",),
        batches=(1,),
        engine={"max_model_len": 10**9},
        limit_s=90.0,
        out=tmp_path / "bench.json",
    )
    outcome = Bench(options, lambda line: None).run()
    (failure,) = outcome.record["failures"]["v1"]
    assert failure["during"] == "start"
    assert "max_model_len" in failure["message"]
    assert not outcome.passes


ASYNC_PROGRAM = """
import json, os, sys
from vllm.platforms import current_platform

platform = type(current_platform)
checked = platform.check_and_update_config.__func__

def keeps_async(cls, config):
    checked(cls, config)
    config.scheduler_config.async_scheduling = True

platform.check_and_update_config = classmethod(keeps_async)

from mrv2_diff.device_bench.points import Point, Workload
from mrv2_diff.device_bench.stepper import Stepper

stepper = Stepper(json.loads(sys.argv[1]))
assert stepper.core.batch_queue is not None
found = {}
for point in (Point(batch=8), Point(batch=8, churn=0.5), Point(batch=1, churn=0.1)):
    stepper.record(point, 6)
    found[point.name] = [stepper.block(point, 6), stepper.replay(point, 6)]
found["throughput"] = stepper.throughput(Workload(requests=4, low=4, high=9), stream=True)
print("\\n" + json.dumps(found), flush=True)
os._exit(0)
"""
"""Our runner under async scheduling on a CPU, which vLLM turns off there and a GPU has."""


def test_steps_that_are_queued_ahead_are_measured() -> None:
    options = Options(runners=("mrv2",), parts=("churn", "throughput"), batches=(8,), churn=0.5,
                      workload=Workload(requests=4, low=4, high=9))  # fmt: skip
    engine = options.engine_arguments("mrv2", "cpu", str(cached_model(TINY)), alone=False)
    done = subprocess.run(
        [sys.executable, "-c", ASYNC_PROGRAM, json.dumps(engine)],
        env={**clean_environment(os.environ), **COMMON, **RUNNERS["mrv2"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("throughput")["output_tokens"] > 0
    for blocks in found.values():
        for block in blocks:
            columns = block["columns"]
            assert {len(values) for values in columns.values()} == {6}
            assert min(columns["read_us"]) > 0
            assert min(columns["wall_us"]) > 0
