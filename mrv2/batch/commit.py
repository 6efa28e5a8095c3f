"""The end of a step on the device: sampled tokens go into their rows, and the rows advance.

The device owns a row's progress: how many of a step's tokens were accepted is known there first,
and the host may only bound it until it has seen the step's output.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """What a head sampled in one step, on the device: what is committed.

    Not frozen, since one is made at every step.
    """

    token_ids: Tensor
    """[num_reqs, 1 + k] int64, contiguous, k the most drafts that a request of the step ran. What
    stands beyond a request's `num_sampled` has no meaning: rejected, or never drawn."""
    num_sampled: Tensor
    """[num_reqs] int32. Of a request with n logits 1 to n, of one with none 0."""


@triton.jit(do_not_specialize=["num_reqs", "width"])
def _commit_step_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_logits_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_sampled_ptr: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    token_table_ptr: tl.tensor,
    token_table_stride: tl.tensor,
    num_computed_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_reqs
    row = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + index, mask=mask, other=0)
    num_logits = tl.load(num_logits_ptr + index, mask=mask, other=0)
    num_sampled = tl.load(num_sampled_ptr + index, mask=mask, other=0)
    # Whatever a head says: no token is put behind the row's end.
    num_sampled = tl.maximum(tl.minimum(num_sampled, num_logits), 0)
    before = seq_len - num_logits
    tl.store(num_computed_ptr + row, before + num_sampled, mask=mask)
    target = token_table_ptr + row * token_table_stride + before + 1
    source = token_ids_ptr + index.to(tl.int64) * width
    for offset in range(width):
        is_sampled = offset < num_sampled
        token_id = tl.load(source + offset, mask=is_sampled, other=0)
        tl.store(target + offset, token_id.to(tl.int32), mask=is_sampled)


def _commit_step_launch(
    rows: Tensor,
    seq_lens: Tensor,
    num_logits: Tensor,
    token_ids: Tensor,
    num_sampled: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
) -> Launch:
    block = 128
    num_reqs, width = token_ids.shape
    args = (
        rows,
        seq_lens,
        num_logits,
        token_ids,
        num_sampled,
        num_reqs,
        width,
        token_table,
        token_table.stride(0),
        num_computed_tokens,
    )
    return Launch(_commit_step_kernel, (cdiv(num_reqs, block),), args, {"BLOCK": block})


def _commit_step_reference(
    rows: Tensor,
    seq_lens: Tensor,
    num_logits: Tensor,
    token_ids: Tensor,
    num_sampled: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    """Advance each row past the step's accepted tokens, and put what it sampled behind them.

    The last `num_logits` tokens that a request ran are its last known one and the drafts behind it.
    Each was followed by a token that a logit drew: the first `num_sampled` of these are kept. What
    was run behind them was rejected, and does not count as computed.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        seq_lens: [num_reqs] int32. Computed tokens with all of this step's. 0 for a request that is
            none, which has no logits either.
        num_logits: [num_reqs] int32. Logits of each request.
        token_ids: [num_reqs, 1 + k] int64, contiguous. What each sampled; more than `num_sampled`
            is not read.
        num_sampled: [num_reqs] int32. Taken to be of [0, num_logits].
        token_table: [max_rows, max_len + 1] int32. Written behind the accepted tokens. The last
            column takes the token that a full row's last logit draws.
        num_computed_tokens: [max_rows] int32. Written at rows: `seq_lens` without what was
            rejected.
    """
    row, accepted, progress = rows.long(), num_logits, seq_lens
    if num_sampled is not num_logits:  # a head that accepts all spares a CPU some operations
        accepted = torch.minimum(num_sampled, num_logits).clamp_(min=0)
        progress = seq_lens - num_logits + accepted
    num_computed_tokens.index_copy_(0, row, progress)
    if token_ids.shape[1] == 1 and int(accepted.min()) > 0:  # a decode, in few operations
        token_table.index_put_((row, progress.long()), token_ids[:, 0].to(torch.int32))
        return
    request, offset = (torch.arange(token_ids.shape[1]) < accepted[:, None]).nonzero(as_tuple=True)
    position = (progress - accepted)[request].long() + offset + 1
    kept = token_ids[request, offset].to(torch.int32)
    token_table.index_put_((row[request], position), kept)


commit_step = TwinOp(
    "batch.commit_step",
    reference=_commit_step_reference,
    launch=_commit_step_launch,
    mutates=frozenset({"token_table", "num_computed_tokens"}),
)


@triton.jit(do_not_specialize=["num_reqs", "width"])
def _tokens_by_request_kernel(
    drawn_ptr: tl.tensor,
    cu_num_logits_ptr: tl.tensor,
    num_reqs: tl.tensor,
    width: tl.tensor,
    token_ids_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_reqs
    first = tl.load(cu_num_logits_ptr + index, mask=mask, other=0)
    end = tl.load(cu_num_logits_ptr + index + 1, mask=mask, other=0)
    out = token_ids_ptr + index.to(tl.int64) * width
    for offset in range(width):
        has_logit = first + offset < end
        token_id = tl.load(drawn_ptr + first + offset, mask=has_logit, other=0)
        tl.store(out + offset, token_id, mask=mask)


def _tokens_by_request_launch(drawn: Tensor, cu_num_logits: Tensor, token_ids: Tensor) -> Launch:
    block = 128
    num_reqs, width = token_ids.shape
    args = (drawn, cu_num_logits, num_reqs, width, token_ids)
    return Launch(_tokens_by_request_kernel, (cdiv(num_reqs, block),), args, {"BLOCK": block})


def _tokens_by_request_reference(drawn: Tensor, cu_num_logits: Tensor, token_ids: Tensor) -> None:
    """Put the token of each logit beside its request.

    Args:
        drawn: [num_logits] int64. The token that each logit drew.
        cu_num_logits: [num_reqs + 1] int32. First logit of each request; the last entry is
            `num_logits`.
        token_ids: [num_reqs, 1 + k] int64, contiguous. Written whole: the tokens of each request's
            logits, and 0 behind them.
    """
    counts = cu_num_logits.diff()
    token_ids.zero_()
    token_ids[torch.arange(token_ids.shape[1]) < counts[:, None]] = drawn


tokens_by_request = TwinOp(
    "batch.tokens_by_request",
    reference=_tokens_by_request_reference,
    launch=_tokens_by_request_launch,
    mutates=frozenset({"token_ids"}),
)


def by_request(
    drawn: Tensor, cu_num_logits: Tensor, num_logits: Tensor, max_num_logits: int
) -> SampledTokens:
    """Return tokens that were drawn for logits as tokens of requests, each accepted.

    Args:
        drawn: [num_logits] int64.
        cu_num_logits: [num_reqs + 1] int32.
        num_logits: [num_reqs] int32. Logits of each request.
        max_num_logits: Logits of the request that has most.
    """
    shape = num_logits.shape[0], max(max_num_logits, 1)
    token_ids = torch.empty(shape, dtype=torch.int64, device=drawn.device)
    tokens_by_request(drawn, cu_num_logits, token_ids)
    return SampledTokens(token_ids=token_ids, num_sampled=num_logits)
