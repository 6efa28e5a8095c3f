"""Without --enforce-eager: vLLM compiles the model, and both runners still say the same tokens."""

from __future__ import annotations

import pytest

from mrv2_diff.drivers.one_engine import OURS, Job, Outcome, run_job
from mrv2_diff.models import ModelSpec, cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """The same prompts under both runners, compiled."""
    job = Job(
        model=str(cached_model(ModelSpec())),
        engine={
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "seed": 0,
        },
        prompts=[[7 + (index * index + 3 * index) % 200] * 3 + [index + 20] for index in range(6)]
        + [[(5 * token + 11) % 240 + 4 for token in range(90)]],
        max_tokens=[12] * 7,
        logprobs=[None] * 7,
    )
    return {
        runner: run_job(job, runner, {"TORCH_COMPILE_DISABLE": "0"}) for runner in ("mrv2", "v1")
    }


def test_each_ran_the_runner_that_was_asked_for(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["mrv2"].runner_class == OURS
    assert outcomes["v1"].runner_class == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert min(outcome.steps for outcome in outcomes.values()) > 12


def test_the_model_was_compiled(outcomes: dict[str, Outcome]) -> None:
    assert all(outcome.compiled_graphs > 0 for outcome in outcomes.values())


def test_tokens_are_equal(outcomes: dict[str, Outcome]) -> None:
    ours = [continuation.token_ids for continuation in outcomes["mrv2"].continuations]
    assert [len(token_ids) for token_ids in ours] == [12] * 7
    assert ours == [continuation.token_ids for continuation in outcomes["v1"].continuations]
