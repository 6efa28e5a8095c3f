"""A step's inputs, gathered on the device from the state rows in the order of the batch.

The host uploads one small array (rows and prefix sums); everything else is derived on the device
from what the rows hold there, so a token that was drawn in the last step is an input of this one
without the host having seen it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.batch.layout import BatchLayout
from mrv2.config import RunnerConfig
from mrv2.memory.transfers import Transfers
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.sampling.stage import LogitsView
from mrv2.state.block_tables import BlockTables, gather_block_table, slot_mapping
from mrv2.state.requests import RequestColumns


@triton.jit
def _gather_tokens_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    token_table_stride: tl.tensor,
    num_computed_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx).to(tl.int64)
    start = tl.load(query_start_loc_ptr + batch_idx)
    query_len = tl.load(query_start_loc_ptr + batch_idx + 1) - start
    num_computed = tl.load(num_computed_ptr + row)
    if tl.program_id(1) == 0:
        tl.store(seq_lens_ptr + batch_idx, num_computed + query_len)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < query_len
    position = (num_computed + offset).to(tl.int64)
    token_id = tl.load(token_table_ptr + row * token_table_stride + position, mask=mask)
    tl.store(input_ids_ptr + start + offset, token_id, mask=mask)
    tl.store(positions_ptr + start + offset, position, mask=mask)


def _gather_tokens_launch(
    rows: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> Launch:
    block = 256
    grid = (rows.shape[0], triton.cdiv(max_query_len, block))
    table = (token_table, token_table.stride(0))
    args = (rows, query_start_loc, *table, num_computed_tokens, input_ids, positions, seq_lens)
    return Launch(_gather_tokens_kernel, grid, args, {"BLOCK": block})


def _gather_tokens_reference(
    rows: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    """Gather token ids, positions and sequence lengths of a batch from the state rows.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is
            `num_tokens`.
        token_table: [max_rows, max_len] int32. Known tokens by row.
        num_computed_tokens: [max_rows] int32. Position of each row's first token in this step.
        max_query_len: Tokens of the longest query.
        input_ids: [num_tokens] int32. Written.
        positions: [num_tokens] int64. Written.
        seq_lens: [num_reqs] int32. Written: computed tokens with this step's.
    """
    first = num_computed_tokens[rows]
    if max_query_len == 1 and rows.shape[0] == positions.shape[0]:  # every request has one token
        positions.copy_(first)
        torch.add(first, 1, out=seq_lens)
        input_ids.copy_(token_table[rows, first])
        return
    query_lens = query_start_loc.diff()
    batch_idx = torch.repeat_interleave(query_lens, output_size=positions.shape[0])
    torch.add(first, query_lens, out=seq_lens)
    torch.add(
        (first - query_start_loc[:-1])[batch_idx], torch.arange(positions.shape[0]), out=positions
    )
    input_ids.copy_(token_table[rows[batch_idx], positions])


gather_tokens = TwinOp(
    "batch.gather_tokens",
    reference=_gather_tokens_reference,
    launch=_gather_tokens_launch,
    mutates=frozenset({"input_ids", "positions", "seq_lens"}),
)


@triton.jit
def _locate_logits_kernel(
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    cu_num_logits_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    logits_indices_ptr: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx)
    first = tl.load(cu_num_logits_ptr + batch_idx)
    num_logits = tl.load(cu_num_logits_ptr + batch_idx + 1) - first
    end = tl.load(query_start_loc_ptr + batch_idx + 1)
    seq_len = tl.load(seq_lens_ptr + batch_idx)
    offset = tl.arange(0, BLOCK)
    for begin in range(0, num_logits, BLOCK):
        logit_offset = begin + offset
        mask = logit_offset < num_logits
        behind = num_logits - logit_offset
        tl.store(logits_indices_ptr + first + logit_offset, end - behind, mask=mask)
        tl.store(logit_rows_ptr + first + logit_offset, row + tl.zeros_like(offset), mask=mask)
        tl.store(
            positions_ptr + first + logit_offset, (seq_len - behind + 1).to(tl.int64), mask=mask
        )


def _locate_logits_launch(
    rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
    max_num_logits: int,
    logits_indices: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
) -> Launch:
    args = (rows, query_start_loc, cu_num_logits, seq_lens, logits_indices, logit_rows, positions)
    return Launch(_locate_logits_kernel, (rows.shape[0],), args, {"BLOCK": 16}, num_warps=1)


def _locate_logits_reference(
    rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
    max_num_logits: int,
    logits_indices: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
) -> None:
    """Find the tokens whose hidden states become logits: the last ones of each request.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is
            `num_tokens`.
        cu_num_logits: [num_reqs + 1] int32. First logit of each request; the last entry is
            `num_logits`.
        seq_lens: [num_reqs] int32. Computed tokens with this step's.
        max_num_logits: Logits of the request that wants most.
        logits_indices: [num_logits] int32. Written: logit -> token of the batch.
        logit_rows: [num_logits] int32. Written: logit -> row.
        positions: [num_logits] int64. Written: position of the token that the logit draws, one past
            its own.
    """
    if max_num_logits == 1 and rows.shape[0] == positions.shape[0]:  # every request wants one
        torch.sub(query_start_loc[1:], 1, out=logits_indices)
        logit_rows.copy_(rows)
        positions.copy_(seq_lens)
        return
    batch_idx = torch.repeat_interleave(cu_num_logits.diff(), output_size=positions.shape[0])
    following = batch_idx + 1
    behind = cu_num_logits[following] - torch.arange(positions.shape[0], dtype=torch.int32)
    torch.sub(query_start_loc[following], behind, out=logits_indices)
    torch.index_select(rows, 0, batch_idx, out=logit_rows)
    positions.copy_(seq_lens[batch_idx] - behind + 1)


locate_logits = TwinOp(
    "batch.locate_logits",
    reference=_locate_logits_reference,
    launch=_locate_logits_launch,
    mutates=frozenset({"logits_indices", "logit_rows", "positions"}),
)


class InputBuffers:
    """Device memory that every step's inputs are written into, at fixed addresses.

    Steps are queued on one stream, so a step's kernels have read a buffer before the next step's
    write it.

    Args:
        config: Sizes and device.
    """

    def __init__(self, config: RunnerConfig) -> None:
        device, num_reqs, num_tokens = config.device, config.max_num_reqs, config.max_num_tokens
        self.input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self.block_tables = tuple(
            torch.zeros(num_reqs, group.max_blocks, dtype=torch.int32, device=device)
            for group in config.kv_groups
        )
        self.slots = tuple(
            torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in config.kv_groups
        )


@dataclass(slots=True, kw_only=True)
class InputBatch:
    """A step's layout with its device values, all in batch order.

    Some are views of buffers that the next step reuses.
    """

    layout: BatchLayout
    rows: Tensor
    """[num_reqs] int32. Batch position -> state row."""
    query_start_loc: Tensor
    """[num_reqs + 1] int32."""
    cu_num_logits: Tensor
    """[num_reqs + 1] int32."""
    input_ids: Tensor
    """[num_tokens] int32."""
    positions: Tensor
    """[num_tokens] int64."""
    seq_lens: Tensor
    """[num_reqs] int32."""
    block_tables: tuple[Tensor, ...]
    """[num_reqs, max_blocks] int32 for each KV group.
    Columns beyond the batch's longest request are stale."""
    slots: tuple[Tensor, ...]
    """[num_tokens] int64 for each KV group."""
    logits_indices: Tensor
    """[num_logits] int32. Logit -> token of the batch."""
    logits_view: LogitsView


