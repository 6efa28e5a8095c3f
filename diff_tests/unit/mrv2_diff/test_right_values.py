"""Right values by hand, one parameter after another; then which of them rounding leaves open."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mrv2_diff.right_values import (
    FORCED,
    History,
    Markers,
    Parameters,
    forced_by_budget,
    log_softmax,
    processed_logits,
)

CUT = float("-inf")
LOGITS = (1.0, 3.0, -2.0, 0.5, 2.0)
MARKERS = Markers(start=(1,), end=(3, 4))


def _processed(logits: Any = LOGITS, outputs: Any = (), prompt: Any = (0,), **given: Any) -> Any:
    history = History(prompt=tuple(prompt), outputs=list(outputs), stop_token_ids=frozenset({3}))
    return processed_logits(np.array(logits, np.float32), Parameters(**given), history, 0.0)


def _values(*arguments: Any, **given: Any) -> list[float]:
    values: list[float] = _processed(*arguments, **given).values.tolist()
    return values


def test_without_parameters_nothing_changes() -> None:
    processed = _processed()
    assert processed.values.tolist() == list(LOGITS)
    assert not processed.undecided.any()
    assert Parameters().in_use == ()
    assert Parameters(temperature=1.0).in_use == ()


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"allowed_token_ids": (0, 2)}, [1.0, CUT, -2.0, CUT, CUT]),
        ({"bad_words": ((1,),)}, [1.0, CUT, -2.0, 0.5, 2.0]),
        ({"bad_words": ((2, 4, 1),), "outputs": (0, 2, 4)}, [1.0, CUT, -2.0, 0.5, 2.0]),
        ({"bad_words": ((2, 4, 1),), "outputs": (2, 4, 0)}, list(LOGITS)),
        ({"bad_words": ((0, 1),)}, list(LOGITS)),  # the prompt is no part of a bad word
        ({"min_tokens": 2, "outputs": (0,)}, [1.0, 3.0, -2.0, CUT, 2.0]),
        ({"min_tokens": 2, "outputs": (0, 0)}, list(LOGITS)),
        ({"logit_bias": {2: 100.0, 1: -100.0}}, [1.0, -97.0, 98.0, 0.5, 2.0]),
        ({"presence_penalty": 2.0, "outputs": (1, 1)}, [1.0, 1.0, -2.0, 0.5, 2.0]),
        ({"frequency_penalty": -2.0, "outputs": (1, 1)}, [1.0, 7.0, -2.0, 0.5, 2.0]),
        ({"repetition_penalty": 2.0, "outputs": (2,)}, [0.5, 3.0, -4.0, 0.5, 2.0]),
        ({"repetition_penalty": 0.5, "outputs": (2,)}, [2.0, 3.0, -1.0, 0.5, 2.0]),
        ({"temperature": 0.5}, [2.0, 6.0, -4.0, 1.0, 4.0]),
        ({"temperature": 1.0, "top_k": 2}, [CUT, 3.0, CUT, CUT, 2.0]),
        ({"temperature": 1.0, "top_k": 5}, list(LOGITS)),
        ({"temperature": 1.0, "min_p": 0.2}, [CUT, 3.0, CUT, CUT, 2.0]),
        ({"temperature": 1.0, "min_p": 1.0}, [CUT, 3.0, CUT, CUT, CUT]),
        ({"temperature": 1.0, "top_p": 0.7}, [CUT, 3.0, CUT, CUT, 2.0]),
        ({"temperature": 1.0, "top_p": 1e-6}, [CUT, 3.0, CUT, CUT, CUT]),
    ],
)
def test_each_parameter(given: dict[str, Any], values: list[float]) -> None:
    processed = _processed(**given)
    assert processed.values.tolist() == values
    assert not processed.undecided.any()


def test_a_bias_comes_before_a_penalty_and_a_temperature_after_both() -> None:
    given = {"logit_bias": {0: 2.0}, "repetition_penalty": 2.0, "temperature": 0.5}
    assert _values(prompt=(0,), **given)[0] == 3.0


def test_cuts_see_what_was_left_and_divided() -> None:
    # Of 3 and 2 the first has 0.73, and of 6 and 4 it has 0.88.
    assert _values(temperature=1.0, top_k=2, top_p=0.8)[4] == 2.0
    assert _values(temperature=0.5, top_k=2, top_p=0.8)[4] == CUT


def test_equal_logits_are_kept_or_cut_together() -> None:
    tied = (2.0, 1.0, 2.0, 1.0, 0.0)
    assert _values(tied, temperature=1.0, top_k=1) == [2.0, CUT, 2.0, CUT, CUT]
    assert _values(tied, temperature=1.0, top_k=3) == [2.0, 1.0, 2.0, 1.0, CUT]
    assert _values(tied, temperature=1.0, top_p=0.1) == [2.0, CUT, 2.0, CUT, CUT]


def test_what_is_cut_is_not_called_weightless() -> None:
    processed = _processed((100.0, 3.0, 99.0, 19.0, 21.0), allowed_token_ids=(0, 3, 4))
    assert processed.weightless.tolist() == [False, False, False, True, False]


def test_a_row_that_is_cut_whole_stays_cut() -> None:
    given = {"allowed_token_ids": (1,), "bad_words": ((1,),)}
    assert _values(**given) == [CUT] * 5
    assert _values(temperature=0.7, top_k=2, top_p=0.5, min_p=0.1, **given) == [CUT] * 5


def test_a_forced_token_stands_above_all_others() -> None:
    history = History(prompt=(1,), outputs=[0, 0], markers=MARKERS)
    parameters = Parameters(thinking_token_budget=2)
    values = processed_logits(np.array(LOGITS, np.float32), parameters, history, 0.0).values
    assert values.tolist() == [1.0, 3.0, -2.0, FORCED, 2.0]


@pytest.mark.parametrize(
    ("prompt", "outputs", "budget", "forced"),
    [
        ((0,), (1, 0), 2, None),
        ((0,), (1, 0, 0), 2, 3),
        ((0,), (1, 0, 0, 3), 2, 4),
        ((0,), (1, 0, 0, 3, 4), 2, None),
        ((0,), (1, 0, 3, 4, 0, 0), 3, None),  # the model ended it
        ((0,), (1, 0, 3, 4, 0, 0), 2, 3),  # half an end came before the budget was spent
        ((0,), (1, 0, 1, 0, 0), 3, 3),  # a start within a section means nothing
        ((0,), (1, 0, 0, 3, 4, 1, 0), 2, None),
        ((0,), (1, 0, 0, 3, 4, 1, 0, 0), 2, 3),
        ((1, 0, 0, 0), (), 2, 3),  # the prompt used the budget up
        ((1, 3, 4), (0, 0, 0), 0, None),
        ((0, 1), (), 0, 3),
        ((0, 1, 0), (0,), 2, 3),
        ((0, 1, 0, 0), (), 1, 3),
        ((0, 1, 0, 0), (3,), 1, 4),
        ((1, 0, 0, 1), (0,), 2, None),
        ((1, 3, 4), (0, 0), 1, None),
        ((0,), (0, 0, 0), 0, None),
    ],
)
def test_a_thinking_budget_forces_the_end_marker_token_by_token(
    prompt: tuple[int, ...], outputs: tuple[int, ...], budget: int, forced: int | None
) -> None:
    history = History(prompt=prompt, outputs=list(outputs), markers=MARKERS)
    assert forced_by_budget(budget, history) == forced
    assert forced_by_budget(None, history) is None


@pytest.mark.parametrize(
    ("given", "second"),
    [({"top_k": 2}, 2.0), ({"top_p": 0.7}, 2.0), ({"min_p": 0.3}, 3.0 + float(np.log(0.3)))],
)
def test_what_rounding_decides_is_left_open_and_nothing_else(
    given: dict[str, Any], second: float
) -> None:
    third = float(np.nextafter(np.float32(second), np.float32(0)))
    logits = np.array([0.0, 3.0, second, third, -5.0], dtype=np.float32)
    parameters = Parameters(temperature=1.0, **given)
    found = processed_logits(logits, parameters, History(prompt=(0,)), 4.0).undecided
    assert np.flatnonzero(found).tolist() == [2, 3]
    assert not _processed((0.0, 3.0, 2.0, 1.0, -5.0), temperature=1.0, **given).undecided.any()


def test_parameters_of_greedy_requests_that_vllm_drops() -> None:
    options = {"top_k": 2, "min_p": 0.5, "presence_penalty": 1.0, "logprobs": 3}
    greedy = Parameters.of(0.0, options)
    assert greedy == Parameters(presence_penalty=1.0)
    drawn = Parameters.of(0.001, options)
    assert drawn is not None
    assert drawn.temperature == 0.01
    assert drawn.in_use == ("temperature", "top_k", "min_p", "presence_penalty")
    assert drawn.without("top_k") == dataclasses.replace(drawn, top_k=0)
    assert Parameters.of(0.0, {"structured_outputs": {}}) is None


def test_log_softmax_sums_to_one() -> None:
    assert np.exp(log_softmax(np.array([LOGITS, LOGITS]))).sum(axis=1) == pytest.approx(1.0)
