"""From what the passes of a case found to its verdict."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrv2_diff.case import Abort, Add, Case, Departure, EngineSpec
from mrv2_diff.compare.right import RightRows
from mrv2_diff.compare.tally import CHAIN, Place, Tally
from mrv2_diff.judge import (
    MAX_FLOOR,
    Ledgers,
    Outcome,
    add_ledgers,
    add_step,
    expectations,
    floor_fault,
    judge,
    right_values_of,
)
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.observation import Observation
from mrv2_diff.referee import Ruling
from mrv2_diff.verdict import Verdict

Observe = Callable[..., Observation]

EVENTS = (
    Add(step=0, req_id="a", prompt=(1, 2), max_tokens=3, logprobs=3),
    Add(step=0, req_id="b", prompt=(3,), max_tokens=3, temperature=1.0, seed=1),
)
CASE = Case(
    id="made-up",
    area="nothing",
    feature="nothing",
    title="two requests",
    engine=EngineSpec(model=ModelSpec()),
    workload=lambda: EVENTS,
    expects=frozenset({"preemptions"}),
)
EXPECTED = expectations(EVENTS)
LEDGERS: Ledgers = ({"a": {"prompt_len": 2}}, {"a": {"prompt_len": 2}})
CRASH = "Traceback (most recent call last):\n  somewhere\nIndexError: out of range\n"
SPACING_AT_6 = 2.0**-21


def _outcome(**changes: Any) -> Outcome:
    floats = ("logits", "processed_logits", "right_values", "logprobs")
    bounds = dict.fromkeys(floats, 4.0)
    return dataclasses.replace(Outcome(Tally(bounds), events={"preemptions": 1}), **changes)


def _right(outcome: Outcome, case: Case = CASE) -> RightRows:
    """Return the right values of requests that have drawn nothing yet."""
    right = right_values_of(case, outcome.effects)
    assert right is not None
    right.arrive("a", (1, 2), {5})
    right.arrive("b", (3,), {5})
    return right


def _run(
    outcome: Outcome,
    reference: Observation | None,
    candidate: Observation | None,
    mode: str = "forced",
    num_steps: int = 3,
    *,
    plain: bool = False,
) -> Outcome:
    """Add a pass of equal steps; a plain one has no parameter and no logprobs to be right."""
    outcome.modes.append(mode)
    right = None if plain else _right(outcome)
    for step in range(num_steps):
        add_step(outcome, Place(mode, step), EXPECTED, reference, candidate, right)
        add_ledgers(outcome, Place(mode, step), LEDGERS)
    return outcome


def _judge(outcome: Outcome) -> tuple[Verdict, str]:
    verdict, summary = judge(CASE, outcome)
    assert "\n" not in summary
    return verdict, summary


def test_where_all_is_equal_the_case_matches(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.MATCH
    assert sorted(outcome.tally.totals) == sorted(CHAIN)
    assert summary.endswith("values agree over 6 request-steps")
    assert outcome.draws_compared == {"forced": 6}
    assert outcome.logit_diffs == [0.0] * 3


# Nothing, or not enough, was compared.


def test_nothing_compared_is_missing() -> None:
    verdict, summary = _judge(_outcome())
    assert verdict is Verdict.MISSING
    for value in CHAIN:
        assert value in summary


@pytest.mark.parametrize("value", CHAIN)
def test_any_value_that_was_never_compared_is_missing(observe: Observe, value: str) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step)
    outcome.tally.totals[value].compared = 0
    assert _judge(outcome) == (Verdict.MISSING, f"nothing was compared of: {value}")
    del outcome.tally.totals[value]
    assert _judge(outcome)[0] is Verdict.MISSING


def test_values_that_no_request_has_are_not_missed(observe: Observe) -> None:
    step = observe()
    plain = dataclasses.replace(
        CASE, workload=lambda: (dataclasses.replace(EVENTS[1], req_id="a"), EVENTS[1])
    )
    outcome = _run(_outcome(), step, step, plain=True)
    for value in ("tokens", "logprobs", "ranks"):
        outcome.tally.totals.pop(value, None)
    assert judge(plain, outcome)[0] is Verdict.MATCH


def test_an_event_that_did_not_happen_is_missing(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    for events in ({}, {"preemptions": 0, "chunks": 4}):
        outcome = _run(_outcome(events=events), step, step)
        verdict, summary = _judge(outcome)
        assert verdict is Verdict.MISSING
        assert summary.endswith("events of kind preemptions")


def test_a_pass_that_compared_no_draw_is_missing(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_run(_outcome(), step, step), step, step, mode="free", num_steps=0)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.MISSING
    assert summary.endswith("the pass 'free'")


@pytest.mark.parametrize("absent", ["reference", "candidate"])
def test_a_step_that_one_side_did_not_run_is_missing(observe: Observe, absent: str) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step)
    sides = (None, step) if absent == "reference" else (step, None)
    add_step(outcome, Place("forced", 7), EXPECTED, *sides)
    outcome = _run(outcome, step, step)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.MISSING
    who = "the candidate" if absent == "reference" else "V1"
    assert summary == f"step 7 (forced): output: only {who} ran this step"


def test_a_step_that_neither_side_ran_is_nothing(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step)
    add_step(outcome, Place("forced", 7), EXPECTED, None, None)
    assert _judge(outcome)[0] is Verdict.MATCH
    assert len(outcome.logit_diffs) == 3


# What differs.


def test_a_value_that_differs_in_one_step_of_many_is_wrong(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step)
    wrong = dataclasses.replace(step, slots=(step.slots[0], step.slots[1] + 1))
    add_step(outcome, Place("free", 4), EXPECTED, step, wrong)
    outcome = _run(outcome, step, step)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.WRONG_VALUE
    assert summary == "step 4 (free): slots of a at 1 is 8, V1 has 7"


def test_another_shape_is_a_wrong_shape(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, dataclasses.replace(step, slots=step.slots[:1]))
    assert _judge(outcome)[0] is Verdict.WRONG_SHAPE


def test_a_ledger_that_differs_is_wrong(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step)
    add_ledgers(outcome, Place("forced", 4), ({"a": {"prompt_len": 2}}, {"a": {"prompt_len": 3}}))
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.WRONG_VALUE
    assert summary.startswith("step 4 (forced): ledger: ")


def test_logprobs_on_one_side_do_not_pass(observe: Observe) -> None:
    for sides in ((observe(num_logprobs=3), observe()), (observe(), observe(num_logprobs=3))):
        assert not _judge(_run(_outcome(), *sides))[0].passes


def test_logprobs_on_neither_side_are_missing(observe: Observe) -> None:
    verdict, summary = _judge(_run(_outcome(), observe(), observe()))
    assert verdict is Verdict.MISSING
    assert summary.endswith("logprobs of a: there are none")


# Crashes.


def test_a_crash_is_told_by_its_last_line(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(crash=CRASH), step, step)
    assert _judge(outcome) == (
        Verdict.CRASHED,
        "the candidate failed: IndexError: out of range",
    )
    assert _judge(_outcome(crash=CRASH))[0] is Verdict.CRASHED, "before anything was compared"


def test_a_crash_after_a_divergence_is_its_consequence(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    wrong = dataclasses.replace(step, positions=step.positions + 1)
    outcome = _run(_outcome(crash=CRASH), step, wrong)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.WRONG_VALUE
    assert "positions" in summary


# Near ties.


def _near_tie(observe: Observe, gap: float) -> tuple[Observation, Observation]:
    """Return steps whose greedy request draws tokens that lie `gap` spacings apart."""
    logits = [[0.0, 6.0, 6.0 - gap * SPACING_AT_6, 1.0, 2.0, 4.0], [6.0, 4.0, 1.0, 3.0, 5.0, 2.0]]
    return (
        observe(logits=logits, tokens=[1, 0], num_logprobs=3),
        observe(logits=logits, tokens=[2, 0], num_logprobs=3),
    )


def test_near_ties_in_a_forced_pass_are_counted_one_by_one(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step, num_steps=300)
    outcome = _run(outcome, *_near_tie(observe, 3))
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.NEAR_TIE
    assert summary == "3 of 303 tokens differ where two logits lie within the floor"
    assert outcome.request_steps == 606


def test_more_near_ties_than_one_in_a_hundred_are_no_accident(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step, num_steps=296)
    outcome = _run(outcome, *_near_tie(observe, 3))
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.WRONG_VALUE
    assert summary.startswith("3 of 299 tokens differ")


def test_a_near_tie_ends_the_comparison_of_a_free_pass(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), step, step, num_steps=100)
    outcome = _run(outcome, *_near_tie(observe, 3), mode="free", num_steps=1)
    apart = dataclasses.replace(step, input_ids=step.input_ids + 1)
    add_step(outcome, Place("free", 1), EXPECTED, step, apart)
    add_step(outcome, Place("free", 2), EXPECTED, step, None)
    add_ledgers(outcome, Place("free", 1), ({"a": {}}, {}))
    assert _judge(outcome)[0] is Verdict.NEAR_TIE
    assert outcome.draws_compared == {"forced": 200, "free": 2}


@pytest.mark.parametrize("mode", ["forced", "free"])
def test_a_token_outside_the_bound_is_wrong_in_any_pass(observe: Observe, mode: str) -> None:
    outcome = _run(_outcome(), *_near_tie(observe, 5), mode=mode)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.WRONG_VALUE
    assert summary == f"step 0 ({mode}): tokens of a at 0 is 2, V1 has 1"


def test_a_divergence_after_a_near_tie_is_wrong(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    outcome = _run(_outcome(), *_near_tie(observe, 3))
    outcome = _run(outcome, step, dataclasses.replace(step, seq_lens=step.seq_lens + 1))
    assert _judge(outcome)[0] is Verdict.WRONG_VALUE


def test_a_near_tie_does_not_excuse_what_was_never_compared(observe: Observe) -> None:
    outcome = _run(_outcome(events={}), *_near_tie(observe, 3))
    assert _judge(outcome)[0] is Verdict.MISSING


# Noise.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_on_both_sides_say_nothing(
    observe: Observe, value: float
) -> None:
    step = observe(logits=[[value] * 6, [6.0, 4.0, 1.0, 3.0, 5.0, 2.0]], tokens=[0, 0])
    outcome = _run(_outcome(), step, step)
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.INCONCLUSIVE
    assert summary == "18 of V1's logits are not finite"


def test_logits_that_are_nan_on_one_side_are_wrong(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    broken = dataclasses.replace(step, logits=step.logits * float("nan"))
    assert _judge(_run(_outcome(), step, broken))[0] is Verdict.WRONG_VALUE


def test_a_floor_that_is_too_high_says_nothing_of_floats(observe: Observe) -> None:
    fault = floor_fault({"logits": float("inf")}, "float32")
    step = observe(num_logprobs=3)
    far = dataclasses.replace(step, logits=step.logits + 1.0)
    for candidate in (step, far):
        outcome = _run(_outcome(inconclusive=fault), step, candidate)
        assert _judge(outcome) == (Verdict.INCONCLUSIVE, fault)


def test_a_floor_that_is_too_high_excuses_no_integer_and_no_crash(observe: Observe) -> None:
    fault = floor_fault({"logits": float("inf")}, "float32")
    step = observe(num_logprobs=3)
    wrong = dataclasses.replace(step, positions=step.positions + 1)
    assert _judge(_run(_outcome(inconclusive=fault), step, wrong))[0] is Verdict.WRONG_VALUE
    crashed = _run(_outcome(inconclusive=fault, crash="ValueError: no"), step, step)
    assert _judge(crashed)[0] is Verdict.CRASHED


@pytest.mark.parametrize("dtype", MAX_FLOOR)
@pytest.mark.parametrize("value", ["logits", "processed_logits", "logprobs"])
def test_a_floor_has_a_bound_in_every_value(dtype: str, value: str) -> None:
    bits = {"float32": 0, "tf32": 13, "bfloat16": 16, "float16": 13}[dtype]
    limit = MAX_FLOOR[dtype] * 2**bits
    floor = {"logits": 1.0, "processed_logits": 0.0, "logprobs": 2.0}
    assert floor_fault({**floor, value: limit}, dtype) is None
    for high in (limit * 1.01, float("inf"), float("nan")):
        fault = floor_fault({**floor, value: high}, dtype)
        assert fault is not None
        assert f"in {value}; " in fault


def test_a_dtype_without_a_bound_is_named() -> None:
    fault = floor_fault({"logits": 0.0}, "float64")
    assert fault is not None
    assert "float64" in fault


# CUDA graphs.


@pytest.mark.parametrize("idle", ["v1", "mrv2"])
def test_where_a_runner_replayed_nothing_the_case_does_not_pass(
    observe: Observe, idle: str
) -> None:
    step = observe(num_logprobs=3)
    modes = {name: {"eager": 4, "decode": 9} for name in ("v1", "mrv2")}
    outcome = _run(_outcome(graphs="FULL_DECODE_ONLY", steps_by_mode=modes), step, step)
    assert _judge(outcome)[0] is Verdict.MATCH
    del modes[idle]["decode"]
    verdict, summary = _judge(outcome)
    assert verdict is Verdict.MISSING
    assert f"decodes that {idle} replayed from graphs (its steps: {{'eager': 4}})" in summary


def test_where_nobody_says_how_steps_ran_the_case_does_not_pass(observe: Observe) -> None:
    step = observe(num_logprobs=3)
    verdict, summary = _judge(_run(_outcome(graphs="FULL_DECODE_ONLY"), step, step))
    assert verdict is Verdict.MISSING
    assert summary == "nothing was compared of: decodes replayed from graphs"


# What a workload says.


def test_a_workload_says_who_is_greedy_and_who_asked_for_logprobs() -> None:
    expected = expectations((*EVENTS, Abort(step=2, req_id="a")))
    assert expected.greedy == {"a"}
    assert expected.num_logprobs == {"a": 3, "b": None}


# Right values.


def _drawn_with_top_k(**changes: Any) -> Case:
    """Return a case whose random request keeps the three likeliest tokens."""
    cut = dataclasses.replace(EVENTS[1], options=(("top_k", 3),))
    return dataclasses.replace(CASE, workload=lambda: (EVENTS[0], cut), **changes)


def _cut(step: Observation, least: float) -> Observation:
    """Return a step whose second row is cut below a logit."""
    processed = step.processed_logits.clone()
    processed[1][processed[1] < least] = -float("inf")
    return dataclasses.replace(step, processed_logits=processed)


def _steps(case: Case, reference: Observation, candidate: Observation) -> tuple[Verdict, str]:
    outcome = _outcome()
    outcome.modes.append("forced")
    right = _right(outcome, case)
    for step in range(3):
        add_step(outcome, Place("forced", step), EXPECTED, reference, candidate, right)
        add_ledgers(outcome, Place("forced", step), LEDGERS)
    return judge(case, outcome)


DEPARTURES = [Verdict.REFERENCE_WRONG, Verdict.KNOWN_DIFFERENCE]


def _departing(verdict: Any) -> Case:
    departure = Departure(value="processed_logits", verdict=verdict, why="as the record says")
    return _drawn_with_top_k(departure=departure)


def test_a_parameter_that_both_apply_matches(observe: Observe) -> None:
    step = _cut(observe(num_logprobs=3), 4.0)
    assert _steps(_drawn_with_top_k(), step, step)[0] is Verdict.MATCH


def test_a_fault_that_both_share_is_seen(observe: Observe) -> None:
    step = _cut(observe(num_logprobs=3), 5.0)  # two tokens are left in place of three
    verdict, summary = _steps(_drawn_with_top_k(), step, step)
    assert verdict is Verdict.WRONG_VALUE
    assert "right_values of b at 1 is -inf, right is 4.0" in summary


@pytest.mark.parametrize("both", [True, False])
def test_a_parameter_without_effect_was_ignored(observe: Observe, both: bool) -> None:
    step = observe(num_logprobs=3)
    reference = step if both else _cut(step, 4.0)
    verdict, summary = _steps(_drawn_with_top_k(), reference, step)
    assert verdict is Verdict.IGNORED
    assert "top_k in the candidate" in summary
    assert ("top_k in V1" in summary) == both


def test_a_parameter_that_could_change_nothing_proves_nothing(observe: Observe) -> None:
    plain = dataclasses.replace(EVENTS[1], options=(("min_tokens", 0), ("logit_bias", ((1, 0.0),))))
    case = dataclasses.replace(CASE, workload=lambda: (EVENTS[0], plain))
    verdict, summary = _steps(case, observe(num_logprobs=3), observe(num_logprobs=3))
    assert verdict is Verdict.MISSING
    assert "logit_bias" in summary


@pytest.mark.parametrize("verdict", DEPARTURES)
def test_only_a_reference_that_is_off_beside_a_right_candidate_departs(
    observe: Observe, verdict: Verdict
) -> None:
    step = observe(num_logprobs=3)
    right, wrong = _cut(step, 4.0), _cut(step, 5.0)
    found, summary = _steps(_departing(verdict), wrong, right)
    assert found is verdict
    assert summary.startswith("in 3 rows of processed_logits only V1 is off")
    assert _steps(_departing(verdict), right, right)[0] is Verdict.MISSING
    assert _steps(_departing(verdict), wrong, wrong)[0] is Verdict.WRONG_VALUE
    assert _steps(_departing(verdict), right, wrong)[0] is Verdict.WRONG_VALUE


@pytest.mark.parametrize("verdict", DEPARTURES)
def test_a_departure_excuses_no_other_row(observe: Observe, verdict: Verdict) -> None:
    step = observe(num_logprobs=3)
    candidate = _cut(step, 4.0)
    candidate.processed_logits[0, 0] += 1.0
    assert _steps(_departing(verdict), _cut(step, 5.0), candidate)[0] is Verdict.WRONG_VALUE


# The referee.


def _ruling(reference_wrong: int, candidate_wrong: int) -> Ruling:
    num_rows = reference_wrong + candidate_wrong
    return Ruling(
        num_disputed=num_rows,
        num_ruled=num_rows,
        reference_wrong=reference_wrong,
        candidate_wrong=candidate_wrong,
        both_wrong=0,
        nearer={"reference": candidate_wrong, "candidate": reference_wrong},
        distances=(900.0, 2.0),
        limit=20.0,
        dtype="float64",
    )


@pytest.mark.parametrize(
    ("ruling", "verdict"),
    [
        (_ruling(2, 0), Verdict.REFERENCE_WRONG),
        (_ruling(2, 1), Verdict.WRONG_VALUE),
        (_ruling(0, 2), Verdict.WRONG_VALUE),
    ],
)
def test_the_referee_must_clear_the_candidate_in_every_row(
    observe: Observe, ruling: Ruling, verdict: Verdict
) -> None:
    reference = observe(num_logprobs=3)
    candidate = observe(num_logprobs=3, logits=(reference.logits + 1.0).tolist())
    outcome = _run(_outcome(ruling=ruling), reference, candidate)
    found, summary = _judge(outcome)
    assert found is verdict
    assert "the referee (float64) is nearer" in summary


def test_the_referee_excuses_no_other_value(observe: Observe) -> None:
    reference = observe(num_logprobs=3)
    candidate = dataclasses.replace(reference, positions=reference.positions + 1)
    outcome = _run(_outcome(ruling=_ruling(2, 0)), reference, candidate)
    assert _judge(outcome)[0] is Verdict.WRONG_VALUE


def _with_a_wrong_layer(outcome: Outcome, observe: Observe) -> Outcome:
    assert outcome.tally.bounds is not None
    outcome.tally.bounds["hidden_states.0"] = 4.0
    layer = torch.ones(4, 3)
    reference = observe(num_logprobs=3, layers=(layer,))
    candidate = observe(
        num_logprobs=3, layers=(layer + 1.0,), logits=(reference.logits + 1.0).tolist()
    )
    return _run(outcome, reference, candidate)


def test_hidden_states_are_judged_like_the_logits_that_they_make(observe: Observe) -> None:
    outcome = _with_a_wrong_layer(_outcome(ruling=_ruling(2, 0)), observe)
    assert outcome.tally.first is not None
    assert outcome.tally.first.value == "hidden_states.0"
    assert _judge(outcome)[0] is Verdict.REFERENCE_WRONG
    assert _judge(_with_a_wrong_layer(_outcome(), observe))[0] is Verdict.WRONG_VALUE
    noisy = _outcome(inconclusive="too much noise")
    assert _judge(_with_a_wrong_layer(noisy, observe)) == (Verdict.INCONCLUSIVE, "too much noise")


def test_sentences_name_the_reference(observe: Observe) -> None:
    reference = observe(num_logprobs=3)
    candidate = dataclasses.replace(reference, positions=reference.positions + 1)
    outcome = _run(_outcome(reference="mrv2"), reference, candidate)
    assert _judge(outcome)[1].endswith(", mrv2 has 7")
