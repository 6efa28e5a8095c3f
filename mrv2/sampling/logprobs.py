"""Logprobs of drawn tokens: of the token itself, of the likeliest ones, or of given ones.

Raw ones are of the logits as the model made them, processed ones of the logits that the draw sees;
either may be left as logits. Whichever they are, *values* are what is returned. One pass over the
logits, in the dtype that they have, finds what everything else needs (`likeliest`); then only what
is returned is normalised, so nothing of the size of the logits is made.

A rank counts the tokens whose *value as returned* is at least the given token's, itself included,
as V1 counts: equal values share the worst of their ranks. Normalising subtracts the largest logit
first and the log-sum second, as `torch.log_softmax` does, so that two logits that it rounds to one
logprob are one here, too. Rounding keeps the order, so the pass over the logits counts them as they
are, and only where the next smaller logit rounds to the token's own logprob is the row counted
again.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.config import LogprobsMode
from mrv2.errors import ConfigError
from mrv2.memory.ragged import MirroredLists
from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp
from mrv2.params import ALL_LOGPROBS
from mrv2.plan import Arrival
from mrv2.sampling.likeliest import (
    MAX_TOP,
    merge_summaries,
    row_chunks,
    split_size,
    summarize_logits,
)
from mrv2.sampling.stage import LogitsView, StageResources

BLOCK = 4096
"""Tokens, or columns, that a program takes at a time."""
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """Values of one step's tokens, on the device: column 0 for the given token, then the others."""

    token_ids: Tensor
    """[num_logits, num_columns] int32. Token 0 where a row has fewer than another."""
    values: Tensor
    """[num_logits, num_columns] float32; -inf where a row has fewer than another."""
    ranks: Tensor
    """[num_logits] int32. Rank of the given token, 1 for the likeliest."""
    edges: Tensor
    """[num_logits, 2] float32. Column 0 is the peak: `value = (logit - peak) - log_sum`."""
    log_sum: Tensor
    """[num_logits] float32."""


@triton.jit
def _score_tokens_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    values_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_scored: tl.tensor,
    edges_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    count_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    logits_ptr += logit_idx * logits_stride
    token_ids_ptr += logit_idx * num_columns
    values_ptr += logit_idx * num_columns
    peak = tl.load(edges_ptr + logit_idx * 2)
    log_sum = tl.load(log_sum_ptr + logit_idx)
    offset = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        column = start + offset
        mask = column < num_scored
        token_ids = tl.load(token_ids_ptr + column, mask=mask, other=0)
        value = tl.load(logits_ptr + token_ids, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - peak - log_sum, float("-inf"))
        tl.store(values_ptr + column, value, mask=column < num_columns)
    token = tl.load(logits_ptr + tl.load(token_ids_ptr)).to(tl.float32) - peak - log_sum
    below = tl.load(edges_ptr + logit_idx * 2 + 1) - peak - log_sum
    rank = tl.load(count_ptr + logit_idx)
    if (below < token) == 0:
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab_size, BLOCK):
            token_ids = start + offset
            mask = token_ids < vocab_size
            value = tl.load(logits_ptr + token_ids, mask=mask, other=0.0).to(tl.float32)
            count += (mask & (value - peak - log_sum >= token)).to(tl.int32)
        rank = tl.sum(count, axis=0)
    tl.store(ranks_ptr + logit_idx, rank)


