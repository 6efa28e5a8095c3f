"""Two runners' steps compared: what is named first, and what rounding excuses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2_diff.compare.steps import (
    OF_PROMPTS,
    Expectations,
    compare_ledgers,
    compare_prompt_logprobs,
    compare_step,
)
from mrv2_diff.compare.tally import CHAIN, Place, Tally
from mrv2_diff.observation import Observation, ObservedLogprobs
from mrv2_diff.verdict import Divergence

Observe = Callable[..., Observation]
Change = Callable[[Observation], dict[str, Any]]

BOUND = 4.0
FORCED, FREE = Place("forced", 5), Place("free", 5)
GREEDY = Expectations(greedy=frozenset("ab"), num_logprobs={"a": None, "b": None})
WITH_LOGPROBS = Expectations(greedy=frozenset("ab"), num_logprobs={"a": 3, "b": 3})
RANDOM = Expectations(greedy=frozenset(), num_logprobs={"a": 3, "b": 3})
SPACING = float(np.spacing(np.float32(6.0)))
"""At the largest logit of both rows."""


def _compare(
    reference: Observation,
    candidate: Observation,
    expected: Expectations = GREEDY,
    place: Place = FORCED,
) -> Tally:
    tally = Tally(dict.fromkeys(("logits", "processed_logits", "logprobs"), BOUND))
    compare_step(tally, place, expected, reference, candidate)
    return tally


def _first(tally: Tally) -> Divergence:
    assert tally.first is not None, "no difference was seen"
    return tally.first


def _with_logprobs(step: Observation, **changes: Any) -> Observation:
    assert step.logprobs is not None
    return dataclasses.replace(step, logprobs=dataclasses.replace(step.logprobs, **changes))


def _logprobs(step: Observation) -> ObservedLogprobs:
    assert step.logprobs is not None
    return step.logprobs


def _changed(array: Any, place: Any, value: Any) -> Any:
    copied = array.clone() if isinstance(array, torch.Tensor) else array.copy()
    copied[place] = value
    return copied


# Equal steps.


@pytest.mark.parametrize("expected", [WITH_LOGPROBS, RANDOM])
def test_equal_steps_agree_in_every_value(observe: Observe, expected: Expectations) -> None:
    tally = _compare(observe(num_logprobs=3), observe(num_logprobs=3), expected)
    assert tally.first is None
    counts = {value: tally.totals[value].compared for value in CHAIN if value in tally.totals}
    num_greedy = len(expected.greedy)
    at_least = {"input_ids": 4, "positions": 4, "seq_lens": 2, "slots": 8, "logits": 12,
                "processed_logits": 12, "logprobs": 8, "ranks": 2, "output": 2}  # fmt: skip
    assert counts.get("tokens", 0) == num_greedy
    assert {value: counts[value] for value in at_least if counts[value] < at_least[value]} == {}
    assert (tally.near_ties, tally.stopped, tally.not_finite) == (0, False, 0)


def test_a_runner_may_order_its_batch_as_it_likes(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    swap = [1, 0]
    logprobs = _logprobs(step)
    reordered = dataclasses.replace(
        step,
        req_ids=["b", "a"],
        query_lens=step.query_lens[swap],
        input_ids=step.input_ids[[1, 2, 3, 0]],
        positions=step.positions[[1, 2, 3, 0]],
        seq_lens=step.seq_lens[swap],
        slots=tuple(slots[[1, 2, 3, 0]] for slots in step.slots),
        draw_ids=["b", "a"],
        logits=step.logits[swap],
        processed_logits=step.processed_logits[swap],
        tokens=step.tokens[swap],
        drawn=step.drawn[swap],
        logprobs=ObservedLogprobs(
            token_ids=logprobs.token_ids[swap],
            values=logprobs.values[swap],
            ranks=logprobs.ranks[swap],
        ),
    )
    assert _compare(step, reordered, WITH_LOGPROBS).first is None
    assert _compare(reordered, step, WITH_LOGPROBS).first is None
    wrong = dataclasses.replace(reordered, seq_lens=step.seq_lens)
    first = _first(_compare(step, wrong, WITH_LOGPROBS))
    assert (first.value, first.req_id) == ("seq_lens", "a")


def test_a_step_without_draws_has_only_inputs(observe: Observe) -> None:
    none = np.empty(0, dtype=np.int64)
    chunk = observe(draw_ids=[], logits=[[0.0] * 6], tokens=[0])
    chunk = dataclasses.replace(
        chunk,
        logits=chunk.logits[:0],
        processed_logits=chunk.logits[:0],
        tokens=none,
        drawn=none,
    )
    tally = _compare(chunk, chunk)
    assert tally.first is None
    inputs = ["input_ids", "layout", "plan", "positions", "seq_lens", "slots"]
    assert sorted(tally.totals) == inputs


# One value that differs.

CHANGES: dict[str, Change] = {
    "plan": lambda step: {"req_ids": ["a", "c"]},
    "layout": lambda step: {"query_lens": np.array([2, 2])},
    "input_ids": lambda step: {"input_ids": np.add(step.input_ids, [0, 0, 1, 0])},
    "positions": lambda step: {"positions": np.add(step.positions, [0, 0, 1, 0])},
    "seq_lens": lambda step: {"seq_lens": np.add(step.seq_lens, [0, 1])},
    "slots": lambda step: {"slots": (step.slots[0], np.add(step.slots[1], [0, 0, 1, 0]))},
    "logits": lambda step: {"logits": _changed(step.logits, (1, 4), 5.5)},
    "processed_logits": lambda step: {
        "processed_logits": _changed(step.processed_logits, (1, 4), 5.5)
    },
    "logprobs": lambda step: {
        "logprobs": dataclasses.replace(
            _logprobs(step), values=_logprobs(step).values - np.array([[0, 0, 0, 0], [0, 0, 1, 0]])
        )
    },
    "ranks": lambda step: {
        "logprobs": dataclasses.replace(
            _logprobs(step), ranks=np.add(_logprobs(step).ranks, [0, 1])
        )
    },
    "output": lambda step: {"drawn": np.add(step.drawn, [0, 1])},
}
"""A change of request `b` in each value; `tokens` and `ledger` have tests of their own."""


@pytest.mark.parametrize("value", CHANGES)
def test_a_value_that_differs_alone_is_named(observe: Observe, value: str) -> None:
    step = observe(num_logprobs=3)
    tally = _compare(step, dataclasses.replace(step, **CHANGES[value](step)), WITH_LOGPROBS)
    first = _first(tally)
    assert first.value == value
    assert (first.mode, first.step) == ("forced", 5)
    if value not in ("plan", "output"):
        assert first.req_id == ("a" if value == "layout" else "b")
    assert [name for name, total in tally.totals.items() if total.differing] == [value]


def test_of_several_values_the_first_of_the_chain_is_named(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    token = np.add(step.tokens, [0, 2])
    known: dict[str, Change] = {**CHANGES, "tokens": lambda step: {"tokens": token, "drawn": token}}
    chain = [value for value in CHAIN if value not in ("right_values", "ledger")]
    assert sorted(known) == sorted(chain)
    changes: dict[str, Any] = {}
    for value in reversed(chain):  # one change more each time, ever earlier in the chain
        changes.update(known[value](step))
        candidate = dataclasses.replace(step, **changes)
        assert _first(_compare(step, candidate, WITH_LOGPROBS)).value == value


def test_a_greedy_token_that_differs_is_named(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    other = observe(num_logprobs=3, tokens=[2, 2])
    tally = _compare(step, other, WITH_LOGPROBS)
    first = _first(tally)
    assert (first.value, first.req_id, first.reference, first.candidate) == (
        "tokens",
        "b",
        "0",
        "2",
    )
    assert [name for name, total in tally.totals.items() if total.differing] == ["tokens"]
    assert tally.near_ties == 0


def test_a_token_that_was_drawn_and_not_returned_is_seen(observe: Observe) -> None:
    step = observe()
    lost = dataclasses.replace(step, tokens=np.add(step.tokens, [0, 1]))
    assert _first(_compare(step, lost)).value == "tokens"
    random = Expectations(greedy=frozenset(), num_logprobs={})
    assert _first(_compare(step, lost, random)).value == "output"


@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize("value", ["logits", "processed_logits"])
def test_nan_on_one_side_is_wrong(observe: Observe, value: str, side: str) -> None:
    step = observe()
    broken = dataclasses.replace(
        step, **{value: _changed(getattr(step, value), (0, 3), float("nan"))}
    )
    sides = (broken, step) if side == "reference" else (step, broken)
    first = _first(_compare(*sides))
    assert (first.value, first.req_id, first.index) == (value, "a", 3)


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_nan_logprob_on_one_side_is_wrong(observe: Observe, side: str) -> None:
    step = observe(num_logprobs=3)
    values = _changed(_logprobs(step).values, (0, 2), float("nan"))
    broken = _with_logprobs(step, values=values)
    sides = (broken, step) if side == "reference" else (step, broken)
    assert _first(_compare(*sides, WITH_LOGPROBS)).value == "logprobs"


def test_logits_that_are_nan_on_both_sides_are_counted(observe: Observe) -> None:
    step = observe()
    broken = dataclasses.replace(
        step,
        logits=_changed(step.logits, (0, 3), float("nan")),
        processed_logits=_changed(step.logits, (0, 3), float("nan")),
    )
    tally = _compare(broken, broken)
    assert tally.first is None
    assert tally.not_finite == 1


@pytest.mark.parametrize(
    ("where", "value", "structured", "count"),
    [
        ((0, slice(0, 2)), float("-inf"), "a", 0),
        ((0, slice(0, 2)), float("-inf"), "b", 2),
        ((0, 2), float("nan"), "a", 1),
        ((0, 2), float("inf"), "a", 1),
        # Nothing is left to draw.
        ((0, slice(0, 6)), float("-inf"), "a", 6),
    ],
)
def test_logits_of_a_grammars_request_may_be_cut_off(
    observe: Observe, where: Any, value: float, structured: str, count: int
) -> None:
    step = observe()
    broken = dataclasses.replace(step, logits=_changed(step.logits, where, value))
    expected = dataclasses.replace(GREEDY, structured=frozenset(structured))
    assert _compare(broken, broken, expected).not_finite == count


def test_processed_logits_may_be_cut_off_on_both_sides(observe: Observe) -> None:
    step = observe()
    cut = dataclasses.replace(
        step, processed_logits=_changed(step.logits, (0, slice(0, 2)), float("-inf"))
    )
    tally = _compare(cut, cut)
    assert tally.first is None
    assert tally.not_finite == 0
    assert _first(_compare(cut, step)).value == "processed_logits"


# Shapes and absences.


def test_another_vocabulary_is_another_shape(observe: Observe) -> None:
    step = observe()
    wide = torch.cat((step.logits, torch.full((2, 1), -9.0)), dim=1)
    first = _first(_compare(step, dataclasses.replace(step, logits=wide)))
    assert (first.value, first.policy) == ("logits", "same shape")


def test_another_number_of_tokens_is_another_shape(observe: Observe) -> None:
    step = observe()
    short = dataclasses.replace(
        step,
        query_lens=np.array([1, 2]),
        input_ids=step.input_ids[:3],
        positions=step.positions[:3],
        slots=tuple(slots[:3] for slots in step.slots),
    )
    first = _first(_compare(step, short))
    assert (first.value, first.req_id, first.candidate) == ("layout", "b", "2")


def test_another_number_of_kv_groups_is_another_shape(observe: Observe) -> None:
    step = observe()
    first = _first(_compare(step, dataclasses.replace(step, slots=step.slots[:1])))
    assert (first.value, first.policy) == ("slots", "same shape")


@pytest.mark.parametrize(("field", "value"), [("req_ids", "plan"), ("draw_ids", "output")])
def test_other_requests_are_named(observe: Observe, field: str, value: str) -> None:
    step = observe()
    others: dict[str, Any] = {field: ["a", "c"]}
    first = _first(_compare(step, dataclasses.replace(step, **others)))
    assert first.value == value
    assert "['a', 'c'] in place of ['a', 'b']" in first.candidate


# Near ties.


def _near_tie(observe: Observe, gap: float) -> tuple[Observation, Observation]:
    """Return steps whose request `a` draws tokens that lie `gap` spacings apart."""
    logits = [[0.0, 6.0, 6.0 - gap * SPACING, 1.0, 2.0, 4.0], [6.0, 4.0, 1.0, 3.0, 5.0, 2.0]]
    return observe(logits=logits, tokens=[1, 0]), observe(logits=logits, tokens=[2, 0])


@pytest.mark.parametrize("gap", [0, 1, BOUND])
@pytest.mark.parametrize("place", [FORCED, FREE])
def test_a_near_tie_is_counted_and_ends_a_free_pass(
    observe: Observe, gap: float, place: Place
) -> None:
    tally = _compare(*_near_tie(observe, gap), place=place)
    assert tally.first is None
    assert tally.near_ties == 1
    assert tally.stopped == (place is FREE)


@pytest.mark.parametrize("gap", [BOUND + 1, 1000])
@pytest.mark.parametrize("place", [FORCED, FREE])
def test_tokens_further_apart_than_the_bound_are_no_near_tie(
    observe: Observe, gap: float, place: Place
) -> None:
    tally = _compare(*_near_tie(observe, gap), place=place)
    first = _first(tally)
    assert (first.value, first.req_id, first.mode) == ("tokens", "a", place.mode)
    assert (tally.near_ties, tally.stopped) == (0, False)


def test_a_near_tie_beside_a_wrong_token_does_not_hide_it(observe: Observe) -> None:
    reference, tied = _near_tie(observe, 1)
    wrong = dataclasses.replace(
        tied, tokens=np.add(tied.tokens, [0, 2]), drawn=np.add(tied.drawn, [0, 2])
    )
    tally = _compare(reference, wrong)
    assert _first(tally).req_id == "b"
    assert tally.near_ties == 1


def test_tokens_of_random_requests_may_differ(observe: Observe) -> None:
    half = Expectations(greedy=frozenset("b"), num_logprobs={})
    step = observe()
    assert _compare(step, observe(tokens=[0, 0]), half).first is None
    assert _first(_compare(step, observe(tokens=[0, 1]), half)).req_id == "b"


# Logprobs.


def test_a_random_requests_logprobs_are_those_of_its_own_token(observe: Observe) -> None:
    reference, candidate = observe(num_logprobs=3), observe(num_logprobs=3, tokens=[4, 5])
    tally = _compare(reference, candidate, RANDOM)
    assert tally.first is None
    assert tally.totals["ranks"].compared == 2
    theirs = _logprobs(candidate)
    for field, broken in (
        ("values", _changed(theirs.values, (1, 0), _logprobs(reference).values[1, 0])),
        ("ranks", _changed(theirs.ranks, 1, _logprobs(reference).ranks[1])),
    ):
        wrong = _with_logprobs(candidate, **{field: broken})
        first = _first(_compare(reference, wrong, RANDOM))
        assert first.value == {"values": "logprobs", "ranks": "ranks"}[field]
        assert first.req_id == "b"


def test_the_drawn_tokens_logprob_carries_its_id(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    ids = _changed(_logprobs(step).token_ids, (0, 0), 5)
    assert _first(_compare(step, _with_logprobs(step, token_ids=ids), RANDOM)).value == "output"


TIED = ((5.0, 3.0, 3.0, 3.0, 1.0, 0.0), (6.0, 4.0, 1.0, 3.0, 5.0, 2.0))
"""Three tokens of `a` share the second place."""


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 2, 3], [0, 3, 1]])
def test_top_tokens_may_be_permuted_within_ties(observe: Observe, ids: list[int]) -> None:
    reference, candidate = (observe(logits=TIED, num_logprobs=3) for _ in range(2))
    listed = _changed(_logprobs(candidate).token_ids, (0, slice(1, 4)), ids)
    candidate = _with_logprobs(candidate, token_ids=listed)
    assert _compare(reference, candidate, WITH_LOGPROBS).first is None


@pytest.mark.parametrize("ids", [[0, 1, 4], [5, 1, 2], [1, 0, 2]])
def test_a_top_token_beside_a_logprob_that_is_not_its_own_is_wrong(
    observe: Observe, ids: list[int]
) -> None:
    step = observe(logits=TIED, num_logprobs=3)
    listed = _changed(_logprobs(step).token_ids, (0, slice(1, 4)), ids)
    wrong = _with_logprobs(step, token_ids=listed)
    first = _first(_compare(step, wrong, WITH_LOGPROBS))
    assert (first.value, first.req_id) == ("logprobs", "a")


def test_a_token_listed_twice_is_wrong(observe: Observe) -> None:
    step = observe(logits=TIED, num_logprobs=3)
    listed = _changed(_logprobs(step).token_ids, (0, slice(1, 4)), [0, 1, 1])
    assert _first(_compare(step, _with_logprobs(step, token_ids=listed), WITH_LOGPROBS)).value == (
        "output"
    )


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_logprobs_on_one_side_alone_are_wrong(observe: Observe, side: str) -> None:
    having, lacking = observe(num_logprobs=3), observe()
    sides = (lacking, having) if side == "reference" else (having, lacking)
    tally = _compare(*sides, WITH_LOGPROBS)
    assert _first(tally).value == "output"
    assert "logprobs" not in tally.totals


def test_fewer_logprobs_than_asked_for_are_wrong(observe: Observe) -> None:
    tally = _compare(observe(num_logprobs=3), observe(num_logprobs=2), WITH_LOGPROBS)
    first = _first(tally)
    assert (first.value, first.policy) == ("logprobs", "same shape")


def test_logprobs_that_a_request_did_not_ask_for_do_not_count(observe: Observe) -> None:
    one = Expectations(greedy=frozenset("ab"), num_logprobs={"a": 1, "b": None})
    step = observe(num_logprobs=3)
    beyond = _changed(_logprobs(step).values, (0, slice(2, 4)), 9.0)
    beyond[1] = 9.0
    assert _compare(step, _with_logprobs(step, values=beyond), one).first is None
    within = _changed(_logprobs(step).values, (0, 1), 9.0)
    assert _first(_compare(step, _with_logprobs(step, values=within), one)).value == "logprobs"


def test_the_whole_vocabulary_is_compared_where_all_were_asked_for(observe: Observe) -> None:
    every = Expectations(greedy=frozenset("ab"), num_logprobs={"a": -1, "b": -1})
    step = observe(num_logprobs=6)
    assert _compare(step, step, every).first is None
    last = _changed(_logprobs(step).values, (1, 6), 9.0)
    assert _first(_compare(step, _with_logprobs(step, values=last), every)).value == "logprobs"


def test_a_rank_may_move_only_as_far_as_rounding_moves_its_logit(observe: Observe) -> None:
    logits = [[6.0, 6.0 - SPACING, 3.0, 1.0, 0.0, 2.0], [6.0, 4.0, 1.0, 3.0, 5.0, 2.0]]
    rounded = [[6.0 - 2 * SPACING, *logits[0][1:]], logits[1]]
    reference = observe(logits=logits, tokens=[0, 0], num_logprobs=3)
    candidate = observe(logits=rounded, tokens=[0, 0], num_logprobs=3)
    assert _logprobs(reference).ranks.tolist() == [1, 1]
    assert _logprobs(candidate).ranks.tolist() == [2, 1]
    assert _compare(reference, candidate, WITH_LOGPROBS).first is None
    third = _with_logprobs(candidate, ranks=np.array([3, 1]))
    assert _first(_compare(reference, third, WITH_LOGPROBS)).value == "ranks"
    same_logits = _with_logprobs(reference, ranks=np.array([2, 1]))
    assert _first(_compare(reference, same_logits, WITH_LOGPROBS)).value == "ranks"


# Ledgers.


def test_ledgers_are_compared_fact_by_fact() -> None:
    ours: dict[str, dict[str, object]] = {"a": {"prompt_len": 3, "temperature": 0.0}}
    tally = Tally(None)
    compare_ledgers(tally, FORCED, ours, {"a": dict(ours["a"])})
    assert tally.first is None
    assert tally.totals["ledger"].compared == 2
    for theirs in ({}, {"a": {**ours["a"], "prompt_len": 4}}, {**ours, "b": ours["a"]}):
        tally = Tally(None)
        compare_ledgers(tally, FORCED, ours, theirs)
        assert _first(tally).value == "ledger"


def test_a_token_far_above_the_references_own_is_no_near_tie(observe: Observe) -> None:
    reference, candidate = observe(tokens=[0, 0]), observe(tokens=[2, 0])
    assert _first(_compare(reference, candidate)).value == "tokens"


@pytest.mark.parametrize("outside", [-1, 6])
def test_a_top_token_outside_the_vocabulary_is_wrong(observe: Observe, outside: int) -> None:
    # Its neighbour inside has the very logprob that is listed.
    logits = [[5.0, 3.0, 2.0, 1.0, 0.0, 5.0], [6.0, 4.0, 1.0, 3.0, 5.0, 2.0]]
    step = observe(logits=logits, num_logprobs=3)
    ids = _logprobs(step).token_ids
    neighbour = min(max(outside, 0), 5)
    listed = np.where((ids == neighbour) & (np.arange(4) > 0) & [[True], [False]], outside, ids)
    assert (listed != ids).sum() == 1
    wrong = _with_logprobs(step, token_ids=listed)
    assert _first(_compare(step, wrong, WITH_LOGPROBS)).value in ("logprobs", "output")


@pytest.mark.parametrize("outside", [-1, 6, 77])
@pytest.mark.parametrize("expected", [WITH_LOGPROBS, RANDOM])
def test_a_token_outside_the_vocabulary_is_wrong(
    observe: Observe, outside: int, expected: Expectations
) -> None:
    reference, candidate = observe(tokens=[0, 0]), observe(tokens=[outside, 0])
    first = _first(_compare(reference, candidate, expected))
    assert first.value == "tokens"
    assert str(outside) in first.candidate


def test_a_random_draw_of_what_the_runner_itself_had_cut_is_wrong(observe: Observe) -> None:
    drawn, other = observe(tokens=[0, 0]), observe(tokens=[1, 0])
    processed = _changed(drawn.processed_logits, (0, 0), -np.inf)
    cut = dataclasses.replace(drawn, processed_logits=processed)
    right = dataclasses.replace(other, processed_logits=processed)
    first = _first(_compare(right, cut, RANDOM))
    assert (first.value, first.candidate) == ("tokens", "a drew token 0, which is cut")
    assert _compare(right, right, RANDOM).first is None


def test_where_nothing_is_left_any_token_may_be_drawn(observe: Observe) -> None:
    step = observe(tokens=[0, 0])
    nothing = torch.full_like(step.processed_logits, -torch.inf)
    empty = dataclasses.replace(step, processed_logits=nothing)
    assert _compare(empty, empty, RANDOM).first is None


# Prompt logprobs.

PROMPT = ObservedLogprobs(
    token_ids=np.array([[5, 1, 2], [3, 3, 0], [0, 4, 1]]),
    values=np.array([[-4, -1, -2], [-0.5, -0.5, -3], [-6, -1.25, -1.5]], dtype=np.float32),
    ranks=np.array([4, 1, 6]),
)


def _of_prompts(candidate: dict[str, ObservedLogprobs]) -> Tally:
    tally = Tally({OF_PROMPTS: BOUND})
    compare_prompt_logprobs(tally, FORCED, {"a": PROMPT}, candidate)
    return tally


def test_equal_prompt_logprobs_agree() -> None:
    tally = _of_prompts({"a": PROMPT})
    assert tally.first is None
    assert tally.totals[OF_PROMPTS].compared == 9 + 9 + 3


def test_the_order_of_tokens_that_are_as_good_as_equal_is_open() -> None:
    values = _changed(PROMPT.values, (2, 2), PROMPT.values[2, 1])
    swapped = dataclasses.replace(PROMPT, values=values)
    other = dataclasses.replace(swapped, token_ids=_changed(PROMPT.token_ids, 2, [0, 1, 4]))
    tally = Tally({OF_PROMPTS: BOUND})
    compare_prompt_logprobs(tally, FORCED, {"a": swapped}, {"a": other})
    assert tally.first is None


@pytest.mark.parametrize(
    "changes",
    [
        {"values": _changed(PROMPT.values, (1, 2), -3.01)},
        {"values": _changed(PROMPT.values, (1, 0), float("nan"))},
        {"ranks": _changed(PROMPT.ranks, 1, 2)},
        {"token_ids": _changed(PROMPT.token_ids, (0, 0), 6)},
        {"token_ids": _changed(PROMPT.token_ids, (0, 1), 7)},
        {"token_ids": _changed(PROMPT.token_ids, 0, [5, 2, 1])},
        {"token_ids": _changed(PROMPT.token_ids, (0, 2), 1)},
    ],
)
def test_a_wrong_prompt_logprob_is_seen(changes: dict[str, Any]) -> None:
    tally = _of_prompts({"a": dataclasses.replace(PROMPT, **changes)})
    assert _first(tally).value == OF_PROMPTS


def test_prompt_logprobs_of_another_request_or_size_are_seen() -> None:
    assert _first(_of_prompts({})).value == OF_PROMPTS
    assert _first(_of_prompts({"b": PROMPT})).value == OF_PROMPTS
    short = dataclasses.replace(
        PROMPT, token_ids=PROMPT.token_ids[1:], values=PROMPT.values[1:], ranks=PROMPT.ranks[1:]
    )
    assert _first(_of_prompts({"a": short})).value == OF_PROMPTS


# Hidden states by layer.


def _layers(step: Observation, *values: float) -> Observation:
    num_tokens = len(step.input_ids)
    layers = tuple(torch.full((num_tokens, 3), value) for value in values)
    return dataclasses.replace(step, layers=layers)


def _compare_with_layers(reference: Observation, candidate: Observation) -> Tally:
    floats = ("logits", "processed_logits", "hidden_states.0", "hidden_states.1")
    tally = Tally(dict.fromkeys(floats, 1.0))
    compare_step(tally, Place("forced", 5), GREEDY, reference, candidate)
    return tally


def test_the_first_layer_that_differs_is_named_before_the_logits(observe: Observe) -> None:
    step = _layers(observe(), 1.0, 2.0)
    wrong = dataclasses.replace(
        step,
        layers=(step.layers[0], _changed(step.layers[1], (3, 2), 2.5)),
        logits=_changed(step.logits, (1, 4), 5.5),
    )
    assert _compare_with_layers(step, step).first is None
    first = _first(_compare_with_layers(step, wrong))
    assert (first.value, first.req_id, first.index) == ("hidden_states.1", "b", 2)
    assert (first.reference, first.candidate) == ("2.0", "2.5")
    assert len(first.around) == 3


def test_layers_are_compared_where_both_sides_have_them(observe: Observe) -> None:
    step = observe()
    assert _compare_with_layers(step, _layers(step, 1.0, 2.0)).first is None
    first = _first(_compare_with_layers(_layers(step, 1.0, 2.0), _layers(step, 1.0)))
    assert (first.value, first.candidate) == ("hidden_states", "1 layers in place of 2")


# Blocks that attention reads.


def test_a_block_that_is_only_read_is_compared_behind_the_slots(observe: Observe) -> None:
    blocks = {"a": (np.array([4, 5]), np.array([7])), "b": (np.array([8]), np.array([9]))}
    step = observe(blocks=blocks)
    assert _compare(step, step).totals["block_tables"].compared == 5
    wrong = dataclasses.replace(step, blocks={**blocks, "b": (np.array([8]), np.array([3]))})
    first = _first(_compare(step, wrong))
    assert (first.value, first.req_id, first.index) == ("block_tables", "b", 1)
    later = dataclasses.replace(wrong, logits=_changed(step.logits, (1, 4), 5.5))
    assert _first(_compare(step, later)).value == "block_tables"
    assert "block_tables" not in _compare(step, observe()).totals
