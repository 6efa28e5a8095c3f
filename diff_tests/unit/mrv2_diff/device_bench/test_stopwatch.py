"""Host time is that of the calls less every wait for an event, on whatever thread it happens."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mrv2_diff.device_bench.stopwatch import Stopwatch

WORK, WAIT = 0.004, 0.02


class Event:
    def synchronize(self) -> None:
        time.sleep(WAIT)


class Output:
    def get_output(self) -> str:
        busy(WORK)
        Event().synchronize()
        return "tokens"


class Runner:
    """Works, waits while it prepares, works, and gives an output to be read."""

    def execute_model(self, scheduler_output: Any, rest: Any = None) -> None:
        busy(WORK)
        Event().synchronize()

    def sample_tokens(self, grammar_output: Any) -> Output:
        busy(WORK)
        return Output()


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def output(num_tokens: int = 2) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens,
        num_scheduled_tokens=dict.fromkeys(range(num_tokens), 1),
    )


@pytest.fixture
def event_class(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setattr(Event, "synchronize", Event.synchronize)  # put back at the end
    return Event


def step(runner: Runner, *, elsewhere: bool = False) -> None:
    runner.execute_model(output())
    result = runner.sample_tokens(None)
    if elsewhere:
        thread = threading.Thread(target=result.get_output)
        thread.start()
        thread.join()
    else:
        assert result.get_output() == "tokens"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_waits_are_left_out(event_class: type, elsewhere: bool) -> None:
    runner = Runner()
    watch = Stopwatch(runner)
    watch.watch_waits(event_class)
    watch.begin()
    step(runner, elsewhere=elsewhere)
    (row,) = watch.rows
    values = row.values()
    assert values["wait_us"] >= 2 * WAIT * 1e6
    assert values["host_us"] >= 3 * WORK * 1e6
    spent = values["execute_us"] + values["sample_us"] + values["read_us"]
    assert values["host_us"] == pytest.approx(spent - values["wait_us"])
    assert values["cpu_us"] < spent - WAIT * 1e6
    assert values["cpu_us"] >= 0.5 * 3 * WORK * 1e6
    assert row.read_elsewhere is elsewhere


def test_a_step_without_tokens_is_no_step() -> None:
    runner = Runner()
    watch = Stopwatch(runner)
    watch.begin()
    runner.execute_model(output(0))
    step(runner)
    assert [row.num_tokens for row in watch.rows] == [2]


def test_what_is_recorded_does_not_change_later() -> None:
    runner = Runner()
    watch = Stopwatch(runner)
    watch.begin(record=True)
    sent = output()
    runner.execute_model(sent)
    sent.num_scheduled_tokens["later"] = 1
    assert watch.recorded is not None
    assert len(watch.recorded[0].num_scheduled_tokens) == 2
