"""Sets of tokens with one bit for each: 32 to a word, the lowest bit first.

So a grammar says what it allows, and so do requests that allow few tokens: an eighth of a byte a
token. Bits past the vocabulary mean nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Return the words of a set of tokens of this vocabulary."""
    return -(-vocab_size // _WORD_BITS)


def pack(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the set of these tokens.

    Args:
        token_ids: Each in [0, vocab_size); repeats change nothing.
        vocab_size: Tokens.

    Returns:
        [num_words(vocab_size)] int32.
    """
    bits = np.zeros(num_words(vocab_size) * _WORD_BITS, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def absent(words: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens are not in each set.

    Args:
        words: [num_sets, num_words(vocab_size)] int32.
        vocab_size: Tokens.

    Returns:
        [num_sets, vocab_size] bool.
    """
    # By bytes: words would make a temporary of 4 bytes a token.
    single_bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    bits = words.view(torch.uint8).unsqueeze(2) & single_bits.to(words.device)
    return (bits == 0).flatten(1)[:, :vocab_size]


@triton.jit
def is_in_set(words_ptr: tl.tensor, token_ids: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Say for a block of tokens which are in the set whose first word is pointed to."""
    words = tl.load(words_ptr + token_ids // 32, mask=mask, other=0)
    return ((words >> (token_ids % 32)) & 1) != 0
