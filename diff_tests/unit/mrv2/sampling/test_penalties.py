"""Penalties: what a logit becomes, worked out by hand; counts are those of its own position."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrv2.sampling.penalties import MAX_SCRATCH_ROWS, Penalties
from mrv2.sampling.stages import STAGES

Rows = Callable[..., Any]


def test_penalties_stand_among_the_stages() -> None:
    assert Penalties in STAGES


def test_each_penalty_by_hand(stage_rows: Rows) -> None:
    rows = stage_rows(Penalties, vocab_size=6)
    rows.admit(2, [0, 1], [1, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    rows.admit(4, [0, 1], [1, 2, 2], repetition_penalty=2.0)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, -1.0, -2.0], [1.0, -2.0, 3.0, 4.0, -1.0, -2.0]])
    processed = rows.apply(logits, (2, 5), (4, 5))
    # Token 0 is in the prompt alone: only the repetition penalty knows it.
    assert processed[0].tolist() == [1.0, 2.0 - 0.25 - 0.5, 3.0 - 0.5 - 0.5, 4.0, -1.0, -2.0]
    assert processed[1].tolist() == [0.5, -4.0, 1.5, 4.0, -1.0, -2.0]


def test_repetition_comes_before_frequency_and_presence(stage_rows: Rows) -> None:
    rows = stage_rows(Penalties, vocab_size=2)
    rows.admit(0, [1], [0], repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=-0.25)
    assert rows.apply(torch.tensor([[4.0, 4.0]]), (0, 2)).tolist() == [[1.25, 2.0]]


def test_drafts_count_once_and_only_before_their_logit(stage_rows: Rows) -> None:
    t, u, v = 3, 4, 5
    rows = stage_rows(Penalties)
    rows.admit(5, [0], [t], frequency_penalty=1.0)
    rows.admit(0, [0], [u], frequency_penalty=1.0)
    rows.write(5, 2, u, v)
    rows.write(0, 2, u, v)
    where = ((5, 2), (5, 3), (5, 4), (0, 2), (0, 3), (0, 4))
    processed = rows.apply(torch.zeros(6, 11), *where)
    wanted = [{t: 1}, {t: 1, u: 1}, {t: 1, u: 1, v: 1}, {u: 1}, {u: 2}, {u: 2, v: 1}]
    for row, counts in zip(processed, wanted, strict=True):
        assert {i: -int(x) for i, x in enumerate(row) if x} == counts
    # One of two drafts was accepted, and another token was drawn behind it.
    rows.write(5, 3, 9)
    row = rows.apply(torch.zeros(1, 11), (5, 4))[0]
    assert {i: -int(x) for i, x in enumerate(row) if x} == {t: 1, u: 1, 9: 1}


def test_logits_of_several_requests_find_their_rows(stage_rows: Rows) -> None:
    rows = stage_rows(Penalties)
    rows.admit(5, [1], [2], presence_penalty=2.0)
    rows.admit(0, [1], [2])
    rows.admit(3, [1], [2], frequency_penalty=1.0)
    rows.write(5, 2, 6, 7, 8)
    rows.write(3, 2, 2)
    where = ((5, 2), (5, 3), (5, 4), (5, 5), (0, 2), (3, 2), (3, 3))
    processed = rows.apply(torch.zeros(7, 11), *where)
    wanted = [
        {2: 2.0},
        {2: 2.0, 6: 2.0},
        {2: 2.0, 6: 2.0, 7: 2.0},
        {2: 2.0, 6: 2.0, 7: 2.0, 8: 2.0},
        {},
        {2: 1.0},
        {2: 2.0},
    ]
    for row, taken in zip(processed, wanted, strict=True):
        assert {i: -float(x) for i, x in enumerate(row) if x} == taken


def test_a_token_counts_in_the_step_after_it_was_drawn(stage_rows: Rows) -> None:
    rows = stage_rows(Penalties)
    rows.admit(1, [0], frequency_penalty=1.0)
    for step in range(1, 5):
        processed = rows.apply(torch.zeros(1, 11), (1, step))
        assert processed[0, 7] == 1 - step
        rows.write(1, step, 7)


def test_a_resumed_request_keeps_its_split(stage_rows: Rows) -> None:
    prompt, outputs = [1, 2, 3], [3, 4, 4, 5, 6, 4]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 1.0, "repetition_penalty": 4.0}
    rows = stage_rows(Penalties)
    rows.admit(2, prompt, **penalties)
    rows.write(2, 3, *outputs)
    unbroken = rows.apply(torch.ones(1, 11), (2, 9))
    rows.evict(2)
    rows.admit(6, prompt, outputs, **penalties)
    assert torch.equal(rows.apply(torch.ones(1, 11), (6, 9)), unbroken)
    assert unbroken[0, :7].tolist() == [1.0, 0.25, 0.25, -1.25, -3.25, -1.25, -1.25]


def test_a_row_forgets_its_last_request(stage_rows: Rows) -> None:
    rows = stage_rows(Penalties)
    rows.admit(3, [1], [2, 2, 8], frequency_penalty=1.0)
    assert rows.wants(3, 0)
    rows.evict(3)
    assert not rows.wants(3, 0)
    rows.admit(3, [4], presence_penalty=1.0)
    processed = rows.apply(torch.zeros(1, 11), (3, 1))
    assert not processed.any(), "tokens behind the position belong to the last owner"
    rows.admit(3, [4, 5])
    assert not rows.wants(3)


def test_a_processor_before_the_penalty_acts_first(stage_rows: Rows) -> None:
    rows = stage_rows(Penalties, vocab_size=2)
    rows.admit(0, [1], repetition_penalty=2.0)
    biased = torch.tensor([[0.0, 1.0]])
    biased[0, 1] += 2.0
    assert rows.apply(biased, (0, 1))[0, 1] == 1.5
    names = [getattr(stage, "__name__", "") for stage in STAGES]
    before = names.index("LogitBias") if "LogitBias" in names else -1
    assert before < names.index("Penalties") < names.index("Temperature")


def test_more_logits_than_scratch_rows(stage_rows: Rows) -> None:
    count = MAX_SCRATCH_ROWS + 5
    rows = stage_rows(Penalties, max_num_reqs=count)
    for row in range(count):
        rows.admit(row, [row % 11], repetition_penalty=2.0)
    processed = rows.apply(torch.ones(count, 11), *((row, 1) for row in range(count)))
    assert processed.eq(0.5).nonzero().tolist() == [[row, row % 11] for row in range(count)]
    assert not rows.stage._counts.any(), "the scratch is left clean"


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"repetition_penalty": 0.5}, {}],
)
def test_only_a_penalty_is_wanted(stage_rows: Rows, penalty: dict[str, float]) -> None:
    rows = stage_rows(Penalties)
    rows.admit(1, [1], **penalty)
    assert rows.wants(1) == bool(penalty)
    assert not rows.wants(0)
    assert (rows.stage._counts is not None) == bool(penalty), "scratch without need"
