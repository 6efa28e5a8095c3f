"""Temperature: logits divided by the row's own, in place."""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.stage import LogitsView, StageResources

BLOCK = 2048
"""Tokens that a program divides."""


@triton.jit
def _apply_temperature_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + tl.load(logit_rows_ptr + logit_idx))
    if temperature == 0.0:
        return
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    cell = logits_ptr + logit_idx * logits_stride + token_ids
    # `/` compiles to an approximate division, whose logits would not be the reference's.
    tl.store(cell, tl.div_rn(tl.load(cell, mask=mask, other=0.0), temperature), mask=mask)


def _apply_temperature_launch(logits: Tensor, logit_rows: Tensor, temperature: Tensor) -> Launch:
    num_logits, vocab_size = logits.shape
    return Launch(
        _apply_temperature_kernel,
        (num_logits, triton.cdiv(vocab_size, BLOCK)),
        (logits, logits.stride(0), logit_rows, temperature, vocab_size),
        {"BLOCK": BLOCK},
    )


def _apply_temperature_reference(logits: Tensor, logit_rows: Tensor, temperature: Tensor) -> None:
    """Divide each logits row by the temperature of its state row, in place, rounded to nearest.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        temperature: [max_rows] float32. 0 leaves the row as it is.
    """
    divisor = temperature[logit_rows.long()]
    logits.div_(torch.where(divisor == 0.0, 1.0, divisor).unsqueeze(1))


apply_temperature = TwinOp(
    "sampling.apply_temperature",
    reference=_apply_temperature_reference,
    launch=_apply_temperature_launch,
    mutates=frozenset({"logits"}),
)


class Temperature:
    """The stage. Its only column is shared with the draw; the sampler admits and flushes it."""

    def __init__(self, resources: StageResources) -> None:
        self._temperature = resources.columns.temperature

    def admit(self, row: int, arrival: Arrival) -> None:
        """Nothing: the column is shared."""

    def evict(self, row: int) -> None:
        """Nothing: the column is shared."""

    def flush(self) -> None:
        """Nothing: the column is shared."""

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row is neither greedy nor at temperature 1."""
        temperature = self._temperature.host[rows]
        return bool(((temperature != 0.0) & (temperature != 1.0)).any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Divide the logits."""
        apply_temperature(logits, view.logit_rows, self._temperature.device_tensor)
