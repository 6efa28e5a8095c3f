"""What a request may ask for: each parameter's bounds, and what a model can give."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2 import ConfigError, KVGroup, RunnerConfig, Sampling, ThinkingMarkers
from mrv2.params import sampling_faults
from mrv2_diff.toy_host import Toy

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=4,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=16),),
)
INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, INF, NAN)),
        *(("seed", value) for value in (2**64, -(2**63) - 1)),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, 1.1, NAN)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN)),
        *(("presence_penalty", value) for value in (INF, NAN)),
        *(("frequency_penalty", value) for value in (-INF, NAN)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, INF, NAN)),
        *(("logit_bias", {3: value}) for value in (INF, NAN)),
        *((name, 1e39) for name in ("temperature", "frequency_penalty", "repetition_penalty")),
        *(("logit_bias", {3: value}) for value in (3.5e38, -1e300)),
        ("allowed_token_ids", ()),
        ("bad_words", ((1,), ())),
        ("min_tokens", -1),
        ("thinking_budget", -1),
        ("num_logprobs", -2),
        ("num_prompt_logprobs", -2),
    ],
)
def test_a_value_outside_its_range_is_an_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        Sampling(**{name: value})
    assert str(raised.value).startswith(f"{name} is {value}; it must be ")


FAULTS: dict[str, tuple[Sampling, str]] = {
    "a bias beyond the vocabulary": (
        Sampling(logit_bias={96: 1.0, 97: 1.0, -1: 1.0}),
        "logit_bias has -1, 97; the vocabulary is 0 to 96: leave out what is outside",
    ),
    "allowed beyond the vocabulary": (
        Sampling(allowed_token_ids=(5, 1000)),
        "allowed_token_ids has 1000; the vocabulary is 0 to 96",
    ),
    "a bad word beyond the vocabulary": (
        Sampling(bad_words=((3,), (3, 97))),
        "bad_words has 97; the vocabulary is 0 to 96",
    ),
    "a stop token beyond the vocabulary": (
        Sampling(min_tokens=2, stop_token_ids=(97,)),
        "stop_token_ids has 97; the vocabulary is 0 to 96",
    ),
    "logprobs of a token beyond the vocabulary": (
        Sampling(logprob_token_ids=tuple(range(95, 110))),
        "logprob_token_ids has 97, 98, 99, 100, 101, 102, 103, 104 and 5 more; the vocabulary",
    ),
    "more logprobs than tokens": (
        Sampling(num_logprobs=98),
        "num_logprobs is 98; the vocabulary has 97 tokens: ask for at most as many, or for -1",
    ),
    "more prompt logprobs than tokens": (
        Sampling(num_prompt_logprobs=98),
        "num_prompt_logprobs is 98; the vocabulary has 97 tokens",
    ),
    "a thinking budget without marks": (
        Sampling(thinking_budget=3),
        "thinking_budget is 3, and the runner was given no marks",
    ),
    "every allowed token is a bad word": (
        Sampling(allowed_token_ids=(4, 5), bad_words=((5,), (4,), (6, 7))),
        "bad_words forbid every one of allowed_token_ids",
    ),
    "every allowed token ends the request": (
        Sampling(allowed_token_ids=(4, 5), bad_words=((5,),), min_tokens=1, stop_token_ids=(4, 9)),
        "min_tokens is 1 and forbids every one of allowed_token_ids that is left",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_request_that_cannot_be_served_is_refused_before_a_row_changes(name: str) -> None:
    sampling, message = FAULTS[name]
    toy = Toy(CONFIG)
    toy.host.add("a", [1, 2, 3])
    toy.run({"a": 3})
    beside = Toy(CONFIG)
    beside.host.add("b", [4, 5], sampling)
    with pytest.raises(ConfigError) as raised:
        toy.runner.execute(beside.host.plan({"b": 2}))
    assert str(raised.value).startswith(f"request 'b' cannot be served: {message}")
    toy.run({"a": 1})
    toy.run({"a": 1})
    assert toy.outputs() == toy.expected()
    assert len(toy.outputs()[0][1]) == 3


def test_every_fault_of_a_request_is_named_at_once() -> None:
    sampling = Sampling(logit_bias={97: 1.0}, num_logprobs=98, thinking_budget=1)
    faults = sampling_faults(sampling, 97, has_markers=False)
    assert [fault.split()[0] for fault in faults] == [
        "logit_bias",
        "num_logprobs",
        "thinking_budget",
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(logit_bias={0: 1.0, 96: -1.0}, allowed_token_ids=(0, 96), bad_words=((96, 0),)),
        Sampling(num_logprobs=97, num_prompt_logprobs=-1, top_k=1000),
        Sampling(allowed_token_ids=(4,), bad_words=((4, 4),)),
        Sampling(allowed_token_ids=(4, 5), min_tokens=3, stop_token_ids=(4,)),
        Sampling(allowed_token_ids=(4,), min_tokens=3, stop_token_ids=(4,), is_structured=True),
        Sampling(thinking_budget=0),
    ],
)
def test_what_can_be_served_is_not_refused(sampling: Sampling) -> None:
    assert sampling_faults(sampling, 97, has_markers=True) == []


def test_prompt_logprobs_need_the_whole_prompt_to_run() -> None:
    marked = replace(CONFIG, thinking=ThinkingMarkers(start=(1,), end=(2,)))
    toy = Toy(marked)
    toy.host.add("a", [1, 2, 3, 4, 5])
    toy.run({"a": 5})
    request = toy.host.add("b", [1, 2, 3, 4, 5], Sampling(num_prompt_logprobs=2))
    toy.host.share("a", "b", 4)
    with pytest.raises(ConfigError, match=r"'b' .* num_prompt_logprobs is 2, and 4 tokens of the"):
        toy.runner.execute(toy.host.plan({"b": 1}))
    request.outputs.append(7)  # it has been sampled before, so they were returned
    request.has_row = False
    toy.runner.execute(toy.host.plan({"b": 2}))
