"""Our platform inside the installed vLLM: the runner that a configuration gets, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OURS = "mrv2_compat.vllm_v1.worker.CpuWorker"
V1S = "vllm.v1.worker.cpu_worker.CPUWorker"
RUNNER = "MRV2_RUNNER"
FLAG = "VLLM_USE_V2_MODEL_RUNNER"
CHUNKED_LOCAL = {"hf_overrides": {"attention_chunk_size": 64}}


@pytest.fixture(scope="module")
def outcomes(run_cases: Any, make_case: Callable[..., dict[str, Any]]) -> Any:
    """Build every configuration of this module in one process."""
    several = {"enable_prompt_embeds": True, "enable_lora": True}
    cases = [
        make_case("refused", engine=several),
        make_case("two-devices", engine={"prefill_context_parallel_size": 2}),
        make_case("environment", environ={"VLLM_BATCH_INVARIANT": "1"}),
        make_case("chunked-local", environ={"VLLM_BATCH_INVARIANT": None}, engine=CHUNKED_LOCAL),
        make_case("foreign-worker", engine={"worker_cls": V1S}),
        make_case("our-worker", engine={"worker_cls": OURS}),
        make_case("compiled", engine={"enforce_eager": False}),
        make_case("served-request", request={"temperature": 0.7, "seed": 1, "logprobs": 2, "n": 2}),
        make_case("greedy-request", request={"temperature": 0.0, "top_k": 5, "top_p": 0.5}),
        make_case("refused-request", request={"watermarking": True, "trace_decode_token_ids": [1]}),
        make_case("impossible-request", request={"seed": 2**64}),
        make_case("image-request", request={"type": "multimodal"}),
        make_case("v1", environ={RUNNER: "v1"}, request={"top_k": 5}),
        make_case("v1-our-worker", engine={"worker_cls": OURS}),
        make_case("auto", environ={RUNNER: "auto"}),
        make_case("auto-request", request={"watermarking": True}),
        make_case("auto-v1", engine={"enable_prompt_embeds": True}, request={"top_k": 5}),
        make_case("auto-foreign-worker", engine={"worker_cls": V1S}),
        make_case("auto-vllm", engine={"prefill_context_parallel_size": 2}),
        make_case("auto-again"),
        make_case("kept", keep=True),
        make_case("second-v1", engine={"enable_prompt_embeds": True}),
        make_case("second-vllm", engine={"prefill_context_parallel_size": 2}),
        make_case("second-ours", request={"watermarking": True}),
        make_case("second-unset", environ={RUNNER: None}),
        make_case("second-same", environ={RUNNER: "mrv2"}),
    ]
    return run_cases(cases, {RUNNER: "mrv2"})


def test_every_unsupported_feature_is_listed_with_its_remedy(outcomes: Any) -> None:
    error = outcomes.error("refused")
    assert "not supported by the mrv2 runner" in error
    assert "- LoRA (lora_config=" in error
    assert "- prompt embeddings (enable_prompt_embeds=True): leave it out" in error
    assert error.count("or set MRV2_RUNNER=v1") == 2


def test_the_refusal_is_a_value_error_of_the_configuration(outcomes: Any) -> None:
    assert "ValueError" in outcomes.by_case["refused"]["types"]


def test_ours_is_heard_before_vllms_own_refusal_of_the_same(outcomes: Any) -> None:
    assert "prefill_context_parallel_size=2" in outcomes.error("two-devices")
    assert "unset MRV2_RUNNER" in outcomes.error("two-devices")


def test_environment_variables_that_ask_the_runner_are_refused(outcomes: Any) -> None:
    assert "batch invariance (VLLM_BATCH_INVARIANT=1): unset it" in outcomes.error("environment")


def test_models_with_other_attention_are_refused(outcomes: Any) -> None:
    assert "attention_chunk_size=64" in outcomes.error("chunked-local")


def test_a_foreign_worker_is_refused_by_name(outcomes: Any) -> None:
    error = outcomes.error("foreign-worker")
    assert f"worker_cls={V1S}" in error
    assert f"subclass of {OURS}" in error


@pytest.mark.parametrize("name", ["our-worker", "compiled", "served-request", "greedy-request"])
def test_supported_configurations_and_requests_pass(outcomes: Any, name: str) -> None:
    assert outcomes.by_case[name] == {"worker": OURS, "uses_v2": False, "flag": "0"}


def test_every_unsupported_parameter_of_a_request_is_listed(outcomes: Any) -> None:
    error = outcomes.error("refused-request")
    assert "- watermarking (watermarking=True): leave it out" in error
    assert "- trace replay (trace_decode_token_ids=[1])" in error
    # vLLM's server answers 400 to errors of this kind only.
    assert "VLLMClientError" in outcomes.by_case["refused-request"]["types"]


def test_a_value_that_nobody_can_honour_is_refused_as_the_clients_error(outcomes: Any) -> None:
    error = outcomes.error("impossible-request")
    assert f"seed is {2**64}; it must be an integer of 64 bits" in error
    assert "VLLMClientError" in outcomes.by_case["impossible-request"]["types"]


def test_inputs_other_than_tokens_are_refused(outcomes: Any) -> None:
    assert "multimodal inputs" in outcomes.error("image-request")


def test_v1_gets_vllms_own_worker_and_its_requests_are_not_checked(outcomes: Any) -> None:
    assert outcomes.by_case["v1"] == {"worker": V1S, "uses_v2": False, "flag": "0"}
    assert "runner: v1, vLLM's V1 runner" in outcomes.log


def test_v1_with_our_worker_is_a_contradiction(outcomes: Any) -> None:
    assert "MRV2_RUNNER='v1' contradicts" in outcomes.error("v1-our-worker")


def test_auto_takes_ours_where_everything_is_supported(outcomes: Any) -> None:
    assert outcomes.by_case["auto"]["worker"] == OURS
    assert "watermarking=True" in outcomes.error("auto-request")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("auto-v1", "mrv2 does not support: prompt embeddings (enable_prompt_embeds=True)"),
        ("auto-foreign-worker", f"a worker of another kind (worker_cls={V1S})"),
    ],
)
def test_auto_takes_v1_where_ours_cannot_and_says_why(
    outcomes: Any, name: str, reason: str
) -> None:
    assert outcomes.by_case[name] == {"worker": V1S, "uses_v2": False, "flag": "0"}
    assert reason in outcomes.log


def test_auto_leaves_to_vllm_what_v1_cannot_run(outcomes: Any) -> None:
    line = next(line for line in outcomes.log.splitlines() if "runner: vLLM's own choice" in line)
    assert "V1 cannot run: prefill context parallel" in line
    # Without Triton for CPU vLLM's own choice is V1 after all, which refuses in its own words.
    assert "Model Runner V1 does not support: prefill context parallel" in outcomes.error(
        "auto-vllm"
    )
    assert "Model Runner V2 requires Triton" in outcomes.log


def test_auto_sets_the_flag_again_for_a_later_configuration(outcomes: Any) -> None:
    assert outcomes.by_case["auto-again"] == {"worker": OURS, "uses_v2": False, "flag": "0"}


@pytest.mark.parametrize(
    ("name", "wanted"), [("second-v1", "v1"), ("second-vllm", "vllm"), ("second-unset", "vllm")]
)
def test_a_second_runner_in_one_process_is_refused(outcomes: Any, name: str, wanted: str) -> None:
    error = outcomes.error(name)
    assert f"is for the runner {wanted}, and another engine of this process has mrv2" in error
    assert "a process of its own" in error


def test_requests_are_checked_as_before_a_second_runner_was_refused(outcomes: Any) -> None:
    assert outcomes.by_case["kept"]["worker"] == OURS
    assert "watermarking=True" in outcomes.error("second-ours")


def test_a_second_engine_with_the_same_runner_is_welcome(outcomes: Any) -> None:
    assert outcomes.by_case["second-same"] == {"worker": OURS, "uses_v2": False, "flag": "0"}
