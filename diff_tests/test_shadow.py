"""`MRV2_RUNNER=shadow` in an engine: what V1 serves is V1's, and what mrv2 does wrong is written.

All requests are followed, in one process, one engine after another: without a fault, with mutants
of mrv2, and with a shadow that raises, hangs, asks for too much memory or dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.drivers.variables import clean_environment
from mrv2_diff.models import ModelSpec, cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = """
import gc, json, os, sys
jobs, model = json.loads(sys.argv[1]), sys.argv[2]

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import StructuredOutputsParams

ENGINE = dict(
    dtype="float32", enforce_eager=True, seed=0, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=64, block_size=32, num_gpu_blocks_override=14,
    enable_prefix_caching=True, max_logprobs=-1,
)

def prompt(number):
    shared = [7 + number % 3] * 64
    own = [(number * 31 + place * place) % 240 + 4 for place in range(1 + number * 7 % 50)]
    return {"prompt_token_ids": own if number % 5 == 4 else shared + own}

def asked(number):
    kind = number % 6
    made = dict(max_tokens=30 + 3 * number, temperature=0.0, ignore_eos=True, detokenize=False)
    if kind == 0:
        made |= dict(logprobs=1)
    if kind == 1:
        made |= dict(temperature=0.8, top_k=20, logprobs=3)
    if kind == 2:
        made |= dict(logprobs=5)
    if kind == 3:
        made |= dict(temperature=1.2, top_p=0.9)
    if kind == 4:
        made |= dict(repetition_penalty=1.4, presence_penalty=0.5, min_tokens=6)
    if kind == 5:
        grammar = StructuredOutputsParams(regex="[a-f]{30,40}")
        made |= dict(structured_outputs=grammar, max_tokens=12)
    return SamplingParams(**made)

def run(job):
    os.environ.update(job["environ"])
    llm = LLM(model=model, **ENGINE, **job["engine"])
    shadow = os.environ["MRV2_RUNNER"] == "shadow"
    report = lambda wait_s: llm.collective_rpc("mrv2_shadow_report", args=(wait_s,))[0]
    if shadow:
        assert report(240.0)["up"], report(0.0)
    prompts = [prompt(number) for number in range(job["num_reqs"])]
    params = [asked(number) for number in range(job["num_reqs"])]
    tokens = []
    for _ in range(2):  # the second time, prefixes are cached
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    found = {"tokens": tokens, "report": report(240.0) if shadow else None}
    llm.llm_engine.engine_core.shutdown()
    if shadow:
        from prometheus_client import generate_latest
        lines = generate_latest().decode().splitlines()
        found["metrics"] = [line for line in lines if line.startswith("mrv2_shadow")]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found

for job in jobs:
    print("OUTCOME " + json.dumps([job["name"], run(job)]), flush=True)
"""
NUM_REQS = 12
NUM_REQS_BESIDE_FAULTS = 6
WORKER = "mrv2_diff.drivers.faulty_shadow_worker.FaultyShadowWorker"
MUTANTS = ("off-by-one-position", "resumed-keeps-old-block")
FAULTS = {
    "raise": "a planted fault",
    "hang": "hung: no answer within 15 s",
    "memory": "MemoryError",
    "die": "died: ended by SIGKILL",
}


def job(name: str, folder: Path, fault: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "num_reqs": NUM_REQS_BESIDE_FAULTS if name in FAULTS else NUM_REQS,
        "engine": {} if fault is None else {"worker_cls": WORKER},
        "environ": {
            "MRV2_SHADOW_FILE": str(folder / f"{name}.jsonl"),
            "MRV2_DIFF_FAULT": fault or "",
        },
    }


def run_all(runner: str, jobs: list[dict[str, Any]], log: Path) -> dict[str, Any]:
    """Run jobs in a process of their own and return what each found."""
    environ = {
        **clean_environment(os.environ),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "MRV2_RUNNER": runner,
        "MRV2_SHADOW_SHARE": "1",
        "MRV2_SHADOW_LIMIT_S": "15",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if runner != "shadow":
        environ = {name: v for name, v in environ.items() if not name.startswith("MRV2_SHADOW")}
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(jobs), str(cached_model(ModelSpec()))],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            timeout=1200,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    lines = [line.removeprefix("OUTCOME ") for line in done.stdout.splitlines()]
    return dict(json.loads(line) for line in lines if line.startswith("["))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shadow")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What V1 serves without a shadow, by job."""
    jobs = [job(name, folder) for name in ("clean", "raise")]
    found = run_all("v1", jobs, folder / "v1.log")
    return {name: found["raise" if name in FAULTS else "clean"] for name in (*MUTANTS, *FAULTS)} | {
        "clean": found["clean"]
    }


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    names = [*MUTANTS, *FAULTS]
    jobs = [job("clean", folder), *(job(name, folder, name) for name in names)]
    return run_all("shadow", jobs, folder / "shadow.log")


def findings(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_served_tokens_are_v1s(alone: dict[str, Any], outcomes: dict[str, Any]) -> None:
    wrong = [name for name, found in outcomes.items() if found["tokens"] != alone[name]["tokens"]]
    assert wrong == []


def test_without_a_fault_nothing_is_found(folder: Path, outcomes: dict[str, Any]) -> None:
    report = outcomes["clean"]["report"]
    num_tokens = sum(len(tokens) for part in outcomes["clean"]["tokens"] for tokens in part)
    assert report["compared_tokens"] == num_tokens
    assert report["compared_logprobs"] > 200
    assert report["sampled_requests"] == 2 * NUM_REQS
    wrong = [line for line in findings(folder, "clean") if line.get("verdict") != "near tie"]
    assert wrong == []
    assert report["mismatches"] == report["faults"] == report["dropped_requests"] == 0


def test_requests_were_preempted(outcomes: dict[str, Any]) -> None:
    assert outcomes["clean"]["report"]["resumed_requests"] > 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_reported(name: str, folder: Path, outcomes: dict[str, Any]) -> None:
    report = outcomes[name]["report"]
    assert report["mismatches"] > 0
    assert report["fault"] is None
    written = [line for line in findings(folder, name) if line.get("verdict") == "mismatch"]
    assert len(written) == report["mismatches"]
    assert {"request", "position", "v1_token", "mrv2_token"} <= set(written[0])


@pytest.mark.parametrize(("name", "reason"), FAULTS.items())
def test_a_fault_is_contained(
    name: str, reason: str, folder: Path, outcomes: dict[str, Any]
) -> None:
    report = outcomes[name]["report"]
    assert (report["faults"], report["up"]) == (1, 0)
    assert reason in report["fault"]
    last = findings(folder, name)[-1]
    assert last["kind"] == "abandoned"
    assert reason in last["reason"]


def test_metrics_show_what_was_found(outcomes: dict[str, Any]) -> None:
    names = list(outcomes)
    metrics = dict(line.split(" ") for line in outcomes[names[0]]["metrics"])
    report = outcomes[names[0]]["report"]
    assert float(metrics["mrv2_shadow_compared_tokens_total"]) == report["compared_tokens"]
    assert float(metrics["mrv2_shadow_mismatches_total"]) == 0
