"""What is refused, and in which words."""

from enum import Enum
from typing import Any

import pytest

from mrv2.errors import ConfigError
from mrv2_compat.vllm_v1 import versions
from mrv2_compat.vllm_v1.requests import refusals

BOUNDS: list[tuple[str, object, object]] = [
    ("parallel_config.tensor_parallel_size", 1, 2),
    ("parallel_config.use_ubatching", False, True),
    ("speculative_config", None, object()),
    ("offload_config.uva.cpu_offload_gb", 0, 0.5),
    ("model_config.runner_type", "generate", "pooling"),
    ("model_config.enable_sleep_mode", False, True),
    ("cache_config.cache_dtype", "auto", "fp8"),
    ("cache_config.cache_dtype", "bfloat16", "int8_per_token_head"),
]


class Backend(Enum):
    TRITON_ATTN = 1
    FLASHINFER = 2


def rule(path: str) -> refusals.Rule:
    return next(rule for rule in refusals.CONFIG_RULES if rule.path == path)


@pytest.mark.parametrize(("path", "served", "refused"), BOUNDS)
def test_bounds_of_a_configuration(path: str, served: object, refused: object) -> None:
    assert rule(path).accepts(served)
    assert not rule(path).accepts(refused)


def test_attention_backends_asked_for_by_name() -> None:
    one, each = rule("attention_config.backend"), rule("attention_config.backend_per_kind")
    assert one.accepts(None)
    assert one.accepts(Backend.TRITON_ATTN)
    assert not one.accepts(Backend.FLASHINFER)
    assert each.accepts({})
    assert not each.accepts({"full": Backend.TRITON_ATTN, "sliding": Backend.FLASHINFER})


@pytest.mark.parametrize(
    ("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_environment_flags(value: str, refused: bool) -> None:
    found = refusals.environment_refusals({"VLLM_COMPUTE_NANS_IN_LOGITS": value})
    assert bool(found) is refused
    assert all(f"VLLM_COMPUTE_NANS_IN_LOGITS={value}" in str(refusal) for refusal in found)


def test_backends_found_after_loading_are_refused_by_name_once() -> None:
    found = refusals.backend_refusals(["FLASHINFER", "CPU_ATTN", "FLASHINFER", "FLEX_ATTENTION"])
    assert [refusal.value for refusal in found] == ["FLASHINFER", "FLEX_ATTENTION"]
    assert "CPU_ATTN, FLASH_ATTN, TRITON_ATTN" in str(found[0])


def test_kv_cache_kinds_are_refused_once_each_with_a_layer() -> None:
    full = type("FullAttentionSpec", (), {"attention_chunk_size": None})
    chunked = type("FullAttentionSpec", (), {"attention_chunk_size": 64})
    mamba = type("MambaSpec", (), {})
    specs = {"a": full(), "b": mamba(), "c": mamba(), "d": chunked()}
    found = [refusal.value for refusal in refusals.kv_cache_refusals(specs)]
    assert found == ["MambaSpec in 2 layers, first b", "FullAttentionSpec in 1 layers, first d"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7, "seed": 3, "logprobs": 0},
        {"logprobs": -1},
        {"n": 3, "stop": ["x"], "ignore_eos": True, "max_tokens": 3, "stop_token_ids": [1]},
        {"top_k": -1, "top_p": 1.0, "detokenize": False, "flat_logprobs": True},
        {"temperature": 0.0, "top_p": 0.5},
        {"logit_bias": {}, "bad_words": []},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "thinking_token_budget": 10},
        {"bad_words": ["x"], "extra_args": {"a": 1}},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        {"logit_bias": {1: 2.0}, "allowed_token_ids": [1], "min_tokens": 2},
        {"prompt_logprobs": -1, "logprob_token_ids": [1]},
    ],
)
def test_served_requests(asked: dict[str, Any]) -> None:
    from vllm import SamplingParams

    assert refusals.request_refusals(SamplingParams(**asked)) == []


@pytest.mark.vllm
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprob_token_ids": [[1]]},
        {"watermarking": True},
        {"trace_decode_token_ids": [1]},
    ],
)
def test_refused_requests_name_the_parameter_and_the_remedy(asked: dict[str, Any]) -> None:
    from vllm import SamplingParams

    (refusal,) = refusals.request_refusals(SamplingParams(**asked))
    assert not refusals.asks_for_nothing_refused(SamplingParams(**asked))
    assert refusals.asks_for_nothing_refused(SamplingParams())
    ((name, value),) = asked.items()
    assert f"({name}={value!r})" in str(refusal)
    assert "MRV2_RUNNER=v1" in refusal.remedy


@pytest.mark.vllm
def test_pooling_and_other_inputs_are_refused() -> None:
    from vllm import PoolingParams, SamplingParams

    assert "pooling (PoolingParams)" in str(refusals.request_refusals(PoolingParams())[0])
    for kind in ("embeds", "multimodal", "enc_dec"):
        (refusal,) = refusals.request_refusals(SamplingParams(), {"type": kind})
        assert kind in refusal.value


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1.dev2+gabc", True),
        ("0.34.0", False),
        ("1.0", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert versions.is_supported(version) is supported
    found = versions.version_refusals(version)
    assert bool(found) is not supported
    assert all(versions.RANGE in str(refusal) and version in str(refusal) for refusal in found)


def test_a_version_without_numbers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'dev'"):
        versions.is_supported("dev")
