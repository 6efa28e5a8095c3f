"""Random schedules in a whole engine, V1's runner and ours side by side."""

from pathlib import Path

import pytest

from mrv2_diff.mutants import MUTANTS
from mrv2_diff.schedules import actions as act

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_random_workloads_are_alike_in_both_runners() -> None:
    from mrv2_diff.schedules import beside_v1

    result = beside_v1.soak(15.0, seed=0)
    assert result.failure is None
    assert result.requests >= 5
    assert result.events["arrivals"] == result.requests
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
    assert schedule.model == "tiny"
    arrivals = [action for action in schedule.actions if isinstance(action, act.Arrive)]
    assert len(arrivals) == 2  # two logits are swapped
    assert beside_v1.replay(schedule) is None
