"""Logit bias: a request adds what it likes to the logits of some tokens."""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.memory.ragged import MirroredLists, places_of
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.stage import LogitsStage, LogitsView, StageResources

BLOCK = 256
"""Tokens that the one program of a row takes at a time."""


@triton.jit
def _add_bias_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    words_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    start = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    for first in range(start, end, 2 * BLOCK):
        places = first + 2 * tl.arange(0, BLOCK)
        mask = places < end
        token_ids = tl.load(words_ptr + places, mask=mask, other=0)
        bits = tl.load(words_ptr + places + 1, mask=mask, other=0)
        cell = logits_ptr + logit_idx * logits_stride + token_ids
        biased = tl.load(cell, mask=mask, other=0.0) + bits.to(tl.float32, bitcast=True)
        tl.store(cell, biased, mask=mask)


def _add_bias_launch(logits: Tensor, logit_rows: Tensor, words: Tensor, bounds: Tensor) -> Launch:
    return Launch(
        _add_bias_kernel,
        (len(logits),),
        (logits, logits.stride(0), logit_rows, words, bounds),
        {"BLOCK": BLOCK},
    )


def _add_bias_reference(logits: Tensor, logit_rows: Tensor, words: Tensor, bounds: Tensor) -> None:
    """Add each row's biases to its logits, in float32, in place.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        words: [num_words] int32. Pairs of a token id in [0, vocab_size) and the bits of a float32;
            a list has no token twice.
        bounds: [max_rows + 1] int32. Row r's pairs are words[bounds[r]:bounds[r + 1]].
    """
    owners, pairs = places_of(bounds // 2, logit_rows)
    token_ids = words[2 * pairs].long()
    biases = words[2 * pairs + 1].view(torch.float32)
    logits.index_put_((owners, token_ids), biases, accumulate=True)


add_bias = TwinOp(
    "sampling.add_bias",
    reference=_add_bias_reference,
    launch=_add_bias_launch,
    mutates=frozenset({"logits"}),
)


class LogitBias(LogitsStage):
    """The stage."""

    def __init__(self, resources: StageResources) -> None:
        self._pairs = MirroredLists(resources.num_rows, resources.transfers)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Keep the request's biases, rounded to float32."""
        bias = arrival.sampling.logit_bias
        pairs = np.empty((len(bias), 2), dtype=np.int32)
        pairs[:, 0] = list(bias)
        pairs[:, 1] = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
        self._pairs.set(row, pairs.reshape(-1))

    def evict(self, row: int) -> None:
        """Drop the row's biases."""
        self._pairs.clear(row)

    def flush(self) -> None:
        """Queue the biases to the device if one changed."""
        self._pairs.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row has a bias."""
        return bool(self._pairs.is_set[rows].any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Add the biases."""
        add_bias(logits, view.logit_rows, self._pairs.words, self._pairs.bounds)
