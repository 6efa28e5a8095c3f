"""Min-p: tokens much less likely than the likeliest are not drawn."""

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.memory.mirrored import MirroredTensor
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.stage import LogitsView, NarrowingStage, StageResources

BLOCK = 8192
"""Tokens that a program takes at a time: 41 us for 256 rows of 151,936 float32 with 16 warps, on an
H200, 2026-11-29; the fastest of 4096 to 16384."""
_NUM_WARPS = 16


@triton.jit
def _cut_by_min_p_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    cutoff_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    log_min_p = tl.load(log_min_p_ptr + row)
    if log_min_p == float("-inf") or tl.load(temperature_ptr + row) == 0.0:
        return
    divisor = tl.load(divisor_ptr + row)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    logits_ptr += logit_idx * logits_stride
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        mask = token_ids < vocab_size
        logit = tl.load(logits_ptr + token_ids, mask=mask, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, logit, propagate_nan=tl.PropagateNan.ALL)
    if tl.max((largest != largest).to(tl.int32), axis=0) == 0:
        # Division keeps the order, so the largest may be divided last.
        lowest = tl.div_rn(tl.max(largest, axis=0), divisor) + log_min_p
        cutoff = tl.load(cutoff_ptr + logit_idx)
        tl.store(cutoff_ptr + logit_idx, tl.maximum(cutoff, lowest))


def _cut_by_min_p_launch(
    cutoff: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    temperature: Tensor,
    divisor: Tensor,
    log_min_p: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    args = (
        cutoff,
        logits,
        logits.stride(0),
        logit_rows,
        temperature,
        divisor,
        log_min_p,
        vocab_size,
    )
    return Launch(_cut_by_min_p_kernel, (num_logits,), args, {"BLOCK": BLOCK}, num_warps=_NUM_WARPS)


def _cut_by_min_p_reference(
    cutoff: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    temperature: Tensor,
    divisor: Tensor,
    log_min_p: Tensor,
) -> None:
    """Raise cutoffs to the row's largest logit and the logarithm of min-p, both added.

    A token's probability is at least min-p times the largest one exactly where its logit, divided,
    is at least that. A row that holds a NaN is left alone.

    Args:
        cutoff: [num_logits] float32, in units of the divided logits. Only raised.
        logits: [num_logits, vocab_size], any float dtype. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        temperature: [max_rows] float32. Rows of 0 are greedy and are left alone.
        divisor: [max_rows] float32. Divides the logits, rounded to nearest; 0 and 1 do nothing.
        log_min_p: [max_rows] float32. At most 0; -inf leaves a row alone.
    """
    rows = logit_rows.long()
    wanted = (log_min_p[rows] > -torch.inf) & (temperature[rows] != 0.0)
    which = wanted.nonzero().flatten()
    if not len(which):
        return
    rows = rows[which]
    peak = (logits if len(which) == len(logits) else logits[which]).amax(dim=1).float()
    by = divisor[rows]
    lowest = peak / torch.where(by == 0.0, 1.0, by) + log_min_p[rows]
    cutoff[which] = torch.fmax(cutoff[which], lowest)


cut_by_min_p = TwinOp(
    "sampling.cut_by_min_p",
    reference=_cut_by_min_p_reference,
    launch=_cut_by_min_p_launch,
    mutates=frozenset({"cutoff"}),
)


class MinP(NarrowingStage):
    """The stage."""

    def __init__(self, resources: StageResources) -> None:
        self._temperature = resources.columns.temperature
        self._log_min_p = MirroredTensor(resources.num_rows, torch.float32, resources.arena)
        for row in range(resources.num_rows):
            self.evict(row)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take the request's min-p."""
        min_p = arrival.sampling.min_p
        self._log_min_p.set(row, math.log(min_p) if min_p else -math.inf)

    def evict(self, row: int) -> None:
        """Cut nothing from the row."""
        self._log_min_p.set(row, -math.inf)

    def flush(self) -> None:
        """Stage what changed."""
        self._log_min_p.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row that is drawn at random has a min-p."""
        cuts = self._log_min_p.host[rows] > -np.inf
        return bool((cuts & (self._temperature.host[rows] != 0.0)).any())

    def narrow(self, narrowing: Narrowing, logits: Tensor, view: LogitsView) -> None:
        """Raise the cutoffs."""
        cut_by_min_p(
            narrowing.raisable_cutoff(),
            logits,
            view.logit_rows,
            self._temperature.device_tensor,
            narrowing.divisor,
            self._log_min_p.device_tensor,
        )
