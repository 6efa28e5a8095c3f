"""Random schedules through vLLM's own scheduler: no request may notice any of it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrv2.state.requests import RequestColumns
from mrv2_compat.vllm_v1.step.ledger import KnownRequest, RequestLedger
from mrv2_diff.mutants import MUTANTS, Patch
from mrv2_diff.schedules import actions as act
from mrv2_diff.schedules.events import KINDS
from mrv2_diff.schedules.generator import SETUPS, actions
from mrv2_diff.schedules.result import Failure
from mrv2_diff.schedules.shrinking import shrink

pytestmark = pytest.mark.vllm

NUM_STEPS = 20_000
LEAST_EVENTS = 100
"""Of each kind, or the steps prove less than they should."""


@pytest.mark.slow
def test_every_request_returns_what_it_returns_alone() -> None:
    from mrv2_diff.schedules.driver import Driver

    counts = dict.fromkeys(KINDS, 0)
    num_steps, seed = 0, 0
    while num_steps < NUM_STEPS:
        for setup in SETUPS:
            driver = Driver(setup)
            driver.play(actions(seed, setup, 1250))
            num_steps += driver.num_steps
            for kind, count in driver.events.counts.items():
                counts[kind] += count
        seed += 1
    rare = {kind: count for kind, count in counts.items() if count < LEAST_EVENTS}
    assert not rare, f"in {num_steps} steps these happened too seldom: {rare}"


def arrivals() -> st.SearchStrategy[act.Action]:
    def arrive(number: int, **fields: Any) -> act.Action:
        return act.Arrive(name=f"r{number}", session=number == 0, **fields)

    return st.builds(
        arrive,
        st.integers(0, 6),
        prefix=st.integers(0, 1),
        prefix_len=st.sampled_from((0, 8, 17)),
        tail=st.integers(0, 9),
        tail_len=st.integers(1, 8),
        max_tokens=st.integers(1, 12),
        stop=st.sampled_from((None, 5)),
        priority=st.integers(0, 1),
    )


ACTIONS: st.SearchStrategy[Sequence[act.Action]] = st.lists(
    st.one_of(
        st.builds(act.Step, lag=st.just(1)),
        st.builds(act.Step, lag=st.integers(0, 1), paused=st.booleans()),
        arrivals(),
        arrivals(),
        st.builds(act.Abort, name=st.integers(0, 6).map("r{}".format)),
        st.builds(act.Reset),
        st.builds(act.FailLoad, request=st.integers(0, 3), block=st.integers(0, 3)),
    ),
    min_size=20,
    max_size=80,
)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(setup=st.sampled_from(SETUPS), schedule=ACTIONS)
def test_no_schedule_is_found_that_a_request_notices(
    setup: act.Setup, schedule: Sequence[act.Action]
) -> None:
    from mrv2_diff.schedules.driver import Driver

    driver = Driver(setup)
    driver.play([*schedule, act.Drain()])


def progress_is_never_taken_back() -> AbstractContextManager[object]:
    def faulty(self: RequestColumns, rows: Any, computed: Any) -> None:
        """Trust the device's count, whatever the scheduler says."""

    return patch.object(RequestColumns, "agree", faulty)


def ended_requests_stay_known() -> AbstractContextManager[object]:
    return patch.object(RequestLedger, "forget", lambda self, req_id: None)


def resumed_requests_draw_from_another_seed() -> AbstractContextManager[object]:
    get = RequestLedger.get

    def faulty(self: RequestLedger, req_id: str) -> KnownRequest:
        known = get(self, req_id)
        return replace(known, sampling=replace(known.sampling, seed=known.sampling.seed + 1))

    return patch.object(RequestLedger, "get", faulty)


