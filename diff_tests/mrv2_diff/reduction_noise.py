"""How far logprobs depend on the order in which a row of logits is summed.

A runner's batches and chunks change the order in which its matrix products are summed, but not
that of its normalizer over the vocabulary: V1 beside itself gives equal logprobs for equal logits.
Runners with kernels of their own sum the vocabulary in orders of their own, and both are right. So
this measures V1's own normalizer against itself, on the same logits in other orders of the
vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mrv2_diff.compare.right import row_sizes
from mrv2_diff.compare.steps import OF_PROMPTS
from mrv2_diff.compare.tally import FloatArray

Normalize = Callable[[Tensor], Tensor]
"""Returns the logprobs of rows of logits, [num_rows, vocab_size]."""

NUM_ORDERS = 4
"""Orders of the vocabulary: the reverse, and random ones."""
_NUM_LISTED = 5
"""Logprobs of a row that give a prompt's table its size, as those that a request lists do."""


class ReductionNoise:
    """The largest differences so far, in spacings.

    Args:
        normalize: The reference's own.
        vocab_size: Columns of each row.
    """

    def __init__(self, normalize: Normalize, vocab_size: int) -> None:
        self._normalize = normalize
        random = torch.Generator().manual_seed(11)
        self._orders = [torch.arange(vocab_size - 1, -1, -1)] + [
            torch.randperm(vocab_size, generator=random) for _ in range(NUM_ORDERS - 1)
        ]
        self.spacings = {"logprobs": 0.0, OF_PROMPTS: 0.0}
        """By value: at the size of the row's largest logit, and of its listed logprobs."""

    def add(self, logits: Tensor) -> None:
        """Measure rows of logits, [num_rows, vocab_size]. Rows that are not finite say nothing."""
        logits = logits[torch.isfinite(logits).all(dim=1)]
        if not len(logits):
            return
        usual = self._normalize(logits).double().numpy()
        listed = -np.sort(-usual, axis=1)[:, :_NUM_LISTED]
        sizes = {"logprobs": row_sizes(logits.double().numpy()), OF_PROMPTS: row_sizes(listed)}
        for order in self._orders:
            reordered = torch.empty_like(logits)
            reordered[:, order] = self._normalize(logits[:, order].contiguous())
            apart = np.abs(usual - reordered.double().numpy()).max(axis=1)
            for value, size in sizes.items():
                self.spacings[value] = max(self.spacings[value], _in_spacings(apart, size))


def _in_spacings(apart: FloatArray, size: FloatArray) -> float:
    return float((apart / np.spacing(size.astype(np.float32)).astype(np.float64)).max())
