"""Random schedules of a tiny checkpoint.

V1's runner and ours run side by side, step by step; and ours runs alone, in the synchronous order
and in the async one, against V1's tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.mutants import MUTANTS
from mrv2_diff.schedules import actions as act

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_random_workloads_are_alike_in_both_runners() -> None:
    from mrv2_diff.schedules import beside_v1

    result = beside_v1.soak(15.0, seed=0)
    assert result.failure is None
    # A request may be given up before it is scheduled.
    assert 10 <= result.events["arrivals"] <= result.requests
    assert result.events["aborts"] >= 1
    assert result.events["cache_hits"] >= 1
    assert result.steps > 50


def test_a_fault_beside_v1_is_found_made_short_and_played_again(tmp_path: Path) -> None:
    from mrv2_diff.schedules import beside_v1

    fault = next(mutant for mutant in MUTANTS if mutant.id == "swapped-logit-row")
    with fault.apply():
        failure = beside_v1.soak(1.0, seed=1).failure
    assert failure is not None
    assert "wrong value: step" in failure.error
    act.write(failure.schedule, tmp_path / "failing.json")
    schedule = act.read(tmp_path / "failing.json")
    assert schedule.model == "lockstep"
    arrivals = [action for action in schedule.actions if isinstance(action, act.Arrive)]
    assert len(arrivals) == 2  # two logits are swapped
    assert beside_v1.replay(schedule) is None


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    from mrv2_diff.schedules.tiny import TinyBench

    bench = TinyBench()
    yield bench
    bench.close()


def test_a_checkpoint_gives_v1s_tokens_in_either_order(tiny: Any) -> None:
    """The async order: each step is executed before the output of the one before is read."""
    from mrv2_diff.schedules.events import KINDS, EventCounts

    events = EventCounts()
    num_compared = 0
    for setup in tiny.setups:
        driver = tiny.driver(setup)
        driver.play(tiny.actions(17, setup, 700))
        events.counts.update(driver.events.counts)
        num_compared += sum(len(tokens) for _, tokens in driver.ended)
        ahead = driver.events.counts["steps queued ahead of an output"]
        assert (ahead > 100) == setup.is_async
    assert num_compared > 5000
    assert [kind for kind in KINDS if not events.counts[kind]] == []
    assert events.counts["aborts with an output in flight"] >= 20
    assert events.counts["preemptions"] >= 100


def test_v1s_tokens_end_before_two_logits_that_are_as_good_as_equal(tiny: Any) -> None:
    from msgspec.structs import replace

    from mrv2_diff.schedules import tiny as module

    request = act.Arrive(name="a", prefix_len=20, max_tokens=12)
    prompt = request.prompt(tiny.setups[0].vocab_size)
    whole = tiny.expectations.outputs(prompt, request)
    assert (len(whole.tokens), whole.max_tokens) == (12, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MARGIN", 1e9)
        # Another option, so that nothing is known of it.
        other = replace(request, options={"min_tokens": 0})
        assert tiny.expectations.outputs(prompt, other).max_tokens == 0


@pytest.mark.parametrize("fault", ["slot-from-wrong-block", "resumed-keeps-old-block"])
def test_a_fault_in_a_checkpoints_schedules_is_found(fault: str, tiny: Any, tmp_path: Path) -> None:
    from mrv2_diff.schedules.soak import replay, soak

    mutant = next(mutant for mutant in MUTANTS if mutant.id == fault)
    with mutant.apply():
        result = soak(tiny, 60.0, seed=3)
    assert not result.passes
    failure = result.failure
    assert failure is not None
    act.write(failure.schedule, tmp_path / "failing.json")
    schedule = act.read(tmp_path / "failing.json")
    assert schedule.model == "tiny"
    assert "alone it returns" in failure.error
    assert replay(schedule, tiny) is None
