"""Parameters that vLLM lets through and nobody can honour are found before a request enters."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Letters:
    """A tokenizer of single letters, the end of a text among its tokens."""

    max_token_id = 99

    def __init__(self, eos: int | None) -> None:
        self.eos_token_id = eos

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return a token a letter, spaces left out."""
        assert not add_special_tokens
        return [ord(letter) - ord("a") for letter in text.strip()]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from mrv2_compat.vllm_v1.requests import validation

    def of_engine(model_config: Any) -> Letters | None:
        return None if model_config.eos == "no tokenizer" else Letters(model_config.eos)

    monkeypatch.setattr(validation, "cached_tokenizer_from_config", of_engine)


def engine(
    vocab_size: int = 100, eos: object = 2, generation: dict[str, Any] | None = None
) -> SimpleNamespace:
    """Return what is looked at of an engine's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: vocab_size,
            eos=eos,
            try_get_generation_config=lambda: generation or {},
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def faults(*engines: Any, **asked: Any) -> list[str]:
    from vllm import SamplingParams

    from mrv2_compat.vllm_v1.requests.validation import request_faults

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
    ("eos", "generation"),
    [
        (2, None),
        (None, {"eos_token_id": 2}),
        (9, {"eos_token_id": [2]}),
        ("no tokenizer", {"eos_token_id": 2}),
    ],
)
def test_every_end_that_the_engine_will_know_counts(
    eos: object, generation: dict[str, Any] | None
) -> None:
    asked = {"allowed_token_ids": [2], "min_tokens": 1}
    assert len(faults(engine(eos=eos, generation=generation), **asked)) == 1
    assert faults(engine(eos=None), **asked) == []
    assert faults(engine(eos="no tokenizer"), **asked) == []


def test_bad_words_count_as_the_tokens_that_they_will_become() -> None:
    asked: dict[str, Any] = {"allowed_token_ids": [5, 7], "bad_words": ["f", "h"]}
    (fault,) = faults(**asked)
    assert fault.startswith("bad_words forbid every one of allowed_token_ids")
    (fault,) = faults(**asked | {"allowed_token_ids": [5, 2], "min_tokens": 1})
    assert fault.startswith("min_tokens is 1 and forbids every one of allowed_token_ids that is")
    assert faults(**asked | {"bad_words": ["f", "fh"]}) == []
    assert faults(engine(eos="no tokenizer"), **asked) == [], "vLLM forbids nothing then"


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

    from mrv2_compat.vllm_v1.requests.validation import request_faults

    params = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    assert request_faults(params, [engine()])
    assert params.all_stop_token_ids == set()
