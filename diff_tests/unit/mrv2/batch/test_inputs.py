"""Inputs gathered from the rows, on values made by hand; also several logits for a request."""

import numpy as np
import torch

from mrv2.batch.inputs import InputBuffers, gather_tokens, locate_logits, prepare_inputs
from mrv2.batch.layout import layout_batch
from mrv2.config import KVGroup, RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.plan import Scheduled
from mrv2.state.block_tables import BlockTables
from mrv2.state.requests import RequestColumns

SENTINEL = -77


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sentinels(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full((count,), SENTINEL, dtype=dtype)


def test_tokens_are_gathered_from_the_rows_in_the_order_of_the_batch() -> None:
    table = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    computed = ints(5, SENTINEL, 9, 2)
    input_ids, positions, seq_lens = sentinels(5), sentinels(5, torch.int64), sentinels(4)
    gather_tokens(
        ints(3, 2, 0, 0)[:3],
        ints(0, 3, 4, 5),
        table,
        computed,
        3,
        input_ids,
        positions,
        seq_lens[:3],
    )
    assert input_ids.tolist() == [32, 33, 34, 29, 5]
    assert positions.tolist() == [2, 3, 4, 9, 5]
    assert seq_lens.tolist() == [5, 10, 6, SENTINEL]


def test_decodes_are_gathered_as_ragged_steps_are() -> None:
    table = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    input_ids, positions, seq_lens = sentinels(2), sentinels(2, torch.int64), sentinels(2)
    gather_tokens(
        ints(3, 1), ints(0, 1, 2), table, ints(0, 9, 0, 4), 1, input_ids, positions, seq_lens
    )
    assert (input_ids.tolist(), positions.tolist(), seq_lens.tolist()) == (
        [34, 19],
        [4, 9],
        [5, 10],
    )


def test_a_request_may_want_no_logits_one_or_three() -> None:
    # Four tokens of row 6 of which none draws, two of row 1 of which the last does, and four of
    # row 3 of which the last three do: a drawn token and two drafts to verify.
    logits_indices, logit_rows = sentinels(4), sentinels(4)
    positions = sentinels(4, torch.int64)
    num_logits = ints(-1, -1, -1)
    locate_logits(
        rows=ints(6, 1, 3),
        query_start_loc=ints(0, 4, 6, 10),
        cu_num_logits=ints(0, 0, 1, 4),
        seq_lens=ints(4, 12, 30),
        max_num_logits=3,
        logits_indices=logits_indices,
        logit_rows=logit_rows,
        positions=positions,
        num_logits=num_logits,
    )
    assert num_logits.tolist() == [0, 1, 3]
    assert logits_indices.tolist() == [5, 7, 8, 9]
    assert logit_rows.tolist() == [1, 3, 3, 3]
    # The last token of row 1 is at position 11, so its logit draws position 12.
    assert positions.tolist() == [12, 28, 29, 30]


def test_one_logit_for_every_request() -> None:
    logits_indices, logit_rows = sentinels(2), sentinels(2)
    positions = sentinels(2, torch.int64)
    num_logits = ints(-1, -1)
    locate_logits(
        rows=ints(6, 1),
        query_start_loc=ints(0, 4, 5),
        cu_num_logits=ints(0, 1, 2),
        seq_lens=ints(4, 12),
        max_num_logits=1,
        logits_indices=logits_indices,
        logit_rows=logit_rows,
        positions=positions,
        num_logits=num_logits,
    )
    assert num_logits.tolist() == [1, 1]
    assert logits_indices.tolist() == [3, 4]
    assert logit_rows.tolist() == [6, 1]
    assert positions.tolist() == [4, 12]


def test_a_whole_batch() -> None:
    arena = Arena(Transfers(torch.device("cpu")))
    config = RunnerConfig(
        device=torch.device("cpu"),
        max_num_reqs=4,
        max_num_tokens=16,
        max_model_len=12,
        vocab_size=50,
        kv_groups=(KVGroup(block_size=4, max_blocks=3), KVGroup(block_size=2, max_blocks=6)),
    )
    requests = RequestColumns(4, 12, arena)
    tables = BlockTables(config.kv_groups, 4, arena)
    buffers = InputBuffers(config, arena)
    requests.token_ids.tensor[:, :12] = torch.arange(48, dtype=torch.int32).reshape(4, 12)
    requests.num_computed_tokens.tensor[:] = ints(3, SENTINEL, 0, 7)
    tables.tables[0].tensor[:] = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    tables.tables[1].tensor[:] = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    scheduled = Scheduled(
        req_ids=["x", "y", "z"],
        num_tokens=[2, 1, 3],
        num_computed_tokens=[0, 7, 3],
        num_known_tokens=[9, 8, 6],
    )
    layout = layout_batch(scheduled, np.array([2, 3, 0], dtype=np.int32))
    buffers.stage(layout.packed)
    arena.flush()
    batch = prepare_inputs(layout, requests, tables, buffers)
    assert batch.rows.tolist() == [2, 3, 0]
    assert batch.input_ids.tolist() == [24, 25, 43, 3, 4, 5]
    assert batch.positions.tolist() == [0, 1, 7, 3, 4, 5]
    assert batch.seq_lens.tolist() == [2, 8, 6]
    assert batch.block_tables[0][:, :2].tolist() == [[6, 7], [9, 10], [0, 1]]
    assert batch.slots[0].tolist() == [24, 25, 43, 3, 4, 5]
    assert batch.slots[1].tolist() == [24, 25, 43, 3, 4, 5]
    assert batch.logits_indices.tolist() == [2, 5]
    assert batch.logits_view.logit_rows.tolist() == [3, 0]
    assert batch.logits_view.rows_np.tolist() == [3, 0]
    assert batch.logits_view.positions.tolist() == [8, 6]
