"""The end of a step on the device: drawn tokens go into their rows, and the rows advance."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp


@triton.jit
def _commit_step_kernel(
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    cu_num_logits_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    token_table_stride: tl.tensor,
    max_len: tl.tensor,
    num_computed_ptr: tl.tensor,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + batch_idx)
    tl.store(num_computed_ptr + row, seq_len)
    first = tl.load(cu_num_logits_ptr + batch_idx)
    end = tl.load(cu_num_logits_ptr + batch_idx + 1)
    if (end > first) & (seq_len < max_len):
        token_id = tl.load(drawn_ptr + end - 1).to(tl.int32)
        tl.store(token_table_ptr + row * token_table_stride + seq_len, token_id)


def _commit_step_launch(
    rows: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    drawn: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
) -> Launch:
    table = (token_table, token_table.stride(0), token_table.shape[1])
    args = (rows, seq_lens, cu_num_logits, drawn, *table, num_computed_tokens)
    return Launch(_commit_step_kernel, (rows.shape[0],), args, {}, num_warps=1)


def _commit_step_reference(
    rows: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    drawn: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    """Advance each row past the tokens of the step and append the token that its last logit drew.

    A request without logits only advances. A token drawn at the very end of a full row has no place
    and is not kept: its request ends with it.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        seq_lens: [num_reqs] int32. Computed tokens with this step's; becomes the row's progress.
        cu_num_logits: [num_reqs + 1] int32. First logit of each request.
        drawn: [num_logits] int64. Token ids.
        token_table: [max_rows, max_len] int32. Written at (row, seq_len).
        num_computed_tokens: [max_rows] int32. Written at row.
    """
    num_computed_tokens.index_copy_(0, rows.long(), seq_lens)
    batch_idx = torch.repeat_interleave(cu_num_logits.diff().clamp_(max=1), output_size=None)
    drawing = batch_idx[seq_lens[batch_idx] < token_table.shape[1]]
    last = cu_num_logits[1:][drawing] - 1
    token_table[rows[drawing], seq_lens[drawing]] = drawn[last].to(torch.int32)


commit_step = TwinOp(
    "batch.commit_step",
    reference=_commit_step_reference,
    launch=_commit_step_launch,
    mutates=frozenset({"token_table", "num_computed_tokens"}),
)
