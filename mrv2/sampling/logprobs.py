"""Logprobs of the drawn token and of the likeliest ones.

The likeliest tokens are found among the logits, and only what is returned is normalised, so nothing
of the size of the logits is made except what `torch.topk` needs. One op finds what normalising
needs: the largest logit, and the log of the sum of exponentials below it. Another ranks the drawn
token with that.

A rank counts the tokens whose *logprob as returned* is at least the drawn token's, itself included,
as V1 counts: equal logprobs share the worst of their ranks. Normalising subtracts the largest logit
first and the log-sum second, as `torch.log_softmax` does, so that two logits that it rounds to one
logprob are one here, too.
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
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import ALL_LOGPROBS, Arrival
from mrv2.sampling.stage import LogitsView, StageResources

BLOCK = 8192
"""Tokens that a program takes at a time. The fastest of 2048 to 16384 with 4 to 32 warps, for 1, 64
and 256 rows of 151,936 on an H200, 2026-11-29: 32 us for the normalizers of 64 rows."""
_NUM_WARPS = 32
_CHUNK_ELEMENTS = 1 << 18
"""Elements in a temporary of a reference, which takes rows in chunks of about this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """Logprobs of one step, on the device: column 0 for the drawn token, then the likeliest."""

    token_ids: Tensor
    """[num_logits, 1 + num_logprobs] int64."""
    values: Tensor
    """[num_logits, 1 + num_logprobs] float32."""
    ranks: Tensor
    """[num_logits] int64. Rank of the drawn token, 1 for the likeliest."""


