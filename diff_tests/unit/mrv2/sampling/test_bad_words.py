"""Bad words: which tokens are masked, worked out by hand, at each logit's own position."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mrv2.sampling.bad_words import BadWords, encode
from mrv2.sampling.stages import RESHAPING

Rows = Callable[..., Any]
A, B, X = 3, 4, 5


def masked(processed: Tensor) -> list[list[int]]:
    """Return the masked tokens of each logit, which all others must not have changed."""
    assert ((processed == 0.0) | (processed == -torch.inf)).all()
    return [row.isinf().nonzero().flatten().tolist() for row in processed]


def test_bad_words_stand_behind_allowed_tokens() -> None:
    names = [getattr(stage, "__name__", "") for stage in RESHAPING]
    assert "BadWords" in names
    before = names[: names.index("BadWords")]
    assert before in ([], ["AllowedTokens"])


def test_a_draft_completes_and_begins_words(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords)
    rows.admit(5, [0], [X], bad_words=((A, B),))
    rows.write(5, 2, X, A, B)
    where = [(5, 2), (5, 3), (5, 4), (5, 5)]
    # The logit behind the draft A must not give B, and no other is masked.
    assert masked(rows.apply(torch.zeros(4, 11), *where)) == [[], [], [B], []]


def test_the_last_committed_token_begins_a_word(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords)
    rows.admit(0, [0], [A], bad_words=((A, B),))
    rows.write(0, 2, B, X)
    where = [(0, 2), (0, 3), (0, 4)]
    assert masked(rows.apply(torch.zeros(3, 11), *where)) == [[B], [], []]


def test_a_token_is_not_read_twice(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords)
    rows.admit(3, [0], [A], bad_words=((A, A, B),))
    rows.write(3, 2, X, A, A)
    where = [(3, 2), (3, 3), (3, 4), (3, 5)]
    assert masked(rows.apply(torch.zeros(4, 11), *where)) == [[], [], [], [B]]


def test_only_the_rows_of_the_request_are_masked(stage_rows: Rows) -> None:
    for first, second in ((5, 0), (0, 5)):
        rows = stage_rows(BadWords)
        rows.admit(first, [0], [X])
        rows.admit(second, [0], [X], bad_words=((B,),))
        where = [(row, position) for row in (5, 0) for position in (2, 3, 4)]
        wanted = [[B] if row == second else [] for row, _ in where]
        assert masked(rows.apply(torch.zeros(6, 11), *where)) == wanted


def test_logits_in_scattered_rows_with_neighbours(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords)
    rows.admit(5, [0], [A], bad_words=((A, B), (X,)))
    rows.admit(0, [0], [A])
    rows.admit(3, [0], [A, A], bad_words=((A, A, A), (B, A)))
    where = [(5, 2), (0, 2), (3, 3), (3, 2)]
    assert masked(rows.apply(torch.zeros(4, 11), *where)) == [[B, X], [], [A], []]


def test_the_prompt_begins_no_word(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords)
    rows.admit(1, [A, A], bad_words=((A, B), (A, A, X), (X,)))
    assert masked(rows.apply(torch.zeros(1, 11), (1, 2))) == [[X]]
    rows.write(1, 2, A)
    # One output is enough for the first word and not for the second.
    assert masked(rows.apply(torch.zeros(1, 11), (1, 3))) == [[B, X]]


def test_a_resumed_request_keeps_its_split(stage_rows: Rows) -> None:
    words = ((A, A, B), (A, X))
    rows = stage_rows(BadWords)
    rows.admit(2, [0, 1, A], bad_words=words)
    rows.write(2, 3, A)
    unbroken = masked(rows.apply(torch.zeros(1, 11), (2, 4)))
    rows.evict(2)
    rows.admit(6, [0, 1, A], [A], bad_words=words)
    assert masked(rows.apply(torch.zeros(1, 11), (6, 4))) == unbroken == [[X]]


def test_tokens_outside_the_vocabulary_mask_nothing(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords, vocab_size=6)
    rows.admit(4, [0], [X], bad_words=((6,), (9,), (X, 6), (-1,), (9, A)))
    logits = torch.zeros(3, 20)[:, :6]
    assert masked(rows.apply(logits, (4, 2), (0, 1), (4, 2))) == [[], [], []]


def test_a_row_forgets_its_last_request(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords)
    rows.admit(3, [0], [A], bad_words=((A, B),))
    assert rows.wants(0, 3)
    rows.evict(3)
    assert not rows.wants(0, 3)
    rows.admit(3, [0], bad_words=((A, X),))
    assert masked(rows.apply(torch.zeros(1, 11), (3, 1))) == [[]], "read the last owner's token"
    rows.admit(3, [0], [A])
    assert not rows.wants(3)


def test_masked_logits_stay_masked(stage_rows: Rows) -> None:
    rows = stage_rows(BadWords, vocab_size=4)
    rows.admit(0, [0], bad_words=((1,), (2,)))
    logits = torch.tensor([[torch.nan, -torch.inf, torch.nan, torch.inf]])
    processed = rows.apply(logits, (0, 1))[0]
    assert processed[0].isnan()
    assert processed[1:].tolist() == [-torch.inf, -torch.inf, torch.inf]


def test_words_are_encoded_with_their_ends_in_front() -> None:
    assert encode([]) == []
    assert encode([[7]]) == [1, 1, 7]
    assert encode([[7, 8], [9]]) == [2, 2, 3, 7, 8, 9]
