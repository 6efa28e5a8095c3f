"""The referee computes what a checkpoint means, and says which of two rows is further from it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv2_diff.compare.tally import FloatArray, Place
from mrv2_diff.models.checkpoint import make_model
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.models.tokenizer import VOCAB_SIZE
from mrv2_diff.observation import Observation
from mrv2_diff.referee import (
    MAX_ROWS,
    Disputes,
    Referee,
    Ruling,
    TokenRuling,
    distance,
    rule,
    rule_tokens,
)

Observe = Callable[..., Observation]

RIGHT = np.array([0.0, 3.0, 5.0, 1.0, 2.0, 4.0])
SPACING = 2.0**-21
"""Of float32 at 5."""


def _right(tokens: Sequence[int]) -> FloatArray:
    return RIGHT


def _rounded(tokens: Sequence[int]) -> FloatArray:
    return RIGHT + 2 * SPACING


def _disputes(*rows: tuple[float, float]) -> Disputes:
    """Return rows in which reference and candidate are so many spacings away from the right."""
    disputes = Disputes(bound=4.0)
    disputes.arrive("a", (1, 2))
    for step, (ours, theirs) in enumerate(rows):
        one, other = (_observed([RIGHT + size * SPACING * np.eye(6)[3]]) for size in (ours, theirs))
        disputes.note(Place("forced", step), one, other)
    return disputes


def _observed(logits: Any, req_id: str = "a") -> Observation:
    raw = torch.tensor(np.array(logits), dtype=torch.float64)
    drawn = raw.argmax(dim=1).numpy()
    nothing = np.zeros(0, dtype=np.int64)
    return Observation(
        req_ids=[req_id], query_lens=nothing, input_ids=nothing, positions=nothing,
        seq_lens=nothing, slots=(), draw_ids=[req_id], logits=raw, processed_logits=raw,
        tokens=drawn, drawn=drawn, logprobs=None,
    )  # fmt: skip


def _rule(*rows: tuple[float, float]) -> Ruling:
    ruling = rule(_disputes(*rows), _right, _rounded, "float64", floor=1.0)
    assert ruling is not None
    return ruling


def test_rounding_and_floor_make_the_limit() -> None:
    assert _rule((0.0, 9.0)).limit == pytest.approx(2 * (2 + 1))


@pytest.mark.parametrize(
    ("away", "found"),
    [
        ((100.0, 1.0), (1, 0, 0)),
        ((1.0, 100.0), (0, 1, 0)),
        ((100.0, 300.0), (0, 0, 1)),
        ((-4.0, 4.0), (0, 0, 0)),
    ],
)
def test_who_is_beyond_rounding_is_wrong(
    away: tuple[float, float], found: tuple[int, int, int]
) -> None:
    ruling = _rule(away)
    assert (ruling.reference_wrong, ruling.candidate_wrong, ruling.both_wrong) == found
    assert ruling.distances == pytest.approx([abs(size) for size in away])


def test_only_rows_beyond_the_floor_are_in_dispute() -> None:
    assert _disputes((0.0, 3.9), (2.0, -1.9)).rows == []
    assert rule(_disputes(), _right, _rounded, "float64", floor=1.0) is None


def test_one_row_against_the_candidate_denies_it() -> None:
    assert _rule((100.0, 1.0), (50.0, 0.0)).clears_candidate
    assert not _rule((100.0, 1.0), (0.0, 50.0)).clears_candidate
    assert not _rule((100.0, 1.0), (-4.0, 4.0)).clears_candidate


def test_rows_beyond_those_kept_deny_it_too() -> None:
    ruling = _rule(*[(100.0, 1.0)] * (MAX_ROWS + 1))
    assert ruling.reference_wrong == ruling.num_ruled == MAX_ROWS
    assert not ruling.clears_candidate
    assert f"the first {MAX_ROWS} of {MAX_ROWS + 1} rows" in ruling.sentence("V1")


def test_a_sentence_names_the_nearer_one_and_both_distances() -> None:
    said = _rule((100.0, 1.0)).sentence("V1")
    assert said == (
        "the referee (float64) is nearer the candidate in 1 and nearer V1 in 0 of 1 rows in "
        "dispute: at most 1 and 100 spacings away, where rounding makes 6"
    )


def test_a_row_belongs_to_the_tokens_before_it(observe: Observe) -> None:
    disputes = Disputes(bound=1.0)
    disputes.arrive("a", (1, 2))
    disputes.arrive("b", (3,))
    right = observe()
    wrong = observe(logits=(right.logits + 1.0).tolist())
    disputes.note(Place("forced", 0), right, wrong)
    disputes.commit(right)
    disputes.note(Place("forced", 1), right, wrong)
    drawn = right.tokens.tolist()
    assert [row.tokens for row in disputes.rows] == [
        (1, 2), (3,), (1, 2, drawn[0]), (3, drawn[1])
    ]  # fmt: skip


def test_a_value_that_is_not_a_number_is_infinitely_far() -> None:
    assert distance(RIGHT, np.where(RIGHT == 3.0, np.nan, RIGHT)) == np.inf
    assert distance(RIGHT, RIGHT) == 0.0


def test_tokens_are_held_against_the_right_logits() -> None:
    parted = [((1,), 3, 2), ((1,), 2, 5), ((1,), 4, 4)]
    assert rule_tokens(parted, _right, _rounded) == TokenRuling(
        requests=3, candidate=1, reference=1, open=1
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "alternating"
    make_model(folder, ModelSpec(sliding_window=8, sliding_layers="alternate"))
    return folder


def test_the_referee_is_more_exact_than_the_runners_precision(checkpoint: Path) -> None:
    tokens = [(7 * index) % 256 for index in range(40)]
    referee = Referee(checkpoint, "float32")
    exact, rounded = referee.logits(tokens), referee.rounded(tokens)
    assert referee.dtype == "float64"
    assert exact.shape == (VOCAB_SIZE,)
    assert np.any(exact != exact.astype(np.float32))
    assert 0.0 < distance(exact, rounded) < 64.0
    assert np.array_equal(exact, referee.logits(tokens))
    assert distance(exact, referee.logits([*tokens[:-20], 5, *tokens[-19:]])) > 1e5


def test_bfloat16_is_held_against_float32_with_the_same_weights(checkpoint: Path) -> None:
    tokens = [(11 * index) % 256 for index in range(30)]
    referee = Referee(checkpoint, "bfloat16")
    exact = referee.logits(tokens)
    assert referee.dtype == "float32"
    assert 0.0 < distance(exact, referee.rounded(tokens)) < 8.0 * 2**16
    assert distance(exact, Referee(checkpoint, "float32").logits(tokens)) > 0.0
