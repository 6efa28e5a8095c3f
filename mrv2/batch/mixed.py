"""The inputs of a step of any requests, prompts among them, as a captured graph holds them.

The kernels of `mrv2.batch.inputs` go by prefix sums on the device, so they serve as they are. What
differs is what pads the step. Requests behind its own have the idle row and no token. Tokens behind
its own belong to nobody, and their slot is none. And every request has one logit, whether or not it
draws a token: which of them do is on the device, as a row for each, the idle one for those that do
not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp


@triton.jit(do_not_specialize=["num_reqs", "num_slots"])
def _pad_slots_kernel(
    query_start_loc_ptr: tl.tensor,
    num_reqs: tl.tensor,
    slots_ptr: tl.tensor,
    num_slots: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token_idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(query_start_loc_ptr + num_reqs)
    none = tl.full((BLOCK,), -1, tl.int64)
    tl.store(slots_ptr + token_idx, none, mask=(token_idx >= end) & (token_idx < num_slots))


def _pad_slots_launch(query_start_loc: Tensor, slots: Tensor) -> Launch:
    block = 256
    num_reqs, num_slots = query_start_loc.shape[0] - 1, slots.shape[0]
    args = (query_start_loc, num_reqs, slots, num_slots)
    return Launch(_pad_slots_kernel, (cdiv(num_slots, block),), args, {"BLOCK": block})


def _pad_slots_reference(query_start_loc: Tensor, slots: Tensor) -> None:
    """Give no slot to the tokens behind those of a step.

    Args:
        query_start_loc: [num_reqs + 1] int32. The last entry is the number of the step's tokens.
        slots: [padded number of tokens] int64. -1 is written behind the step's own.
    """
    slots[int(query_start_loc[-1]) :] = -1


pad_slots = TwinOp(
    "batch.pad_slots",
    reference=_pad_slots_reference,
    launch=_pad_slots_launch,
    mutates=frozenset({"slots"}),
)


@triton.jit(do_not_specialize=["num_reqs", "idle_row"])
def _locate_draws_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    draw_rows_ptr: tl.tensor,
    num_reqs: tl.tensor,
    idle_row: tl.tensor,
    logits_indices_ptr: tl.tensor,
    draw_positions_ptr: tl.tensor,
    num_logits_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = batch_idx < num_reqs
    end = tl.load(query_start_loc_ptr + batch_idx + 1, mask=mask, other=0)
    tl.store(logits_indices_ptr + batch_idx, tl.maximum(end - 1, 0), mask=mask)
    draws = tl.load(draw_rows_ptr + batch_idx, mask=mask, other=0) != idle_row
    position = tl.load(seq_lens_ptr + batch_idx, mask=mask, other=0).to(tl.int64)
    tl.store(draw_positions_ptr + batch_idx, tl.where(draws, position, 0), mask=mask)
    tl.store(num_logits_ptr + batch_idx, draws.to(tl.int32), mask=mask)


def _locate_draws_launch(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    draw_rows: Tensor,
    idle_row: int,
    logits_indices: Tensor,
    draw_positions: Tensor,
    num_logits: Tensor,
) -> Launch:
    block = 128
    num_reqs = draw_rows.shape[0]
    args = (
        query_start_loc,
        seq_lens,
        draw_rows,
        num_reqs,
        idle_row,
        logits_indices,
        draw_positions,
        num_logits,
    )
    return Launch(_locate_draws_kernel, (cdiv(num_reqs, block),), args, {"BLOCK": block})


def _locate_draws_reference(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    draw_rows: Tensor,
    idle_row: int,
    logits_indices: Tensor,
    draw_positions: Tensor,
    num_logits: Tensor,
) -> None:
    """Find each request's last token, and the position of the token that it draws.

    Args:
        query_start_loc: [num_reqs + 1] int32. First token of each request, and the end.
        seq_lens: [num_reqs] int32. Computed tokens with this step's.
        draw_rows: [num_reqs] int32. The row that each request draws a token for; the idle row where
            it draws none.
        idle_row: The row of no request.
        logits_indices: [num_reqs] int32. Written: the last token of each; token 0 if there is none
            before.
        draw_positions: [num_reqs] int64. Written: one past the last token's own; 0 where nothing is
            drawn.
        num_logits: [num_reqs] int32. Written: 1 where a token is drawn, else 0.
    """
    draws = draw_rows != idle_row
    logits_indices.copy_((query_start_loc[1:] - 1).clamp_(min=0))
    draw_positions.copy_(torch.where(draws, seq_lens, 0))
    num_logits.copy_(draws)


locate_draws = TwinOp(
    "batch.locate_draws",
    reference=_locate_draws_reference,
    launch=_locate_draws_launch,
    mutates=frozenset({"logits_indices", "draw_positions", "num_logits"}),
)
