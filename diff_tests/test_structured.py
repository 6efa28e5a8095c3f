"""Structured outputs in real engines: real grammars beside free requests, tokens as V1's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from mrv2_diff.drivers.one_engine import OURS, Continuation, Job, Outcome, run_job
from mrv2_diff.models import ModelSpec, cached_model
from mrv2_diff.models.tokenizer import EOS_ID

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BACKENDS = ("xgrammar", "guidance")
MAX_TOKENS = 40

CHOICES = ["river", "the quick fox", "over"]
PATTERN = r"[a-f]{3}-[0-9]{4,9}\."
SCHEMA = {
    "type": "object",
    "properties": {"is_it": {"type": "boolean"}, "how_many": {"enum": [1, 20, 300]}},
    "required": ["is_it", "how_many"],
    "additionalProperties": False,
}
CHOICE: dict[str, Any] = {"structured_outputs": {"choice": CHOICES}, "ignore_eos": False}
REGEX: dict[str, Any] = {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False}
JSON: dict[str, Any] = {"structured_outputs": {"json": json.dumps(SCHEMA)}, "ignore_eos": False}


def is_json(text: str) -> bool:
    """Whether the text is what the schema asks for."""
    value = json.loads(text)
    return (
        set(value) == {"is_it", "how_many"}
        and value["is_it"] in (True, False)
        and value["how_many"] in (1, 20, 300)
    )


def matches(text: str) -> bool:
    """Whether the text is what the pattern asks for."""
    return re.fullmatch(PATTERN, text) is not None


REQUESTS: tuple[tuple[dict[str, Any], int | None, Callable[[str], bool] | None], ...] = (
    ({}, None, None),
    (CHOICE, None, CHOICES.__contains__),
    (REGEX, 2, matches),
    ({}, 3, None),
    (JSON, None, is_json),
    # The grammar ends before the least number of tokens, and leaves nothing but the stop token.
    (CHOICE | {"min_tokens": 30}, 1, CHOICES.__contains__),
    # The grammar can go on, and must.
    (REGEX | {"min_tokens": 12}, None, matches),
    ({"min_tokens": 9, "stop_token_ids": [*range(0, 300, 2)]}, None, None),
    ({"allowed_token_ids": [*range(40, 90)], "logit_bias": {50: 3.5, 51: -100.0}}, 2, None),
    (REGEX | {"logit_bias": {20: 2.0, 70: 1.0}}, 2, matches),
    (JSON | {"temperature": 0.0, "min_tokens": 5}, 4, is_json),
    (CHOICE, None, CHOICES.__contains__),
)
"""What each request asks for, its logprobs, and what its text must be."""
STRUCTURED = [
    pytest.param(index, right, id=str(index))
    for index, (_, _, right) in enumerate(REQUESTS)
    if right is not None
]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Outcome]:
    """The same requests under both runners and both backends."""
    jobs = {
        backend: Job(
            model=str(cached_model(ModelSpec())),
            engine={
                "dtype": "float32",
                "enforce_eager": True,
                "seed": 0,
                "max_model_len": 128,
                "max_num_seqs": 8,
                # Prompts run in chunks, and there are too few blocks for all.
                "max_num_batched_tokens": 32,
                "block_size": 32,
                "num_gpu_blocks_override": 10,
                "structured_outputs_config": {"backend": backend, "disable_any_whitespace": True},
            },
            prompts=[
                [4 + (7 * index + place * place) % 240 for place in range(20 + 5 * index)]
                for index in range(len(REQUESTS))
            ],
            max_tokens=[MAX_TOKENS] * len(REQUESTS),
            logprobs=[count for _, count, _ in REQUESTS],
            options=[asked for asked, _, _ in REQUESTS],
            tokenizer=True,
        )
        for backend in BACKENDS
    }
    keys = [(runner, backend) for backend in BACKENDS for runner in ("mrv2", "v1")]
    # Most of a job is one thread that imports.
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda key: run_job(jobs[key[1]], key[0]), keys)
        return dict(zip(keys, done, strict=True))


Outcomes = dict[tuple[str, str], Outcome]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_ran_the_runner_that_was_asked_for(outcomes: Outcomes, backend: str) -> None:
    assert outcomes["mrv2", backend].runner_class == OURS
    theirs = outcomes["v1", backend].runner_class
    assert theirs == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert outcomes["mrv2", backend].preemptions > 0


def given(outcomes: Outcomes, runner: str, backend: str, index: int) -> Continuation:
    """What came back for one request."""
    return outcomes[runner, backend].continuations[index]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", range(len(REQUESTS)))
def test_tokens_and_logprobs_are_v1s(outcomes: Outcomes, backend: str, index: int) -> None:
    ours, theirs = (given(outcomes, runner, backend, index) for runner in ("mrv2", "v1"))
    assert ours.token_ids == theirs.token_ids
    assert len(ours.logprobs) == len(theirs.logprobs)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("index", "is_right"), STRUCTURED)
def test_a_structured_request_gives_what_its_grammar_asks_for(
    outcomes: Outcomes, backend: str, index: int, is_right: Callable[[str], bool]
) -> None:
    tokenizer = Tokenizer.from_file(str(cached_model(ModelSpec()) / "tokenizer.json"))
    *token_ids, last = given(outcomes, "mrv2", backend, index).token_ids
    assert last == EOS_ID
    text = tokenizer.decode(token_ids)
    assert is_right(text), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_grammar_wins_over_the_least_number_of_tokens_only_where_it_must(
    outcomes: Outcomes, backend: str
) -> None:
    ended, went_on = (given(outcomes, "mrv2", backend, index).token_ids for index in (5, 6))
    assert len(ended) < 30
    assert len(went_on) > 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_are_normalized_over_what_the_grammar_allows(
    outcomes: Outcomes, backend: str
) -> None:
    first = given(outcomes, "mrv2", backend, 2).logprobs[0]
    assert all(value > float("-inf") for value in first)
    last = given(outcomes, "mrv2", backend, 2).logprobs[-1]
    assert last[0] == pytest.approx(0.0, abs=1e-6)
    assert last[-1] == float("-inf")
