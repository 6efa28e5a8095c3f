"""The entry points inside the installed vLLM: what can act acts, and what cannot is an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(run_cases: Any, make_case: Callable[..., dict[str, Any]]) -> Any:
    """Start as mrv2, then let `register` see other environments, as a fresh process would."""
    set_runner = "MRV2_RUNNER"
    flag = "VLLM_USE_V2_MODEL_RUNNER"
    cases = [
        make_case("mrv2", register=True),
        make_case("unknown", register=True, environ={set_runner: "mrv3"}),
        *(
            make_case(f"conflict-{name}", register=True, environ={set_runner: name, flag: "1"})
            for name in ("v1", "mrv2", "auto")
        ),
        make_case("hidden", register=True, environ={flag: "0", "VLLM_PLUGINS": "other"}),
    ]
    return run_cases(cases, {set_runner: "mrv2"})


def test_mrv2_places_our_worker(outcomes: Any) -> None:
    assert outcomes.by_case["mrv2"] == {
        "worker": "mrv2_compat.vllm_v1.worker.CpuWorker",
        "uses_v2": False,
        "flag": "0",
    }


def test_one_line_says_which_runner_runs_and_why(outcomes: Any) -> None:
    lines = [line for line in outcomes.log.splitlines() if "runner: mrv2 " in line]
    assert len(lines) == 1
    assert "because MRV2_RUNNER=mrv2" in lines[0]


def test_no_worker_is_imported_where_configurations_are_built(outcomes: Any) -> None:
    assert "A WORKER WAS IMPORTED" not in outcomes.log


def test_unknown_value_stops_the_process_and_lists_the_values(outcomes: Any) -> None:
    assert "MRV2_RUNNER='mrv3' is not a runner" in outcomes.error("unknown")
    assert "v1, mrv2, auto" in outcomes.error("unknown")


@pytest.mark.parametrize("name", ["v1", "mrv2", "auto"])
def test_asking_for_vllms_v2_runner_too_is_an_error(outcomes: Any, name: str) -> None:
    error = outcomes.error(f"conflict-{name}")
    assert "VLLM_USE_V2_MODEL_RUNNER='1'" in error
    assert "unset one of the two" in error


def test_an_allow_list_that_appears_later_is_noticed(outcomes: Any) -> None:
    assert "VLLM_PLUGINS='other' hides the entry point" in outcomes.error("hidden")


def test_unset_leaves_vllm_alone_and_a_late_value_is_an_error(
    run_cases: Any, make_case: Callable[..., dict[str, Any]]
) -> None:
    late = make_case("late", register=True, environ={"MRV2_RUNNER": "mrv2"})
    outcomes = run_cases([make_case("unset"), late], {})
    unset = outcomes.by_case["unset"]
    assert unset["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert unset["flag"] is None
    assert "runner:" not in outcomes.log
    assert "MRV2_RUNNER='mrv2' cannot act" in outcomes.error("late")
    assert "before vLLM is imported" in outcomes.error("late")


def test_unknown_value_from_the_start_reaches_the_user(
    run_cases: Any, make_case: Callable[..., dict[str, Any]]
) -> None:
    outcomes = run_cases([make_case("unknown")], {"MRV2_RUNNER": "v2"})
    assert "MRV2_RUNNER='v2' is not a runner" in outcomes.error("unknown")


def test_a_skipped_platform_plugin_is_an_error(
    run_cases: Any, make_case: Callable[..., dict[str, Any]]
) -> None:
    environ = {"MRV2_RUNNER": "mrv2", "VLLM_TARGET_DEVICE": "cpu"}
    error = run_cases([make_case("skipped")], environ).error("skipped")
    assert "VLLM_TARGET_DEVICE=cpu makes vLLM skip every platform plugin: unset it" in error


@pytest.mark.parametrize(
    ("visible", "hidden"),
    [("mrv2_platform", "vllm.general_plugins"), ("mrv2_general", "vllm.platform_plugins")],
)
def test_hiding_one_entry_point_is_an_error_of_the_other(
    run_cases: Any,
    make_case: Callable[..., dict[str, Any]],
    split_plugin: Path,
    visible: str,
    hidden: str,
) -> None:
    environ = {
        "MRV2_RUNNER": "mrv2",
        "VLLM_PLUGINS": visible,
        "PYTHONPATH": str(split_plugin),
    }
    error = run_cases([make_case("hidden")], environ).error("hidden")
    assert "MRV2_RUNNER='mrv2' cannot act" in error
    assert hidden in error
    assert "unset it" in error


def test_another_distribution_adds_a_runner(
    run_cases: Any, make_case: Callable[..., dict[str, Any]], added_choice: Path
) -> None:
    cases = [
        make_case("probe", engine={"enable_prompt_embeds": True}, request={"top_k": 5}),
        make_case("unknown", register=True, environ={"MRV2_RUNNER": "prob"}),
    ]
    outcomes = run_cases(cases, {"MRV2_RUNNER": "probe", "PYTHONPATH": str(added_choice)})
    expected = {"worker": "probe.cpu.Worker", "uses_v2": False, "flag": "0"}
    assert outcomes.by_case["probe"] == expected
    assert "v1, mrv2, auto, probe" in outcomes.error("unknown")
    assert "runner: probe; worker probe.cpu.Worker" in outcomes.log
