"""The end of a step on the device: drawn tokens go into their rows, and the rows advance."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp


@triton.jit(do_not_specialize=["num_reqs", "num_logits"])
def _commit_step_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_reqs: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    num_logits: tl.tensor,
    token_table_ptr: tl.tensor,
    token_table_stride: tl.tensor,
    num_computed_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_req = index < num_reqs
    row = tl.load(rows_ptr + index, mask=is_req, other=0)
    tl.store(num_computed_ptr + row, tl.load(seq_lens_ptr + index, mask=is_req), mask=is_req)
    is_logit = index < num_logits
    logit_row = tl.load(logit_rows_ptr + index, mask=is_logit, other=0).to(tl.int64)
    position = tl.load(positions_ptr + index, mask=is_logit, other=0)
    token_id = tl.load(drawn_ptr + index, mask=is_logit, other=0).to(tl.int32)
    target = token_table_ptr + logit_row * token_table_stride + position
    tl.store(target, token_id, mask=is_logit)


def _commit_step_launch(
    rows: Tensor,
    seq_lens: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    drawn: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
) -> Launch:
    block = 256
    num_reqs, num_logits = rows.shape[0], drawn.shape[0]
    args = (
        rows,
        seq_lens,
        num_reqs,
        logit_rows,
        positions,
        drawn,
        num_logits,
        token_table,
        token_table.stride(0),
        num_computed_tokens,
    )
    grid = (cdiv(max(num_reqs, num_logits), block),)
    return Launch(_commit_step_kernel, grid, args, {"BLOCK": block})


def _commit_step_reference(
    rows: Tensor,
    seq_lens: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    drawn: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    """Advance each row past the tokens of the step, and put each drawn token at its position.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        seq_lens: [num_reqs] int32. Computed tokens with this step's; becomes the row's progress.
        logit_rows: [num_logits] int32. Logit -> row.
        positions: [num_logits] int64. Position of the token that each logit drew.
        drawn: [num_logits] int64. Token ids.
        token_table: [max_rows, max_len + 1] int32. Written at (logit_rows, positions). The last
            column takes the token that a row's last logit draws when the row is full.
        num_computed_tokens: [max_rows] int32. Written at rows.
    """
    num_computed_tokens.index_copy_(0, rows.long(), seq_lens)
    token_table.index_put_((logit_rows.long(), positions), drawn.to(torch.int32))


commit_step = TwinOp(
    "batch.commit_step",
    reference=_commit_step_reference,
    launch=_commit_step_launch,
    mutates=frozenset({"token_table", "num_computed_tokens"}),
)
