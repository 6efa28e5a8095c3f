"""A grammar's mask: what a step's structured requests may draw, as the host found it.

The host knows the grammars and the tokens so far; it hands a set of tokens over for each logit that
a grammar constrains, after the forward and before the sampling. The mask comes before everything
else that reads logits, raw logprobs included.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from mrv2.errors import ProtocolError
from mrv2.memory.transfers import Transfers
from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp
from mrv2.sampling.bitmask import absent, is_in_set, num_words

BLOCK = 2048
"""Tokens that a program takes."""


@triton.jit
def _apply_bitmask_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    bitmask_ptr: tl.tensor,
    bitmask_stride: tl.tensor,
    logit_idx_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    mask_idx = tl.program_id(0).to(tl.int64)
    logit_idx = tl.load(logit_idx_ptr + mask_idx).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    allowed = is_in_set(bitmask_ptr + mask_idx * bitmask_stride, token_ids, mask)
    # What is allowed is neither read nor written.
    cell = logits_ptr + logit_idx * logits_stride + token_ids
    tl.store(cell, float("-inf"), mask=mask & ~allowed)


def _apply_bitmask_launch(logits: Tensor, bitmask: Tensor, logit_idx: Tensor) -> Launch:
    vocab_size = logits.shape[1]
    return Launch(
        _apply_bitmask_kernel,
        (len(logit_idx), cdiv(vocab_size, BLOCK)),
        (logits, logits.stride(0), bitmask, bitmask.stride(0), logit_idx, vocab_size),
        {"BLOCK": BLOCK},
    )


def _apply_bitmask_reference(logits: Tensor, bitmask: Tensor, logit_idx: Tensor) -> None:
    """Set every logit that a mask does not allow to -inf, in place; rows without a mask stay.

    Args:
        logits: [num_logits, vocab_size], any float dtype. Rows may be strided.
        bitmask: [num_masked, ceil(vocab_size / 32)] int32. Bit t % 32 of word t // 32 is set where
            token t is allowed.
        logit_idx: [num_masked] int32. Row of the logits that each mask is for, no row twice.
    """
    rows = logit_idx.long()
    forbidden = absent(bitmask, logits.shape[1])
    logits.index_copy_(0, rows, logits[rows].masked_fill_(forbidden, float("-inf")))


apply_bitmask = TwinOp(
    "sampling.apply_bitmask",
    reference=_apply_bitmask_reference,
    launch=_apply_bitmask_launch,
    mutates=frozenset({"logits"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMask:
    """The tokens that grammars allow in one step; host values."""

    bitmask: npt.NDArray[np.int32]
    """[num_masked, ceil(vocab_size / 32)]. Bit t % 32 of word t // 32 is set where token t is
    allowed."""
    logit_idx: npt.NDArray[np.int32]
    """[num_masked]. Row of the step's logits that each mask is for; a row is named once at most."""

    def check(self, num_logits: int, vocab_size: int) -> None:
        """Refuse a mask that does not fit a step.

        Raises:
            ProtocolError: The arrays are not of these shapes and types, or a row is outside the
                logits or named twice.
        """
        shape = (len(self.logit_idx), num_words(vocab_size))
        if self.bitmask.shape != shape or self.logit_idx.ndim != 1:
            raise ProtocolError(
                f"the grammar's bitmask is of shape {list(self.bitmask.shape)}; {shape[0]} logits "
                f"and {vocab_size} tokens at 32 a word need {list(shape)}"
            )
        if self.bitmask.dtype != np.int32 or self.logit_idx.dtype != np.int32:
            raise ProtocolError(
                f"the grammar's arrays are of {self.bitmask.dtype} and {self.logit_idx.dtype}; "
                "make both int32"
            )
        rows = self.logit_idx
        if len(rows) == 0:
            return
        if not 0 <= rows.min() <= rows.max() < num_logits or len(np.unique(rows)) != len(rows):
            raise ProtocolError(
                f"the grammar masks the logits {rows.tolist()}; each must be one of the step's "
                f"{num_logits}, and none named twice"
            )

    def apply(self, logits: Tensor, transfers: Transfers) -> None:
        """Queue the mask's upload and its effect on the logits, in place.

        Args:
            logits: [num_logits, vocab_size], any float dtype.
            transfers: Carries the mask.
        """
        if len(self.logit_idx):
            apply_bitmask(logits, transfers.upload(self.bitmask), transfers.upload(self.logit_idx))
