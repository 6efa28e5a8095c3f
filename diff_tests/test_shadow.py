"""`MRV2_RUNNER=shadow` in an engine: what V1 serves is V1's, and what mrv2 does wrong is written.

All requests are followed, by one shadow after another beside one engine: without a fault, and with
mutants of mrv2. `test_shadow_serve.py` has a shadow that fails.
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
import json, os, sys
jobs, model = json.loads(sys.argv[1]), sys.argv[2]

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

def prompt(number):
    shared = [7 + number % 3] * 64
    own = [(number * 31 + place * place) % 240 + 4 for place in range(1 + number * 7 % 50)]
    return {"prompt_token_ids": own if number % 5 == 4 else shared + own}

def asked(number):
    kind = number % 6
    made = dict(max_tokens=30 + 3 * number, temperature=0.0, ignore_eos=True, detokenize=False)
    # No seeds: V1 cannot go on with a seeded prompt in chunks on a CPU.
    if kind == 0:
        made |= dict(logprobs=1)
    if kind == 1:
        made |= dict(temperature=0.8, top_k=20 if number in RANDOM else 1, logprobs=3)
    if kind == 2:
        made |= dict(logprobs=5)
    if kind == 3:
        made |= dict(temperature=1.2, top_p=0.9 if number in RANDOM else 1e-4)
    if kind == 4:
        made |= dict(repetition_penalty=1.4, presence_penalty=0.5, min_tokens=6)
    if kind == 5:
        grammar = StructuredOutputsParams(regex="[a-f]{30,40}")
        made |= dict(structured_outputs=grammar, max_tokens=12)
    return SamplingParams(**made)

shadow = os.environ["MRV2_RUNNER"] == "shadow"
llm = LLM(
    model=model, dtype="float32", enforce_eager=True, seed=0, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=64, block_size=32, num_gpu_blocks_override=14,
    enable_prefix_caching=True, max_logprobs=-1,
    **({"worker_cls": WORKER} if shadow else {}),
)

def report():
    return llm.collective_rpc("mrv2_shadow_report", args=(240.0,))[0]

def serve(order):
    requests = [(prompt(number), asked(number)) for number in order]
    outputs = llm.generate(*map(list, zip(*requests)), use_tqdm=False)
    tokens = {number: list(out.outputs[0].token_ids) for number, out in zip(order, outputs)}
    return [tokens[number] for number in range(NUM_REQS)]

def run(job):
    if shadow and job["environ"]:
        llm.collective_rpc("mrv2_shadow_restart", args=(job["environ"],))
    assert not shadow or report()["up"], report()
    llm.reset_prefix_cache()
    there = list(range(NUM_REQS))
    found = {"tokens": [serve(there), serve(there)]}  # the second time, prefixes are cached
    if shadow:
        from prometheus_client import generate_latest
        found["report"] = report()
        lines = generate_latest().decode().splitlines()
        found["metrics"] = [line for line in lines if line.startswith("mrv2_shadow")]
    else:
        found["tokens"].append(serve(there[::-1]))
    return found

for job in jobs:
    print("OUTCOME " + json.dumps([job["name"], run(job)]), flush=True)
"""
NUM_REQS = 12
RANDOM = (1, 3)
"""Requests whose tokens hang on who else is in the batch, even with V1 alone: all that are drawn
come from one generator. What a request joins changes with the time that its grammar takes."""
REPEATED = tuple(number for number in range(NUM_REQS) if number not in RANDOM)
WORKER = "mrv2_diff.drivers.faulty_shadow_worker.FaultyShadowWorker"
MUTANTS = ("off-by-one-position", "resumed-keeps-old-block")


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """The shadows: first the engine's own, then those with a mutant."""
    own = {"name": "clean", "environ": {}}
    planted = [
        {
            "name": name,
            "environ": {
                "MRV2_SHADOW_FILE": str(folder / f"{name}.jsonl"),
                "MRV2_DIFF_FAULT": name,
            },
        }
        for name in MUTANTS
    ]
    return [own, *planted]


def run_all(runner: str, jobs: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run jobs in one engine, in a process of its own, and return what each found."""
    environ = {
        **clean_environment(os.environ),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "MRV2_RUNNER": runner,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if runner == "shadow":
        environ |= {
            "MRV2_SHADOW_SHARE": "1",
            "MRV2_SHADOW_FILE": str(folder / "clean.jsonl"),
            # All is to be compared, however slow the shadow is beside other tests.
            "MRV2_SHADOW_MAX_BEHIND": "100000",
            "MRV2_SHADOW_PRIORITY": "normal",
        }
    given = f"{NUM_REQS = }; {RANDOM = }; {WORKER = }\n"
    log = folder / f"{runner}.log"
    with log.open("w") as errors:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                given + PROGRAM,
                json.dumps(jobs),
                str(cached_model(ModelSpec())),
            ],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    lines = [line.removeprefix("OUTCOME ") for line in done.stdout.splitlines()]
    return dict(json.loads(line) for line in lines if line.startswith("["))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shadow")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """What V1 serves without a shadow: cold, with cached prefixes, and in another order."""
    found = run_all("v1", [{"name": "alone"}], folder)
    tokens: list[list[list[int]]] = found["alone"]["tokens"]
    return tokens


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    return run_all("shadow", jobs_of(folder), folder)


def findings(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_v1_repeats_itself(alone: list[list[list[int]]]) -> None:
    """Else a comparison with it would say nothing of the shadow."""
    assert len(alone[0]) == NUM_REQS
    for number in REPEATED:
        assert alone[1][number] == alone[0][number]
        assert alone[2][number] == alone[0][number]


def test_the_served_tokens_are_v1s(alone: list[list[list[int]]], outcomes: dict[str, Any]) -> None:
    wrong = [
        (name, number)
        for name, found in outcomes.items()
        for number in REPEATED
        if any(tokens[number] != alone[0][number] for tokens in found["tokens"])
    ]
    assert wrong == []
    assert list(outcomes) == ["clean", *MUTANTS]


def test_without_a_fault_all_is_compared_and_nothing_found(
    folder: Path, outcomes: dict[str, Any]
) -> None:
    report = outcomes["clean"]["report"]
    num_tokens = sum(len(tokens) for part in outcomes["clean"]["tokens"] for tokens in part)
    assert report["compared_tokens"] == num_tokens
    assert report["compared_logprobs"] > 200
    assert report["sampled_requests"] == 2 * NUM_REQS
    wrong = [line for line in findings(folder, "clean") if line.get("verdict") != "near tie"]
    assert wrong == []
    assert report["mismatches"] == report["faults"] == report["dropped_requests"] == 0


def test_requests_were_preempted(outcomes: dict[str, Any]) -> None:
    assert all(found["report"]["resumed_requests"] > 0 for found in outcomes.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_reported(name: str, folder: Path, outcomes: dict[str, Any]) -> None:
    report = outcomes[name]["report"]
    assert report["mismatches"] > 0
    assert (report["fault"], report["dropped_requests"]) == (None, 0)
    written = [line for line in findings(folder, name) if line.get("verdict") == "mismatch"]
    assert len(written) == report["mismatches"]
    assert {"request", "position", "v1_token", "mrv2_token"} <= set(written[0])


def test_metrics_show_what_was_found(outcomes: dict[str, Any]) -> None:
    for found in outcomes.values():
        metrics = dict(line.split(" ") for line in found["metrics"])
        for name in ("compared_tokens", "mismatches"):
            assert float(metrics[f"mrv2_shadow_{name}_total"]) == found["report"][name]