def prepare_inputs(
    layout: BatchLayout,
    requests: RequestColumns,
    block_tables: BlockTables,
    buffers: InputBuffers,
    transfers: Transfers,
) -> InputBatch:
    """Queue everything that turns a layout into device inputs: one upload, then kernels."""
    num_reqs, num_tokens = layout.num_reqs, layout.num_tokens
    uploaded = transfers.upload(layout.packed)
    rows, query_start_loc, cu_num_logits = uploaded.split((num_reqs, num_reqs + 1, num_reqs + 1))
    input_ids, positions = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens]
    seq_lens = buffers.seq_lens[:num_reqs]
    gather_tokens(
        rows,
        query_start_loc,
        requests.token_ids.tensor,
        requests.num_computed_tokens.tensor,
        layout.max_query_len,
        input_ids,
        positions,
        seq_lens,
    )
    tables, slots = [], []
    for group, table, gathered, slot_buffer in zip(
        block_tables.groups, block_tables.tables, buffers.block_tables, buffers.slots, strict=True
    ):
        tables.append(gathered[:num_reqs])
        slots.append(slot_buffer[:num_tokens])
        gather_block_table(table.tensor, rows, -(-layout.max_seq_len // group.block_size), gathered)
        slot_mapping(
            gathered, query_start_loc, positions, group.block_size, layout.max_query_len, slots[-1]
        )
    logits_indices, view = _locate(layout, rows, query_start_loc, cu_num_logits, seq_lens)
    return InputBatch(
        layout=layout,
        rows=rows,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
        block_tables=tuple(tables),
        slots=tuple(slots),
        logits_indices=logits_indices,
        logits_view=view,
    )


def _locate(
    layout: BatchLayout,
    rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, LogitsView]:
    num_logits, device = layout.num_logits, rows.device
    logits_indices = torch.empty(num_logits, dtype=torch.int32, device=device)
    logit_rows = torch.empty(num_logits, dtype=torch.int32, device=device)
    positions = torch.empty(num_logits, dtype=torch.int64, device=device)
    locate_logits(
        rows,
        query_start_loc,
        cu_num_logits,
        seq_lens,
        layout.max_num_logits,
        logits_indices,
        logit_rows,
        positions,
    )
    return logits_indices, LogitsView(
        logit_rows=logit_rows, positions=positions, rows_np=layout.logit_rows
    )
