"""Logprobs as a user of vLLM gets them, from one engine with prefix caching and cut prompts."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mrv2_diff.drivers.variables import clean_environment

pytestmark = pytest.mark.vllm

PROGRAM = """
import json
from mrv2_diff.models.checkpoint import cached_model
from mrv2_diff.models.spec import ModelSpec
from vllm import LLM, SamplingParams

llm = LLM(
    model=str(cached_model(ModelSpec())), skip_tokenizer_init=True, enforce_eager=True, seed=0,
    dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, block_size=32,
    num_gpu_blocks_override=64, enable_prefix_caching=True, disable_log_stats=True,
)
LONG = [(37 * place + 5) % 256 for place in range(100)]

def ask(prompt, *kinds):
    params = [
        SamplingParams(
            **{"max_tokens": 2, "temperature": 0, "ignore_eos": True, "detokenize": False, **kind}
        )
        for kind in kinds
    ]
    prompts = [{"prompt_token_ids": prompt}] * len(params)
    return [report(output) for output in llm.generate(prompts, params, use_tqdm=False)]

def rows(logprobs):
    return logprobs and [
        [[token, entry.logprob, entry.rank] for token, entry in (row or {}).items()]
        for row in logprobs
    ]

def report(output):
    return {
        "prompt": rows(output.prompt_logprobs), "drawn": rows(output.outputs[0].logprobs),
        "cached": output.num_cached_tokens, "tokens": list(output.outputs[0].token_ids),
    }

runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
answers = {"runner": type(runner).__module__}
answers["plain"] = ask(LONG, {})
answers["read"] = ask(LONG, {})
answers["scored"] = ask(LONG, {"prompt_logprobs": 3}, {"prompt_logprobs": 3, "flat_logprobs": True})
answers["one"] = ask([7], {"prompt_logprobs": 2})
answers["drawn"] = ask(LONG[:-1], {"logprobs": 20})
answers["mixed"] = ask(LONG, {"logprobs": 4}, {"logprob_token_ids": [3, 250, 9]}, {"logprobs": 0})
answers["alone"] = ask(LONG, {"logprobs": 4})
answers["after"] = ask(LONG, {})
OTHER = LONG[::-1]
answers["cold"] = ask(OTHER, {"prompt_logprobs": 1})
answers["warm"] = ask(OTHER, {})
answers["again"] = ask(OTHER, {"prompt_logprobs": 1})
(own,) = ask(LONG[:30], {"max_tokens": 60})
answers["own"] = own["tokens"]
answers["own scored"] = ask(LONG[:30] + own["tokens"], {"prompt_logprobs": 0, "max_tokens": 1})
print("ANSWERS " + json.dumps(answers))
"""
PROMPT = [(37 * place + 5) % 256 for place in range(100)]


@pytest.fixture(scope="module")
def answers() -> Any:
    """Run the program under our runner."""
    environ = {
        **clean_environment(os.environ),
        "MRV2_RUNNER": "mrv2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(lines[0].removeprefix("ANSWERS "))
    assert found["runner"].startswith("mrv2_compat")
    return found


def test_a_prompt_has_an_entry_for_each_of_its_tokens(answers: Any) -> None:
    nested, flat = (answer["prompt"] for answer in answers["scored"])
    assert len(nested) == len(PROMPT)
    assert nested[0] == []
    for token, row in zip(PROMPT[1:], nested[1:], strict=True):
        assert row[0][0] == token
        assert len(row) in (3, 4), "its own token, and three of the likeliest"
    # The flat form lists a token twice that is among the likeliest; its last entry is the nested.
    assert [{t: v for t, v, _ in row} for row in flat] == [
        {t: v for t, v, _ in row} for row in nested
    ]


def test_a_prompt_of_one_token_has_one_empty_entry(answers: Any) -> None:
    (answer,) = answers["one"]
    assert answer["prompt"] == [[]]


def test_a_scored_prompt_reads_nothing_from_the_cache(answers: Any) -> None:
    assert answers["read"][0]["cached"] >= 64, "the prompt was not cached: nothing is shown"
    assert [answer["cached"] for answer in answers["scored"]] == [0, 0]
    assert all(answer["tokens"] == answers["plain"][0]["tokens"] for answer in answers["scored"])


def test_requests_around_a_scored_one_use_the_cache_and_its_values_are_a_cold_runs(
    answers: Any,
) -> None:
    (after,), (cold,), (warm,), (again,) = (
        answers[name] for name in ("after", "cold", "warm", "again")
    )
    assert after["cached"] >= 64
    assert warm["cached"] >= 64, "what a scored prompt computed is there for others"
    assert (cold["cached"], again["cached"]) == (0, 0)
    assert len(cold["prompt"]) == len(PROMPT)
    for one, other in zip(cold["prompt"], again["prompt"], strict=True):
        assert [(token, rank) for token, _, rank in one] == [(t, rank) for t, _, rank in other]
        assert [v for _, v, _ in one] == pytest.approx([v for _, v, _ in other], abs=1e-4)


def test_greedy_tokens_are_the_likeliest_when_they_are_scored_as_a_prompt(answers: Any) -> None:
    (scored,) = answers["own scored"]
    assert len(answers["own"]) == 60
    assert len(scored["prompt"]) == 90
    rows = scored["prompt"][30:]
    assert [[(token, rank) for token, _, rank in row] for row in rows] == [
        [(token, 1)] for token in answers["own"]
    ]


def test_the_last_prompt_token_scores_as_a_drawn_one_does(answers: Any) -> None:
    scored = answers["scored"][0]["prompt"][-1]
    drawn = {token: value for token, value, _ in answers["drawn"][0]["drawn"][0]}
    shared = [(value, drawn[token]) for token, value, _ in scored if token in drawn]
    assert len(shared) >= 3
    assert all(one == pytest.approx(other, abs=1e-4) for one, other in shared)


def test_each_request_gets_what_it_asked_for(answers: Any) -> None:
    likeliest, named, bare = (answer["drawn"] for answer in answers["mixed"])
    (alone,) = answers["alone"]
    for row, own in zip(likeliest, alone["drawn"], strict=True):
        assert [token for token, _, _ in row] == [token for token, _, _ in own]
        assert [v for _, v, _ in row] == pytest.approx([v for _, v, _ in own], abs=1e-4)
    for row in named:
        assert [token for token, _, _ in row][-3:] == [3, 250, 9]
        assert all(value > -1e30 for _, value, _ in row)
    assert [len(row) for row in bare] == [1, 1]