@triton.jit
def _normalizers_kernel(
    peak_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    logits_ptr += logit_idx * logits_stride
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        mask = token_ids < vocab_size
        logit = tl.load(logits_ptr + token_ids, mask=mask, other=float("-inf"))
        largest = tl.maximum(largest, logit)
    peak = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        mask = token_ids < vocab_size
        logit = tl.load(logits_ptr + token_ids, mask=mask, other=float("-inf"))
        total += tl.exp(logit - peak)
    log_sum = tl.log(tl.sum(total, axis=0))
    tl.store(peak_ptr + logit_idx, tl.where(log_sum != log_sum, log_sum, peak))
    tl.store(log_sum_ptr + logit_idx, log_sum)


def _normalizers_launch(peak: Tensor, log_sum: Tensor, logits: Tensor) -> Launch:
    num_logits, vocab_size = logits.shape
    return Launch(
        _normalizers_kernel,
        (num_logits,),
        (peak, log_sum, logits, logits.stride(0), vocab_size),
        {"BLOCK": BLOCK},
        num_warps=_NUM_WARPS,
    )


def _normalizers_reference(peak: Tensor, log_sum: Tensor, logits: Tensor) -> None:
    """Write what turns logits into logprobs: `logprob = (logit - peak) - log_sum`.

    Both are NaN for a row without a softmax: one that holds NaN or +inf, or nothing but -inf.

    Args:
        peak: [num_logits] float32. The largest logit.
        log_sum: [num_logits] float32. Log of the sum of exp(logit - peak).
        logits: [num_logits, vocab_size] float32. Rows may be strided.
    """
    for chunk in _row_chunks(logits):
        # The largest logprob is (peak - peak) - log_sum, exactly.
        log_sum[chunk] = -torch.log_softmax(logits[chunk], dim=1).amax(dim=1)
    peak.copy_(torch.where(log_sum.isnan(), log_sum, logits.amax(dim=1)))


normalizers = TwinOp(
    "sampling.normalizers",
    reference=_normalizers_reference,
    launch=_normalizers_launch,
    mutates=frozenset({"peak", "log_sum"}),
)


@triton.jit
def _ranks_kernel(
    ranks_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    logits_ptr += logit_idx * logits_stride
    peak = tl.load(peak_ptr + logit_idx)
    log_sum = tl.load(log_sum_ptr + logit_idx)
    drawn = tl.load(logits_ptr + tl.load(token_ids_ptr + logit_idx)) - peak - log_sum
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        mask = token_ids < vocab_size
        logprob = tl.load(logits_ptr + token_ids, mask=mask, other=0.0) - peak - log_sum
        count += (mask & (logprob >= drawn)).to(tl.int32)
    tl.store(ranks_ptr + logit_idx, tl.sum(count, axis=0).to(tl.int64))


def _ranks_launch(
    ranks: Tensor, logits: Tensor, token_ids: Tensor, peak: Tensor, log_sum: Tensor
) -> Launch:
    num_logits, vocab_size = logits.shape
    args = (ranks, logits, logits.stride(0), token_ids, peak, log_sum, vocab_size)
    return Launch(_ranks_kernel, (num_logits,), args, {"BLOCK": BLOCK}, num_warps=_NUM_WARPS)


def _ranks_reference(
    ranks: Tensor, logits: Tensor, token_ids: Tensor, peak: Tensor, log_sum: Tensor
) -> None:
    """Write the rank of one token in each row: the count of logprobs at least as large as its own.

    A row without a softmax gives 0: no comparison with NaN holds.

    Args:
        ranks: [num_logits] int64.
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        token_ids: [num_logits] int64. The tokens to rank.
        peak: [num_logits] float32, of `normalizers`.
        log_sum: [num_logits] float32, of `normalizers`.
    """
    for chunk in _row_chunks(logits):
        logprobs = _normalized(logits[chunk], peak[chunk], log_sum[chunk])
        drawn = logprobs.gather(1, token_ids[chunk].unsqueeze(1))
        ranks[chunk] = (logprobs >= drawn).sum(dim=1)


ranks = TwinOp(
    "sampling.ranks",
    reference=_ranks_reference,
    launch=_ranks_launch,
    mutates=frozenset({"ranks"}),
)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> LogprobsTensors:
    """Return logprobs of the drawn tokens and of the likeliest of each row.

    Args:
        logits: [num_logits, vocab_size] float32. Left as they are.
        token_ids: [num_logits] int64. The drawn tokens.
        num_logprobs: How many of the likeliest to return, from 0 to the vocabulary's size.
    """
    peak, log_sum = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    normalizers(peak, log_sum, logits)
    token_ranks = torch.empty_like(token_ids)
    ranks(token_ranks, logits, token_ids, peak, log_sum)
    drawn = token_ids.unsqueeze(1)
    likeliest = torch.topk(logits, num_logprobs, dim=1)
    chosen = torch.cat((logits.gather(1, drawn), likeliest.values), dim=1)
    return LogprobsTensors(
        token_ids=torch.cat((drawn, likeliest.indices), dim=1),
        values=_normalized(chosen, peak, log_sum),
        ranks=token_ranks,
    )


def _normalized(logits: Tensor, peak: Tensor, log_sum: Tensor) -> Tensor:
    return (logits - peak.unsqueeze(1)).sub_(log_sum.unsqueeze(1))


def _row_chunks(logits: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


_NO_LOGPROBS = -1
"""In the host column of counts, where `ALL_LOGPROBS` stands as the size of the vocabulary: so the
largest count of a batch is the one to use."""


class SampledLogprobs:
    """Which logprobs each row wants of the tokens that it draws; a `RowState`.

    Args:
        resources: Sizes.
        mode: Which logits they are of, and whether they are normalised.
    """

    def __init__(self, resources: StageResources, mode: LogprobsMode) -> None:
        self.of_processed = mode in ("processed_logprobs", "processed_logits")
        """Whether they are of the logits that the draw sees."""
        self._vocab_size = resources.vocab_size
        self._counts = np.full(resources.max_num_reqs, _NO_LOGPROBS, dtype=np.int32)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's wishes.

        Raises:
            ConfigError: More logprobs are asked for than there are tokens in the vocabulary.
        """
        count = arrival.sampling.num_logprobs
        if count is None:
            count = _NO_LOGPROBS
        elif count > self._vocab_size:
            raise ConfigError(
                f"num_logprobs is {count}, more than the vocabulary's {self._vocab_size} "
                f"tokens; ask for fewer, or for {ALL_LOGPROBS} (all)"
            )
        elif count == ALL_LOGPROBS:
            count = self._vocab_size
        self._counts[row] = count

    def evict(self, row: int) -> None:
        """Forget a row."""
        self._counts[row] = _NO_LOGPROBS

    def flush(self) -> None:
        """Nothing: all of it is the host's."""

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
        return gather_logprobs(logits.float(), token_ids, int(self._counts[view.rows_np].max()))