def _score_tokens_launch(
    values: Tensor,
    ranks: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    num_scored: int,
    edges: Tensor,
    log_sum: Tensor,
    count: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    args = (
        values,
        ranks,
        logits,
        logits.stride(0),
        token_ids,
        token_ids.shape[1],
        num_scored,
        edges,
        log_sum,
        count,
        vocab_size,
    )
    return Launch(_score_tokens_kernel, (num_logits,), args, {"BLOCK": BLOCK}, num_warps=_NUM_WARPS)


def _score_tokens_reference(
    values: Tensor,
    ranks: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    num_scored: int,
    edges: Tensor,
    log_sum: Tensor,
    count: Tensor,
) -> None:
    """Write the values of the tokens of each row, and the rank of its first one.

    A row without a softmax has NaN values and rank 0: no comparison with NaN holds.

    Args:
        values: [num_logits, num_columns] float32, contiguous. `(logit - peak) - log_sum`; -inf from
            column `num_scored` on.
        ranks: [num_logits] int32. How many values are at least as large as the first token's.
        logits: [num_logits, vocab_size], any float dtype; taken as float32. Rows may be strided.
        token_ids: [num_logits, num_columns] int32, contiguous.
        num_scored: Columns that hold tokens to score, from 1 to `num_columns`.
        edges: [num_logits, 2] float32, contiguous, of `merge_summaries`. A peak of 0 with a log-sum
            of 0 leaves logits as they are.
        log_sum: [num_logits] float32, likewise.
        count: [num_logits] int32. Logits at least as large as the first token's.
    """
    peak, below = edges.unbind(dim=1)
    ids = token_ids[:, :num_scored].long()
    values[:, :num_scored] = _value(logits.gather(1, ids).float(), peak, log_sum)
    values[:, num_scored:] = -torch.inf
    token = values[:, 0]
    ranks.copy_(count)
    again = (~(_value(below.unsqueeze(1), peak, log_sum)[:, 0] < token)).nonzero().flatten()
    for rows in row_chunks(logits):
        chosen = again[(again >= rows.start) & (again < rows.stop)]
        if len(chosen):
            every = _value(logits[chosen].float(), peak[chosen], log_sum[chosen])
            at_least = every >= token[chosen].unsqueeze(1)
            ranks[chosen] = at_least.sum(dim=1, dtype=torch.int32)


def _value(logits: Tensor, peak: Tensor, log_sum: Tensor) -> Tensor:
    return (logits - peak.unsqueeze(1)).sub_(log_sum.unsqueeze(1))


score_tokens = TwinOp(
    "sampling.score_tokens",
    reference=_score_tokens_reference,
    launch=_score_tokens_launch,
    mutates=frozenset({"values", "ranks"}),
)


@triton.jit
def _list_columns_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    token_ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    words_ptr: tl.tensor,
    edges_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    num_columns: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    first = tl.load(bounds_ptr + row)
    length = tl.load(bounds_ptr + row + 1) - first
    if length == 0:
        return
    logits_ptr += logit_idx * logits_stride
    token_ids_ptr += logit_idx * num_columns
    values_ptr += logit_idx * num_columns
    peak = tl.load(edges_ptr + logit_idx * 2)
    log_sum = tl.load(log_sum_ptr + logit_idx)
    for start in range(0, num_columns - 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < length
        token_ids = tl.load(words_ptr + first + place, mask=mask, other=0)
        inside = mask & (token_ids >= 0) & (token_ids < vocab_size)
        value = tl.load(logits_ptr + token_ids, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - peak - log_sum, float("-inf"))
        stored = place < num_columns - 1
        tl.store(token_ids_ptr + 1 + place, token_ids, mask=stored)
        tl.store(values_ptr + 1 + place, value, mask=stored)


def _list_columns_launch(
    token_ids: Tensor,
    values: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    bounds: Tensor,
    words: Tensor,
    edges: Tensor,
    log_sum: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    lists = (logit_rows, bounds, words)
    args = (token_ids, values, logits, logits.stride(0), *lists, edges, log_sum)
    return Launch(
        _list_columns_kernel,
        (num_logits,),
        (*args, token_ids.shape[1], vocab_size),
        {"BLOCK": 128},
        num_warps=1,
    )


def _list_columns_reference(
    token_ids: Tensor,
    values: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    bounds: Tensor,
    words: Tensor,
    edges: Tensor,
    log_sum: Tensor,
) -> None:
    """Put a row's own list in place of the likeliest tokens, where it has one.

    Args:
        token_ids: [num_logits, num_columns] int32, contiguous. From column 1 on the list in its
            order, then 0.
        values: [num_logits, num_columns] float32, contiguous. `(logit - peak) - log_sum`, then
            -inf, which a token outside the vocabulary has, too.
        logits: [num_logits, vocab_size], any float dtype; taken as float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        bounds: [max_rows + 1] int32. Row r lists words[bounds[r]:bounds[r + 1]], at most
            `num_columns - 1` tokens.
        words: [num_words] int32. Token ids.
        edges: [num_logits, 2] float32, contiguous, as for `score_tokens`.
        log_sum: [num_logits] float32, likewise.
    """
    rows = logit_rows.long()
    first = bounds[rows]
    lengths = bounds[rows + 1] - first
    place = torch.arange(token_ids.shape[1] - 1, dtype=torch.int32)
    listed = (place < lengths.unsqueeze(1)) & (lengths > 0).unsqueeze(1)
    cells = torch.where(listed, first.unsqueeze(1) + place, 0).long()
    ids = torch.where(listed, words[cells], 0)
    inside = listed & (ids >= 0) & (ids < logits.shape[1])
    chosen = logits.gather(1, torch.where(inside, ids, 0).long()).float()
    scores = _value(chosen, edges[:, 0], log_sum).masked_fill_(~inside, -torch.inf)
    has_list = (lengths > 0).unsqueeze(1)
    token_ids[:, 1:] = torch.where(has_list, ids, token_ids[:, 1:])
    values[:, 1:] = torch.where(has_list, scores, values[:, 1:])


list_columns = TwinOp(
    "sampling.list_columns",
    reference=_list_columns_reference,
    launch=_list_columns_launch,
    mutates=frozenset({"token_ids", "values"}),
)


def gather_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: int,
    *,
    normalises: bool = True,
    num_columns: int | None = None,
) -> LogprobsTensors:
    """Return values of one token and of the likeliest of each row.

    The likeliest come in order, the lower id first among equal logits; in no order among them where
    more than `MAX_TOP` are asked for. NaN counts as the largest logit. A row without a softmax (one
    that holds NaN or +inf, or nothing but -inf) has NaN for every logprob, and rank 0.

    Args:
        logits: [num_logits, vocab_size], any float dtype. Left as they are.
        token_ids: [num_logits] int32 or int64. One token of each row.
        num_logprobs: How many of the likeliest to return, from 0 to the vocabulary's size.
        normalises: Whether values are logprobs; otherwise they are the logits, in float32.
        num_columns: Width of the result, larger than `num_logprobs`, which it exceeds by 1 by
            default.
    """
    num_logits, device = len(logits), logits.device
    num_columns = num_columns or 1 + num_logprobs
    size = split_size(logits)
    num_splits = cdiv(logits.shape[1], size)
    num_top = num_logprobs if num_logprobs <= MAX_TOP else 0
    # What is summarised of each split, then of each row.
    split_edges = torch.empty((num_logits, num_splits, 2), device=device)
    split_log_sums = torch.empty((num_logits, num_splits), device=device)
    split_words = torch.empty(
        (num_logits, num_splits, 1 + num_top), dtype=torch.int64, device=device
    )
    summarize_logits(split_edges, split_log_sums, split_words, logits, token_ids, size)
    ids = torch.empty((num_logits, num_columns), dtype=torch.int32, device=device)
    edges, log_sum = (torch.empty(shape, device=device) for shape in ((num_logits, 2), num_logits))
    count, ranks = torch.empty((2, num_logits), dtype=torch.int32, device=device)
    parts = (split_edges, split_log_sums, split_words)
    merge_summaries(ids, edges, log_sum, count, token_ids, *parts)
    if num_top < num_logprobs:
        ids[:, 1 : 1 + num_logprobs] = torch.topk(logits, num_logprobs, dim=1).indices
    if not normalises:
        edges[:, 0] = 0.0
        log_sum.zero_()
    values = torch.empty((num_logits, num_columns), device=device)
    score_tokens(values, ranks, logits, ids, 1 + num_logprobs, edges, log_sum, count)
    return LogprobsTensors(token_ids=ids, values=values, ranks=ranks, edges=edges, log_sum=log_sum)


_NO_LOGPROBS = -1
"""In the host column of counts, where `ALL_LOGPROBS` stands as the size of the vocabulary: so the
largest count of a batch is the one to use."""


class SampledLogprobs:
    """Which logprobs each row wants of the tokens that it draws; a `RowState`.

    Each row gets what it asked for, whatever its neighbours ask: the drawn token, then its list, or
    else its likeliest tokens, and what another row made the result wider by.

    Args:
        resources: Sizes.
        mode: Which logits they are of, and whether they are normalised.
    """

    def __init__(self, resources: StageResources, mode: LogprobsMode) -> None:
        self.of_processed = mode in ("processed_logprobs", "processed_logits")
        """Whether they are of the logits that the draw sees."""
        self._normalises = mode in ("raw_logprobs", "processed_logprobs")
        self._vocab_size = resources.vocab_size
        self._counts = np.full(resources.num_rows, _NO_LOGPROBS, dtype=np.int32)
        self._list_lens = np.zeros(resources.num_rows, dtype=np.int32)
        self._lists = MirroredLists(resources.num_rows, resources.transfers)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's wishes; a list that is not empty takes the place of a count.

        Raises:
            ConfigError: More logprobs are asked for than there are tokens in the vocabulary, or
                those of a token outside of it.
        """
        sampling = arrival.sampling
        listed, count = sampling.logprob_token_ids or (), sampling.num_logprobs
        outside = [token_id for token_id in listed if not 0 <= token_id < self._vocab_size]
        if outside:
            raise ConfigError(
                f"logprob_token_ids has {outside}, outside the vocabulary of {self._vocab_size} "
                "tokens; leave them out"
            )
        if listed:
            count = 0
        elif count is None:
            count = _NO_LOGPROBS
        elif count > self._vocab_size:
            raise ConfigError(
                f"num_logprobs is {count}, more than the vocabulary's {self._vocab_size} "
                f"tokens; ask for fewer, or for {ALL_LOGPROBS} (all)"
            )
        elif count == ALL_LOGPROBS:
            count = self._vocab_size
        self._counts[row] = count
        self._list_lens[row] = len(listed)
        self._lists.set(row, listed)

    def evict(self, row: int) -> None:
        """Forget a row."""
        self._counts[row] = _NO_LOGPROBS
        self._list_lens[row] = 0
        self._lists.clear(row)

    def flush(self) -> None:
        """Queue the lists to the device; the counts are the host's."""
        self._lists.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether any of `rows` wants logprobs."""
        return bool((self._counts[rows] != _NO_LOGPROBS).any())

    def gather(self, logits: Tensor, token_ids: Tensor, view: LogitsView) -> LogprobsTensors:
        """Return the logprobs of a step in which some row wants them.

        Args:
            logits: [num_logits, vocab_size], any float dtype: raw or processed. Left as they are.
            token_ids: [num_logits] int64. The drawn tokens.
            view: Whose logits these are.
        """
        count = int(self._counts[view.rows_np].max())
        longest = int(self._list_lens[view.rows_np].max())
        gathered = gather_logprobs(
            logits,
            token_ids,
            count,
            normalises=self._normalises,
            num_columns=1 + max(count, longest),
        )
        if longest:
            list_columns(
                gathered.token_ids,
                gathered.values,
                logits,
                view.logit_rows,
                self._lists.bounds,
                self._lists.words,
                gathered.edges,
                gathered.log_sum,
            )
        return gathered
