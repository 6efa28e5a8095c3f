"""The inputs of a uniform step: every request runs the token that it drew last, and its drafts.

Two kernels, instead of the four of `mrv2.batch.inputs`, and nothing in them depends on a value of
the host but the number of requests and the tokens of each: a captured graph can hold them. What
pads such a batch runs on the idle row, which has no tokens: its length is 0, and its slots are
none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp


@triton.jit(do_not_specialize=["num_reqs", "idle_row"])
def _decode_tokens_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    rows_ptr: tl.tensor,
    num_reqs: tl.tensor,
    idle_row: tl.tensor,
    token_table_ptr: tl.tensor,
    token_table_stride: tl.tensor,
    num_computed_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    draw_positions_ptr: tl.tensor,
    logit_rows_ptr: tl.tensor,
    num_logits_ptr: tl.tensor,
    QUERY_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = batch_idx < num_reqs
    row = tl.load(rows_ptr + batch_idx, mask=mask, other=0)
    runs = mask & (row != idle_row)
    first = tl.load(num_computed_ptr + row, mask=runs, other=0)
    tl.store(seq_lens_ptr + batch_idx, tl.where(runs, first + QUERY_LEN, 0), mask=mask)
    tl.store(num_logits_ptr + batch_idx, tl.where(runs, QUERY_LEN, 0), mask=mask)
    for offset in tl.static_range(QUERY_LEN):
        token_idx = batch_idx * QUERY_LEN + offset
        position = tl.where(runs, first + offset, 0)
        cell = token_table_ptr + row.to(tl.int64) * token_table_stride + position
        tl.store(input_ids_ptr + token_idx, tl.load(cell, mask=runs, other=0), mask=mask)
        tl.store(positions_ptr + token_idx, position.to(tl.int64), mask=mask)
        draws = tl.where(runs, position + 1, 0)
        tl.store(draw_positions_ptr + token_idx, draws.to(tl.int64), mask=mask)
        if QUERY_LEN > 1:  # otherwise they are the rows
            tl.store(logit_rows_ptr + token_idx, row, mask=mask)


def _decode_tokens_launch(  # noqa: PLR0913 - its parameters are the op's
    rows: Tensor,
    idle_row: int,
    token_table: Tensor,
    num_computed_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    draw_positions: Tensor,
    logit_rows: Tensor,
    num_logits: Tensor,
    query_len: int,
) -> Launch:
    block = 128
    num_reqs = rows.shape[0]
    table = (token_table, token_table.stride(0))
    outputs = (input_ids, positions, seq_lens, draw_positions, logit_rows, num_logits)
    args = (rows, num_reqs, idle_row, *table, num_computed_tokens, *outputs)
    grid = (cdiv(num_reqs, block),)
    return Launch(_decode_tokens_kernel, grid, args, {"QUERY_LEN": query_len, "BLOCK": block})


def _decode_tokens_reference(  # noqa: PLR0913 - its parameters are the op's
    rows: Tensor,
    idle_row: int,
    token_table: Tensor,
    num_computed_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    draw_positions: Tensor,
    logit_rows: Tensor,
    num_logits: Tensor,
    query_len: int,
) -> None:
    """Gather the tokens, their positions and the length of each request of a uniform step.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        idle_row: The row of no request. Its tokens, positions and length are 0.
        token_table: [max_rows, max_len] int32. Known tokens by row, and drafts behind them.
        num_computed_tokens: [max_rows] int32. Position of each row's first token in this step.
        input_ids: [num_reqs * query_len] int32. Written.
        positions: [num_reqs * query_len] int64. Written.
        seq_lens: [num_reqs] int32. Written: computed tokens with this step's.
        draw_positions: [num_reqs * query_len] int64. Written: position of the token that each
            logit draws, one past its own; 0 for the idle row.
        logit_rows: [num_reqs * query_len] int32. Written: logit -> row. Left alone where
            `query_len` is 1: it is `rows` then.
        num_logits: [num_reqs] int32. Written: `query_len`, and 0 for the idle row.
        query_len: Tokens of each request.
    """
    runs = rows != idle_row
    torch.mul(runs, query_len, out=num_logits)
    torch.index_select(num_computed_tokens, 0, rows, out=seq_lens)
    seq_lens.mul_(runs)
    if query_len == 1:
        positions.copy_(seq_lens)
        torch.take(token_table, positions.add(rows, alpha=token_table.shape[1]), out=input_ids)
        input_ids.mul_(runs)
        seq_lens.add_(runs)
        draw_positions.copy_(seq_lens)
        return
    of_token = torch.repeat_interleave(rows, query_len, output_size=len(positions))
    runs_token = of_token != idle_row
    positions.copy_(torch.add(seq_lens[:, None], torch.arange(query_len)).flatten())
    positions.mul_(runs_token)
    logit_rows.copy_(of_token)
    torch.take(token_table, positions.add(of_token, alpha=token_table.shape[1]), out=input_ids)
    input_ids.mul_(runs_token)
    torch.add(positions, runs_token, out=draw_positions)
    seq_lens.add_(num_logits)


decode_tokens = TwinOp(
    "batch.decode_tokens",
    reference=_decode_tokens_reference,
    launch=_decode_tokens_launch,
    mutates=frozenset(
        {"input_ids", "positions", "seq_lens", "draw_positions", "logit_rows", "num_logits"}
    ),
)


@triton.jit
def _decode_blocks_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    block_size: tl.tensor,
    gathered_ptr: tl.tensor,
    gathered_stride: tl.tensor,
    slots_ptr: tl.tensor,
    QUERY_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch_idx)
    held = (seq_len + block_size - 1) // block_size
    first = tl.program_id(1) * BLOCK
    table_ptr += row * table_stride
    if first < held:
        column = first + tl.arange(0, BLOCK)
        mask = column < held
        block_ids = tl.load(table_ptr + column, mask=mask)
        out = gathered_ptr + batch_idx.to(tl.int64) * gathered_stride + column
        tl.store(out, block_ids, mask=mask)
    if first == 0:
        has_tokens = seq_len > 0
        for offset in tl.static_range(QUERY_LEN):
            position = seq_len - QUERY_LEN + offset
            block_id = tl.load(table_ptr + position // block_size, mask=has_tokens, other=0)
            slot = block_id.to(tl.int64) * block_size + position % block_size
            slot_ptr = slots_ptr + batch_idx * QUERY_LEN + offset
            tl.store(slot_ptr, tl.where(has_tokens, slot, -1))


def _decode_blocks_launch(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    block_size: int,
    num_columns: int,
    gathered: Tensor,
    slots: Tensor,
    query_len: int,
) -> Launch:
    block = 256
    grid = (rows.shape[0], cdiv(num_columns, block))
    args = (
        table,
        table.stride(0),
        rows,
        seq_lens,
        block_size,
        gathered,
        gathered.stride(0),
        slots,
    )
    sizes = {"QUERY_LEN": query_len, "BLOCK": block}
    return Launch(_decode_blocks_kernel, grid, args, sizes, num_warps=2)


def _decode_blocks_reference(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    block_size: int,
    num_columns: int,
    gathered: Tensor,
    slots: Tensor,
    query_len: int,
) -> None:
    """Gather the blocks of each request of a uniform step, and find its tokens' slots in them.

    Args:
        table: [max_rows, max_blocks] int32. Block ids by row.
        rows: [num_reqs] int32. Batch position -> row.
        seq_lens: [num_reqs] int32. Tokens with this step's; the last ones of them are the step's.
            Only the blocks that hold these are gathered.
        block_size: Tokens in a block.
        num_columns: Blocks of the longest request, or more.
        gathered: [>= num_reqs, >= num_columns] int32. Written in the columns that a request's
            tokens are in; the others stay as they are.
        slots: [num_reqs * query_len] int64. Written: block id * block_size + position % block_size,
            and -1 where the length is 0.
        query_len: Tokens that each request runs.
    """
    blocks = table[:, :num_columns].index_select(0, rows)
    out = gathered[: rows.shape[0], :num_columns]
    first_tokens = torch.arange(0, num_columns * block_size, block_size, dtype=torch.int32)
    torch.where(first_tokens < seq_lens[:, None], blocks, out, out=out)
    if query_len == 1:
        of_token = rows
        torch.sub(seq_lens, 1, out=slots)
    else:
        of_token = torch.repeat_interleave(rows, query_len, output_size=len(slots))
        slots.copy_(torch.add(seq_lens[:, None], torch.arange(-query_len, 0)).flatten())
    column = slots.div(block_size, rounding_mode="floor")
    empty = column < 0  # whatever block is looked up for these
    block_ids = table.take(column.add(of_token, alpha=table.shape[1]))
    slots.add_(block_ids.sub(column), alpha=block_size)
    slots.masked_fill_(empty, -1)


decode_blocks = TwinOp(
    "batch.decode_blocks",
    reference=_decode_blocks_reference,
    launch=_decode_blocks_launch,
    mutates=frozenset({"gathered", "slots"}),
)
