"""Tokens and progress of each row: staged at arrival, and when the scheduler disagrees."""

import numpy as np
import pytest
import torch

from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.state.requests import RequestColumns


@pytest.fixture
def columns() -> RequestColumns:
    return RequestColumns(5, 8, Arena(Transfers(torch.device("cpu"))))


def arrival(token_ids: list[int], num_computed_tokens: int) -> Arrival:
    return Arrival(
        req_id="a",
        token_ids=token_ids,
        prompt_len=1,
        num_computed_tokens=num_computed_tokens,
        block_ids=(),
        sampling=Sampling(),
    )


def flush(columns: RequestColumns) -> None:
    columns.flush()
    columns.token_ids.apply_write()


def rows(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, dtype=np.int32)


def test_an_arrival_brings_its_tokens_and_its_progress(columns: RequestColumns) -> None:
    columns.admit(3, arrival([7, 8, 9], 2))
    columns.admit(0, arrival([4], 0))
    flush(columns)
    assert columns.token_ids.tensor[3, :3].tolist() == [7, 8, 9]
    assert columns.token_ids.tensor[0, :1].tolist() == [4]
    assert columns.num_computed_tokens.tensor.tolist() == [0, 0, 0, 2, 0]


def test_a_step_that_the_device_counts_by_itself_stages_nothing(columns: RequestColumns) -> None:
    columns.admit(3, arrival([7, 8, 9], 0))
    columns.admit(1, arrival([7, 8, 9], 0))
    flush(columns)
    columns.progress.advance(0, rows(3, 1), rows(2, 3))
    columns.agree(rows(1, 3), rows(3, 2))
    assert columns.num_computed_tokens.num_staged == 0


def test_progress_is_staged_only_for_the_row_that_differs(columns: RequestColumns) -> None:
    columns.num_computed_tokens.tensor.fill_(-1)
    columns.admit(3, arrival([7, 8, 9], 0))
    columns.admit(1, arrival([7, 8, 9], 0))
    flush(columns)
    columns.progress.advance(0, rows(3, 1), rows(2, 3))
    columns.agree(rows(1, 3), rows(3, 1))
    assert columns.num_computed_tokens.num_staged == 1
    flush(columns)
    assert columns.num_computed_tokens.tensor.tolist() == [-1, 0, -1, 1, -1]
    columns.agree(rows(1, 3), rows(3, 1))
    assert columns.num_computed_tokens.num_staged == 0


def test_the_next_owner_of_a_row_states_its_progress_anew(columns: RequestColumns) -> None:
    columns.admit(2, arrival([7, 8, 9], 0))
    flush(columns)
    columns.num_computed_tokens.tensor[2] = 3  # as the end of a step does
    columns.progress.advance(0, rows(2), rows(3))
    columns.evict(2)
    columns.admit(2, arrival([5, 6], 0))
    flush(columns)
    assert columns.num_computed_tokens.tensor[2] == 0
    assert columns.token_ids.tensor[2, :2].tolist() == [5, 6]


def test_the_same_advance_counts_each_time_and_before_anything_else(
    columns: RequestColumns,
) -> None:
    columns.admit(3, arrival([7, 8, 9], 0))
    columns.admit(1, arrival([7, 8, 9], 0))
    flush(columns)
    batch, one_each = rows(3, 1), rows(1, 1)
    for _ in range(5):
        columns.progress.advance(7, batch, one_each)
    columns.progress.advance(8, rows(1), rows(2))
    columns.agree(rows(1, 3), rows(7, 5))
    assert columns.num_computed_tokens.num_staged == 0
    columns.progress.advance(7, batch, one_each)
    columns.evict(3)
    columns.progress.advance(9, batch[1:], one_each[1:])
    columns.agree(rows(1, 3), rows(9, 0))
    assert columns.num_computed_tokens.num_staged == 0
