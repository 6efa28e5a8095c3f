"""Bad words: sequences of tokens whose last one is not drawn where the others have just been.

Whether a word's beginning was output is read from the row's tokens for each logit, so there is no
state that a preemption, a resume or a draft could leave behind.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.memory.ragged import MirroredLists
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.stage import LogitsStage, LogitsView, StageResources

BLOCK = 128
"""Words that a program takes at a time, one a lane."""


def encode(words: Sequence[Sequence[int]]) -> list[int]:
    """Return words as the list of a row: how many, where each ends, then all of their tokens.

    With the ends at the front, each lane finds its word without reading those before it.
    """
    if not words:
        return []
    ends = np.cumsum([len(word) for word in words]).tolist()
    return [len(words), *ends, *(token for word in words for token in word)]


@triton.jit
def _bad_words_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_ids_stride: tl.tensor,
    prompt_len_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    words_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx).to(tl.int64)
    begin = tl.load(bounds_ptr + row)
    if tl.load(bounds_ptr + row + 1) == begin:
        return
    num_words = tl.load(words_ptr + begin)
    ends_ptr = words_ptr + begin + 1
    tokens_ptr = ends_ptr + num_words
    position = tl.load(positions_ptr + logit_idx).to(tl.int32)
    num_outputs = position - tl.load(prompt_len_ptr + row)
    history_ptr = token_ids_ptr + row * token_ids_stride
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        mask = word < num_words
        last = tl.load(ends_ptr + word, mask=mask, other=1) - 1
        start = tl.load(ends_ptr + word - 1, mask=mask & (word > 0), other=0)
        num_before = last - start
        bad = mask & (num_before <= num_outputs)
        longest = tl.max(tl.where(bad, num_before, 0), axis=0)
        for back in range(1, longest + 1):
            reads = bad & (back <= num_before)
            wanted = tl.load(tokens_ptr + last - back, mask=reads, other=0)
            found = tl.load(history_ptr + position - back)
            bad = bad & ((wanted == found) | (back > num_before))
        token_id = tl.load(tokens_ptr + last, mask=bad, other=-1)
        bad = bad & (token_id >= 0) & (token_id < vocab_size)
        cell = logits_ptr + logit_idx * logits_stride + token_id
        tl.store(cell, float("-inf"), mask=bad)


def _bad_words_launch(
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
    bounds: Tensor,
    words: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    args = (
        logits,
        logits.stride(0),
        logit_rows,
        positions,
        token_ids,
        token_ids.stride(0),
        prompt_len,
        bounds,
        words,
        vocab_size,
    )
    return Launch(_bad_words_kernel, (num_logits,), args, {"BLOCK": BLOCK})


def _bad_words_reference(
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
    bounds: Tensor,
    words: Tensor,
) -> None:
    """Write -inf to the last token of each word whose other tokens end the output, in place.

    The output of a logit is its row's tokens from the prompt's end to before the position that it
    draws. A word of one token is always bad. A word with more tokens before its last than there are
    outputs is not: the prompt completes no word.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        positions: [num_logits] int64. Length of each logit's history.
        token_ids: [max_rows, max_len] int32. Rows may be strided.
        prompt_len: [max_rows] int32. How many of the tokens are the prompt.
        bounds: [max_rows + 1] int32. Row r has words[bounds[r]:bounds[r + 1]], empty for none.
        words: [num_words] int32. Each row's as `encode` makes them. Last tokens outside the
            vocabulary mask nothing.
    """
    rows = logit_rows.long()
    begins = bounds[rows].long()
    listed = (bounds[rows + 1] > begins).nonzero().flatten()
    counts = words[begins[listed]].long()
    # One entry for each pair of a logit and a word of its row.
    which = listed.repeat_interleave(counts)
    number = torch.arange(len(which)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    base = begins[which]
    tokens_at = base + 1 + counts.repeat_interleave(counts)
    last = tokens_at + words[base + 1 + number] - 1
    first = tokens_at + torch.where(number == 0, 0, words[base + number])
    num_before = last - first
    num_outputs = positions[which] - prompt_len[rows[which]]
    masked = words[last]
    bad = (num_before <= num_outputs) & (masked >= 0) & (masked < logits.shape[1])
    back = 1
    while True:
        pairs = (bad & (num_before >= back)).nonzero().flatten()
        if not len(pairs):
            break
        found = token_ids[rows[which[pairs]], positions[which[pairs]] - back]
        bad[pairs] = found == words[last[pairs] - back]
        back += 1
    logits[which[bad], masked[bad].long()] = -torch.inf


mask_bad_words = TwinOp(
    "sampling.mask_bad_words",
    reference=_bad_words_reference,
    launch=_bad_words_launch,
    mutates=frozenset({"logits"}),
)


class BadWords(LogitsStage):
    """The stage. Each row has a list of words, most of them an empty one."""

    def __init__(self, resources: StageResources) -> None:
        self._words = MirroredLists(resources.num_rows, resources.transfers)
        self._requests = resources.requests

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take the request's words into its row."""
        self._words.set(row, encode(arrival.sampling.bad_words))

    def evict(self, row: int) -> None:
        """Leave the row without words."""
        self._words.clear(row)

    def flush(self) -> None:
        """Queue what changed to the device."""
        self._words.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row has words."""
        return bool(self._words.is_set[rows].any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Mask the tokens that would complete a word."""
        mask_bad_words(
            logits,
            view.logit_rows,
            view.positions,
            self._requests.token_ids.tensor,
            self._requests.prompt_len.device_tensor,
            self._words.bounds,
            self._words.words,
        )
