"""The end of a step, on values made by hand."""

import torch

from mrv2.batch.commit import commit_step

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
        logit_rows=ints(1, 3, 3, 3),
        positions=torch.tensor([2, 5, 6, 7]),
        drawn=torch.tensor([40, 50, 51, 52]),
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
        logit_rows=ints(),
        positions=torch.zeros(0, dtype=torch.int64),
        drawn=torch.zeros(0, dtype=torch.int64),
        token_table=table,
        num_computed_tokens=computed,
    )
    assert (table == SENTINEL).all()
    assert computed.tolist() == [1, SENTINEL, 3]
