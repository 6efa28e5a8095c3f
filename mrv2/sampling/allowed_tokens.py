"""Allowed tokens: a request draws from a set of its own and from nothing else."""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.memory.ragged import MirroredLists
from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.bitmask import absent, is_in_set, num_words, pack
from mrv2.sampling.stage import LogitsStage, LogitsView, StageResources

BLOCK = 2048
"""Tokens that a program takes."""


@triton.jit
def _allow_tokens_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    words_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    start = tl.load(bounds_ptr + row)
    if start == tl.load(bounds_ptr + row + 1):
        return
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    allowed = is_in_set(words_ptr + start, token_ids, mask)
    # What is allowed is neither read nor written.
    cell = logits_ptr + logit_idx * logits_stride + token_ids
    tl.store(cell, float("-inf"), mask=mask & ~allowed)


def _allow_tokens_launch(
    logits: Tensor, logit_rows: Tensor, words: Tensor, bounds: Tensor
) -> Launch:
    num_logits, vocab_size = logits.shape
    return Launch(
        _allow_tokens_kernel,
        (num_logits, cdiv(vocab_size, BLOCK)),
        (logits, logits.stride(0), logit_rows, words, bounds, vocab_size),
        {"BLOCK": BLOCK},
    )


def _allow_tokens_reference(
    logits: Tensor, logit_rows: Tensor, words: Tensor, bounds: Tensor
) -> None:
    """Set every logit outside its row's set to -inf, in place; rows without a set stay.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        words: [num_words] int32. Sets of tokens, a bit each, as `bitmask.pack` makes them.
        bounds: [max_rows + 1] int32. Row r's set is words[bounds[r]:bounds[r + 1]], which are
            ceil(vocab_size / 32) words, or none.
    """
    vocab_size = logits.shape[1]
    rows = logit_rows.long()
    starts = bounds[rows].long()
    (logit_idx,) = (bounds[rows + 1] > starts).nonzero(as_tuple=True)
    offsets = torch.arange(num_words(vocab_size), device=words.device)
    sets = words[starts[logit_idx].unsqueeze(1) + offsets]
    masked = logits[logit_idx].masked_fill_(absent(sets, vocab_size), float("-inf"))
    logits.index_copy_(0, logit_idx, masked)


allow_tokens = TwinOp(
    "sampling.allow_tokens",
    reference=_allow_tokens_reference,
    launch=_allow_tokens_launch,
    mutates=frozenset({"logits"}),
)


class AllowedTokens(LogitsStage):
    """The stage; a row without allowed tokens allows all."""

    def __init__(self, resources: StageResources) -> None:
        self._sets = MirroredLists(resources.num_rows, resources.transfers)
        self._vocab_size = resources.vocab_size

    def admit(self, row: int, arrival: Arrival) -> None:
        """Keep the request's set."""
        token_ids = arrival.sampling.allowed_token_ids
        if token_ids is None:
            self._sets.clear(row)
        else:
            self._sets.set(row, pack(token_ids, self._vocab_size))

    def evict(self, row: int) -> None:
        """Drop the row's set."""
        self._sets.clear(row)

    def flush(self) -> None:
        """Queue the sets to the device if one changed."""
        self._sets.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row has a set."""
        return bool(self._sets.is_set[rows].any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Leave only what is allowed."""
        allow_tokens(logits, view.logit_rows, self._sets.words, self._sets.bounds)
