"""Parameters that vLLM lets through and nobody can honour are found where a request enters."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def engine(
    vocab_size: int = 100, eos: object = 2, generation: dict[str, Any] | None = None
) -> SimpleNamespace:
    """Return what is looked at of an engine's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: vocab_size,
            hf_text_config=SimpleNamespace(eos_token_id=eos),
            try_get_generation_config=lambda: generation or {},
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def faults(*engines: Any, **asked: Any) -> list[str]:
    from vllm import SamplingParams

    from mrv2_compat.vllm_v1.entrance import request_faults

    return request_faults(SamplingParams(**asked), engines or [engine()])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"seed": 2**64}, f"seed is {2**64}; it must be an integer of 64 bits: send another"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias is {3: nan}; it must be finite"),
        ({"logit_bias": {100: 1.0}}, "logit_bias has 100; the vocabulary is 0 to 99"),
        ({"allowed_token_ids": [5, -1]}, "allowed_token_ids has -1; the vocabulary is 0 to 99"),
        ({"logprob_token_ids": [100]}, "logprob_token_ids has 100; the vocabulary"),
        ({"logprobs": 101}, "num_logprobs is 101; the vocabulary has 100 tokens"),
        (
            {"allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]},
            "min_tokens is 1 and forbids every one of allowed_token_ids",
        ),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens is 1 and forbids every one"),
        (
            {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
            "prompt_logprobs is 1 and skip_reading_prefix_cache is False",
        ),
    ],
)
def test_what_nobody_can_honour(asked: dict[str, Any], message: str) -> None:
    (fault,) = faults(**asked)
    assert fault.startswith(message)


@pytest.mark.parametrize(
    ("eos", "generation"), [([7, 2], None), (None, {"eos_token_id": 2}), (9, {"eos_token_id": [2]})]
)
def test_every_end_that_the_engine_will_know_counts(
    eos: object, generation: dict[str, Any] | None
) -> None:
    asked = {"allowed_token_ids": [2], "min_tokens": 1}
    assert len(faults(engine(eos=eos, generation=generation), **asked)) == 1
    assert faults(engine(eos=None), **asked) == []


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
        {"allowed_token_ids": [2, 3], "min_tokens": 1},
        {"allowed_token_ids": [2]},
        {"prompt_logprobs": 1},
        {"stop_token_ids": [5], "min_tokens": 3},
    ],
)
def test_what_can_be_served(asked: dict[str, Any]) -> None:
    assert faults(**asked) == []


def test_a_request_is_refused_only_if_no_engine_of_the_process_can_serve_it() -> None:
    small, large = engine(vocab_size=100), engine(vocab_size=200)
    asked: dict[str, Any] = {"logit_bias": {150: 1.0}}
    assert faults(small, large, **asked) == []
    assert len(faults(small, small, **asked)) == 1


def test_the_parameters_are_left_as_they_were() -> None:
    from vllm import SamplingParams

    from mrv2_compat.vllm_v1.entrance import request_faults

    params = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    assert request_faults(params, [engine()])
    assert params.all_stop_token_ids == set()
