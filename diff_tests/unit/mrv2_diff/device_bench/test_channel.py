"""A command is answered, or the failure says who, when and why."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.device_bench.channel import COMMON, RUNNERS, RunnerFailed, RunnerProcess

Starting = Callable[[dict[str, dict[str, object]]], Callable[..., RunnerProcess]]


def test_commands_are_answered_in_turn(starting: Starting, tmp_path: Path) -> None:
    with starting({})("v1", tmp_path / "log", {}) as process:
        assert process.ask("load", 20)["device"] == "cpu"
        process.send("record", point={}, steps=2)
        assert process.answer(20) == {"stream": "same"}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ({"error": "no memory"}, "v1: 'start' failed:\nTraceback: no memory"),
        ({"dies": True}, "v1: the process ended in 'start' with status 7; the end of log:"),
        ({"hangs": True}, "v1: no answer to 'start' after 1 s; ended"),
    ],
)
def test_a_failure_says_why(
    starting: Starting, tmp_path: Path, act: dict[str, Any], message: str
) -> None:
    process = starting({"v1": {"start": act}})("v1", tmp_path / "log", {})
    process.ask("load", 20)
    began = time.monotonic()
    with pytest.raises(RunnerFailed) as caught:
        process.ask("start", 1)
    assert str(caught.value).startswith(message)
    assert caught.value.runner == "v1"
    assert time.monotonic() - began < 15
    if act.get("dies"):
        assert "the last words" in str(caught.value)
    assert process.ended


def test_leaving_ends_the_process(starting: Starting, tmp_path: Path) -> None:
    with starting({})("v1", tmp_path / "log", {}) as process:
        process.ask("load", 20)
    assert process.ended


def test_an_exception_ends_a_process_that_is_in_the_middle(
    starting: Starting, tmp_path: Path
) -> None:
    process = starting({"v1": {"load": {"hangs": True}}})("v1", tmp_path / "log", {})

    def interrupted() -> None:
        with process:
            process.send("load")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert process.ended


def test_each_runner_is_chosen_by_its_variables() -> None:
    assert RUNNERS["v1"] == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert RUNNERS["vllm-v2"] == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert RUNNERS["mrv2"]["MRV2_RUNNER"] == "mrv2"
    assert COMMON["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
