"""A child process does the same whatever its parent set for a vLLM of its own."""

from collections.abc import Callable

import pytest

from mrv2_diff.drivers.one_engine import job_environment
from mrv2_diff.drivers.server import serve_environment

OF_A_PARENT = {
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "unlike any driver's",
    "VLLM_PLUGINS": "other",
    "MRV2_RUNNER": "v1",
    "MRV2_RUNNER_SET_FLAG": "1",
    "MRV2_RUNNER_DECISION": "v1",
    "TORCH_COMPILE_DISABLE": "unlike any driver's",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@pytest.mark.parametrize("environment_of", [job_environment, serve_environment])
def test_nothing_of_the_parents_vllm_reaches_a_child(
    environment_of: Callable[[dict[str, str]], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OF_A_PARENT:
        monkeypatch.delenv(name, raising=False)
    before = environment_of({"MRV2_RUNNER": "mrv2"})
    for name, value in OF_A_PARENT.items():
        monkeypatch.setenv(name, value)
    assert environment_of({"MRV2_RUNNER": "mrv2"}) == before
    assert before["MRV2_RUNNER"] == "mrv2"


def test_other_variables_and_those_that_are_asked_for_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_PROXY", "there")
    child = serve_environment({"VLLM_PLUGINS": "mrv2", "TORCH_COMPILE_DISABLE": "0"})
    assert child["SOME_PROXY"] == "there"
    assert (child["VLLM_PLUGINS"], child["TORCH_COMPILE_DISABLE"]) == ("mrv2", "0")
