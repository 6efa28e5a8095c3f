"""The end of a step, on values made by hand."""

import torch

from mrv2.batch.commit import by_request, commit_step

SENTINEL = -77


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_advance_and_drawn_tokens_go_to_their_positions() -> None:
    # No logits for row 6, one for row 1, three for row 3, in this order of the batch.
    table = torch.full((7, 9), SENTINEL, dtype=torch.int32)
    computed = torch.full((7,), SENTINEL, dtype=torch.int32)
    commit_step(
        rows=ints(6, 1, 3),
        seq_lens=ints(4, 2, 7),
        num_logits=ints(0, 1, 3),
        token_ids=torch.tensor([[9, 9, 9], [40, 9, 9], [50, 51, 52]]),
        num_sampled=ints(0, 1, 3),
        token_table=table,
        num_computed_tokens=computed,
    )
    expected = torch.full((7, 9), SENTINEL, dtype=torch.int32)
    expected[1, 2] = 40
    expected[3, 5:8] = ints(50, 51, 52)
    assert torch.equal(table, expected)
    assert computed.tolist() == [SENTINEL, 2, SENTINEL, 7, SENTINEL, SENTINEL, 4]


def test_a_step_in_which_nobody_draws_only_advances() -> None:
    table = torch.full((3, 5), SENTINEL, dtype=torch.int32)
    computed = torch.full((3,), SENTINEL, dtype=torch.int32)
    commit_step(
        rows=ints(2, 0),
        seq_lens=ints(3, 1),
        num_logits=ints(0, 0),
        token_ids=torch.zeros(2, 1, dtype=torch.int64),
        num_sampled=ints(0, 0),
        token_table=table,
        num_computed_tokens=computed,
    )
    assert (table == SENTINEL).all()
    assert computed.tolist() == [1, SENTINEL, 3]


def test_rejected_drafts_count_as_neither_token_nor_progress() -> None:
    # Row 2 ran its token at position 3 and drafts at 4 and 5; the first of them was right.
    table = torch.full((4, 9), SENTINEL, dtype=torch.int32)
    computed = torch.full((4,), SENTINEL, dtype=torch.int32)
    commit_step(
        rows=ints(2, 0),
        seq_lens=ints(6, 5),
        num_logits=ints(3, 2),
        token_ids=torch.tensor([[70, 71, 72], [80, 81, 82]]),
        num_sampled=ints(2, 1),
        token_table=table,
        num_computed_tokens=computed,
    )
    expected = torch.full((4, 9), SENTINEL, dtype=torch.int32)
    expected[2, 4:6] = ints(70, 71)
    expected[0, 4] = 80
    assert torch.equal(table, expected)
    assert computed.tolist() == [4, SENTINEL, 5, SENTINEL]


def test_a_request_that_is_none_gets_nothing() -> None:
    table = torch.full((2, 5), SENTINEL, dtype=torch.int32)
    computed = torch.full((2,), SENTINEL, dtype=torch.int32)
    commit_step(
        rows=ints(1),
        seq_lens=ints(0),
        num_logits=ints(0),
        token_ids=torch.tensor([[3, 4]]),
        num_sampled=ints(2),
        token_table=table,
        num_computed_tokens=computed,
    )
    assert (table == SENTINEL).all()
    assert computed.tolist() == [SENTINEL, 0]


def test_tokens_of_logits_are_put_beside_their_requests() -> None:
    drawn = torch.tensor([4, 5, 6, 7])
    several = by_request(drawn, ints(0, 1, 1, 4), ints(1, 0, 3), 3)
    assert several.token_ids.tolist() == [[4, 0, 0], [0, 0, 0], [5, 6, 7]]
    assert several.num_sampled.tolist() == [1, 0, 3]
    some = by_request(drawn[:2], ints(0, 1, 1, 2), ints(1, 0, 1), 1)
    assert some.token_ids.tolist() == [[4], [0], [5]]
    none = by_request(drawn[:0], ints(0, 0, 0), ints(0, 0), 0)
    assert none.token_ids.tolist() == [[0], [0]]
