"""The small form of every case keeps to its bounds, and to what the case is about."""

from dataclasses import replace
from typing import Any

import pytest

from mrv2_diff.case import Abort, Add, Case, EngineSpec, Event
from mrv2_diff.catalog import CASES
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.small import (
    LAST_EVENT,
    LEAST_BLOCKS,
    MAX_OUTPUTS,
    MAX_REQUESTS,
    REMARK,
    has_small_form,
    small_form,
)

GRAMMAR = (("json", '{"type": "integer"}'),)

SMALL = [case for case in CASES.values() if has_small_form(case)]


def _add(step: int, req_id: str, temperature: float = 0.0, **further: object) -> Add:
    return Add(
        step=step,
        req_id=req_id,
        prompt=(1, 2, 3),
        max_tokens=40,
        temperature=temperature,
        options=tuple(further.items()),
    )


def _case(*events: Event, expects: frozenset[str] = frozenset()) -> Case:
    return Case(
        id="made-up",
        area="nothing",
        feature="nothing",
        title="some requests",
        engine=EngineSpec(model=ModelSpec()),
        workload=lambda: events,
        expects=expects,
    )


def _ids(case: Case) -> list[str]:
    return [event.req_id for event in case.workload() if isinstance(event, Add)]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_every_small_form_keeps_to_its_bounds(case: Case) -> None:
    small = small_form(case)
    events = small.workload()
    adds = [event for event in events if isinstance(event, Add)]
    assert 1 <= len(adds) <= MAX_REQUESTS
    assert small.deterministic
    assert max(add.max_tokens for add in adds) <= MAX_OUTPUTS
    least: list[Any] = [add.further.get("min_tokens", 0) for add in adds]
    assert max(least) < MAX_OUTPUTS
    assert [event.step for event in events] == sorted(event.step for event in events)
    assert events[0].step == 0
    assert events[-1].step <= LAST_EVENT
    whole = {event.prompt for event in case.workload() if isinstance(event, Add)}
    if "preemptions" in case.expects:
        assert all(any(one[: len(add.prompt)] == add.prompt for one in whole) for add in adds)
    else:
        assert {add.prompt for add in adds} <= whole
    assert small.expects <= case.expects <= small.expects | {"aborts"}
    assert small.workload() == events
    longest = max(len(add.prompt) + add.max_tokens for add in adds)
    assert longest <= small.engine.max_model_len


def test_most_cases_have_one() -> None:
    assert len(SMALL) >= 35
    assert all(case in SMALL for case in CASES.values() if case.deterministic and not case.apart)


def test_each_set_of_parameters_comes_first_then_what_is_aborted() -> None:
    events = (
        _add(0, "plain"),
        _add(0, "plain-too"),
        _add(1, "drawn", temperature=1.0),
        _add(20, "aborted"),
        _add(22, "asks", min_tokens=3),
        Abort(step=30, req_id="aborted"),
        _add(40, "last"),
    )
    small = small_form(_case(*events))
    assert _ids(small) == ["plain", "plain-too", "aborted", "asks"]
    aborts = [event for event in small.workload() if isinstance(event, Abort)]
    assert [abort.req_id for abort in aborts] == ["aborted"]
    assert [event.step for event in small.workload()] == [0, 0, 5, 5, 8]
    assert small.remark == REMARK


def test_an_abort_goes_with_its_own_use_of_an_id() -> None:
    events: list[Event] = []
    for turn in range(6):
        events += [_add(2 * turn, "again"), Abort(step=2 * turn + 1, req_id="again")]
    kinds = [type(event) for event in small_form(_case(*events)).workload()]
    assert kinds == [Add, Abort] * MAX_REQUESTS


def test_blocks_are_few_where_requests_are_preempted() -> None:
    case = _case(_add(0, "a"), _add(0, "b"), expects=frozenset({"preemptions"}))
    tight = small_form(case).engine
    assert tight.num_blocks == 1 + LEAST_BLOCKS
    assert tight.max_model_len == LEAST_BLOCKS * tight.block_size
    assert small_form(_case(_add(0, "a"))).engine == case.engine


def test_a_case_without_a_greedy_request_has_none() -> None:
    case = _case(_add(0, "drawn", temperature=0.7))
    assert not has_small_form(case)
    with pytest.raises(ValueError, match="made-up has no greedy request"):
        small_form(case)


def test_a_case_with_a_grammar_has_none() -> None:
    plain, bound = _add(0, "plain"), _add(0, "bound", structured_outputs=GRAMMAR)
    assert has_small_form(_case(plain))
    assert not has_small_form(_case(plain, bound))
    with pytest.raises(ValueError, match="has a grammar"):
        small_form(_case(plain, bound))


def test_a_small_case_stays_as_it_is() -> None:
    for case in SMALL:
        once = small_form(case)
        assert small_form(once) is once
        again = small_form(replace(once, remark=""))  # as a file keeps it
        assert again.workload() == once.workload()
        assert again.engine == once.engine


def test_v1_may_leave_the_right_values_of_a_small_case_and_need_not() -> None:
    departing = [small_form(case).departure for case in SMALL if case.departure is not None]
    assert departing
    assert not any(departure.is_certain for departure in departing if departure is not None)


def test_an_abort_is_expected_where_one_is_left() -> None:
    expects = frozenset({"aborts", "chunks"})
    kept, random = _add(0, "kept"), _add(0, "random", temperature=0.7)
    without = _case(kept, random, Abort(step=3, req_id="random"), expects=expects)
    assert small_form(without).expects == {"chunks"}
    aborted = _case(kept, Abort(step=3, req_id="kept"), expects=expects)
    assert small_form(aborted).expects == expects
