"""Cuts of a workload: each leaves a smaller one of the same kind."""

from mrv2_diff.case import Abort, Add
from mrv2_diff.shrinking import cuts


def _add(req_id: str, step: int = 0, **changes: object) -> Add:
    given: dict[str, object] = {"prompt": (7, 8, 9), "max_tokens": 6} | changes
    return Add(step=step, req_id=req_id, **given)  # type: ignore[arg-type]


def test_an_id_may_come_back_behind_its_abort_or_its_end() -> None:
    first, again = _add("a"), _add("a", step=3)
    assert not cuts.is_sound((first, again))
    assert cuts.is_sound((first, Abort(step=2, req_id="a"), again))
    assert cuts.is_sound((first, _add("a", step=8)))


def test_aborts_alone_are_no_workload() -> None:
    assert not cuts.is_sound((Abort(step=0, req_id="a"),))


def test_what_comes_after_a_step_is_left_out() -> None:
    events = (_add("a"), _add("b", step=2), Abort(step=5, req_id="a"), _add("c", step=9))
    kept = cuts.until(events, 4)
    assert [event.req_id for event in kept] == ["a", "b"]
    assert [event.max_tokens for event in kept if isinstance(event, Add)] == [5, 3]


def test_fewer_tokens_hold_stops_for_no_more() -> None:
    cut = cuts.with_tokens(4)(_add("a", options=(("min_tokens", 5), ("top_k", 9))))
    assert cut.max_tokens == 4
    assert cut.options == (("min_tokens", 4), ("top_k", 9))


def test_an_arrival_goes_with_its_own_aborts() -> None:
    a, b = _add("a"), _add("b")
    events = (a, b, Abort(step=1, req_id="a"), _add("a", step=2), Abort(step=3, req_id="a"))
    assert cuts.groups(events) == [[0, 2], [1], [3, 4]]
    assert cuts.only(events, [[0, 2]]) == (a, Abort(step=1, req_id="a"))


def test_a_wait_is_made_shorter() -> None:
    events = (_add("a", step=2), _add("b", step=7), _add("c", step=7))
    closed = list(cuts.without_gap(events, lambda wait: 0))
    assert [[event.step for event in one] for one in closed] == [[2, 2, 2], [0, 5, 5]]


def test_outputs_become_prompt() -> None:
    moved = cuts.earlier(99)(_add("a"))
    assert (moved.prompt, moved.max_tokens) == ((7, 8, 9, 1, 2, 3, 4, 5), 1)


def test_every_simpler_arrival_costs_less() -> None:
    add = _add("a", temperature=0.5, seed=1, logprobs=-1,
               options=(("bad_words", ((1, 2), (3,))), ("top_p", 0.5)))  # fmt: skip
    simpler = list(cuts.simpler(add))
    assert len(simpler) > 8
    assert all(cuts.cost((less,), 1) < cuts.cost((add,), 1) for less in simpler)


def test_steps_weigh_more_than_tokens_and_less_than_requests() -> None:
    one, long = _add("a"), _add("a", prompt=tuple(range(50)))
    assert cuts.cost((long,), 2) < cuts.cost((one,), 3)
    assert cuts.cost((long,), 9) < cuts.cost((one, _add("b")), 1)
