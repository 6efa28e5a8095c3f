"""What counts as a mismatch, what as a near tie, and what as neither."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrv2_diff.shadow.draws import SPACINGS, Draw, compare, spacing
from mrv2_diff.shadow.messages import Done
from mrv2_diff.shadow.slices import Answered

LOGITS = torch.tensor([1.0, 5.0, 5.0 - 1e-6, 2.0, -3.0])


def draw(**changes: object) -> Draw:
    made = Draw(
        req_id="a",
        position=7,
        is_greedy=True,
        token_id=1,
        logits=LOGITS,
        processed=LOGITS.clone(),
        logprobs=None,
        returns_raw=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def compared(made: Draw, token_id: int, logprobs: Any = None) -> Done:
    done = Done()
    arrays = None if logprobs is None else tuple(np.array(part) for part in logprobs)
    theirs = Answered(token_id=token_id, logprobs=arrays)  # type: ignore[arg-type]
    compare(made, theirs, torch.float32, done)
    return done


def masked(*token_ids: int) -> torch.Tensor:
    processed = LOGITS.clone()
    processed[list(token_ids)] = -math.inf
    return processed


def test_the_same_greedy_token_is_no_finding() -> None:
    assert compared(draw(), 1) == Done(compared_tokens=1)


def test_another_greedy_token_is_a_mismatch() -> None:
    (finding,) = compared(draw(), 3).findings
    assert (finding["verdict"], finding["kind"]) == ("mismatch", "token")
    assert (finding["v1_token"], finding["mrv2_token"], finding["position"]) == (3, 1, 7)
    assert finding["rank_of_v1_token"] == 3
    assert finding["logprob_of_v1_token"] == pytest.approx(float(LOGITS.log_softmax(-1)[3]))


def test_rounding_is_a_near_tie_and_says_what_it_needed() -> None:
    (finding,) = compared(draw(), 2).findings
    assert finding["verdict"] == "near tie"
    needed = finding["spacings_needed"]
    assert isinstance(needed, float)
    assert 0 < needed <= SPACINGS


def test_just_beyond_rounding_is_a_mismatch() -> None:
    unit = spacing(LOGITS, torch.float32)
    for spacings, verdict in ((SPACINGS - 2, "near tie"), (SPACINGS + 2, "mismatch")):
        logits = LOGITS.clone()
        logits[2] = 5.0 - spacings * unit
        (finding,) = compared(draw(logits=logits, processed=logits), 2).findings
        assert finding["verdict"] == verdict


def test_a_greedy_token_that_is_masked_here_is_a_mismatch() -> None:
    (finding,) = compared(draw(processed=masked(2)), 2).findings
    assert finding["verdict"] == "mismatch"


def test_a_random_token_must_be_one_that_can_be_drawn() -> None:
    made = draw(is_greedy=False, processed=masked(3, 4))
    assert compared(made, 0).findings == []
    (finding,) = compared(made, 4).findings
    assert (finding["kind"], finding["verdict"]) == ("left out", "mismatch")
    # Token 3 is likelier than token 0, which is kept: no cutoff explains that, so it is a mask.
    (finding,) = compared(made, 3).findings
    assert finding["verdict"] == "mismatch"


def test_a_random_token_at_the_cutoff_is_a_near_tie() -> None:
    (finding,) = compared(draw(is_greedy=False, processed=masked(0, 2, 3, 4)), 2).findings
    assert finding["verdict"] == "near tie"


@pytest.mark.parametrize("token_id", [-1, 5])
def test_a_token_outside_the_vocabulary_is_a_mismatch(token_id: int) -> None:
    (finding,) = compared(draw(), token_id).findings
    assert finding["verdict"] == "mismatch"


def test_logprobs_are_compared_with_those_that_mrv2_returned() -> None:
    own = ([1, 2], [-0.5, -0.75])
    assert compared(draw(logprobs=own), 1, own) == Done(compared_tokens=1, compared_logprobs=2)
    (finding,) = compared(draw(logprobs=own), 1, ([1, 2], [-0.5, -0.8])).findings
    assert (finding["kind"], finding["of_token"]) == ("logprobs", 2)
    assert (finding["v1"], finding["mrv2"]) == (-0.8, -0.75)


def test_logprobs_of_tokens_that_mrv2_did_not_return_are_those_of_its_raw_logits() -> None:
    value = float(LOGITS.log_softmax(-1)[3])
    assert compared(draw(), 1, ([3], [value])) == Done(compared_tokens=1, compared_logprobs=1)
    assert compared(draw(), 1, ([3], [value - 0.1])).findings
    assert compared(draw(returns_raw=False), 1, ([3], [9.0])) == Done(compared_tokens=1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_differs_from_one(value: float) -> None:
    (finding,) = compared(draw(), 1, ([1], [value])).findings
    assert finding["verdict"] == "mismatch"


def test_equal_infinities_are_equal() -> None:
    own = ([1, 2], [0.0, -math.inf])
    assert compared(draw(logprobs=own), 1, own).findings == []


def test_spacings_are_those_of_the_models_type() -> None:
    assert spacing(torch.tensor([4.0, -7.0]), torch.float32) == 2.0**-21
    assert spacing(torch.tensor([4.0, -math.inf]), torch.bfloat16) == 2.0**-5
    assert spacing(torch.zeros(3), torch.float32) == 2.0**-23