OF_SCHEDULES = frozenset(
    {
        "block tables",
        "chunked prompts",
        "commit",
        "inputs",
        "lengths",
        "order of outputs",
        "rows",
        "slots",
        "staged writes",
    }
)
"""Kinds of mutants that need neither vLLM's model nor what a request may ask for."""
FAULTS: dict[str, Patch] = {
    **{
        mutant.id: mutant.apply
        for mutant in MUTANTS
        if mutant.kind in OF_SCHEDULES and mutant.case != "attention.alternating_window"
    },
    "progress-never-taken-back": progress_is_never_taken_back,
    "ended-stays-known": ended_requests_stay_known,
    "resumed-with-another-seed": resumed_requests_draw_from_another_seed,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_schedule_made_short(fault: str, tmp_path: Path) -> None:
    from mrv2_diff.schedules.soak import find_failure, replay

    with FAULTS[fault]():
        failure = find_failure(seed=3, num_actions=600)
        assert isinstance(failure, Failure), "no schedule showed the fault"
        assert len(failure.schedule.actions) < 40
        act.write(failure.schedule, tmp_path / "failing.json")
        assert replay(act.read(tmp_path / "failing.json")) is not None
    assert replay(act.read(tmp_path / "failing.json")) is None


def test_every_way_of_scheduling_gives_the_same_tokens() -> None:
    from mrv2_diff.schedules.invariance import invariance, ways

    result = invariance(36)
    assert [row.differing for row in result.rows] == [[]] * len(ways(36))
    assert [row.logprob_difference for row in result.rows] == [0.0] * len(result.rows)
    assert [row.way for row in result.rows if not row.times] == []
    assert result.passes
    assert (result.num_requests, result.refused) == (36, [])
    assert len(result.parameters) == 17
    assert min(result.parameters.values()) >= 3


def test_a_made_up_grammar_constrains_what_is_drawn() -> None:
    from mrv2_diff.schedules.driver import Driver
    from mrv2_diff.schedules.grammars import MadeUpGrammar

    setup = act.Setup(is_async=True)
    request = act.Arrive(name="a", max_tokens=20, temperature=1.0)
    free = Driver(setup, compares=False)
    free.play([request, act.Drain()])
    bound = Driver(setup, compares=False)
    bound.play([msgspec.structs.replace(request, grammar=5), act.Drain()])
    assert MadeUpGrammar(5, setup.vocab_size).accept_tokens("a", bound.turns["a"].received)
    assert not MadeUpGrammar(5, setup.vocab_size).accept_tokens("a", free.turns["a"].received)
    assert len(bound.turns["a"].received) == 20


def test_logprobs_are_compared_by_token_rank_and_value() -> None:
    import torch

    from mrv2_diff.schedules.invariance import _apart

    inf = float("inf")
    ids, values = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[-1.0, -2.0], [-0.5, -inf]])
    alone = (ids, values, torch.tensor([1, 1]))
    wider = torch.cat([values, torch.zeros(2, 1)], dim=1)
    assert _apart((torch.cat([ids, ids[:, :1]], dim=1), wider, alone[2]), alone) == 0.0
    assert _apart((ids, values - 0.25, alone[2]), alone) == 0.25
    assert _apart((ids + 1, values, alone[2]), alone) == inf
    assert _apart((ids, values, alone[2] + 1), alone) == inf
    assert _apart(None, alone) == inf
    assert _apart(None, None) == 0.0


def test_a_way_of_scheduling_that_changes_a_token_is_seen() -> None:
    from mrv2_diff.schedules.invariance import invariance

    with resumed_requests_draw_from_another_seed():
        result = invariance(24)
    rows = {row.way: row for row in result.rows}
    assert rows["preempted after step 4"].differing
    assert not rows["all in one batch"].differing
    assert not result.passes


def test_shrinking_leaves_what_is_needed_and_nothing_else() -> None:
    tried = []

    def fails(part: Sequence[int]) -> bool:
        tried.append(list(part))
        return {3, 17, 18} <= set(part)

    assert shrink(range(40), fails) == [3, 17, 18]
    assert all(len(part) < 40 for part in tried)


def test_a_schedule_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    act.write(act.Schedule(setup=act.Setup(), actions=(act.Reset(),), format=9), path)
    with pytest.raises(ValueError, match="format 9; this version reads 1"):
        act.read(path)
    path.write_text('{"setup": {}, "actions": [{"type": "Explode"}]}')
    with pytest.raises(ValueError, match=r"schedule.json holds no schedule: .*Explode"):
        act.read(path)
