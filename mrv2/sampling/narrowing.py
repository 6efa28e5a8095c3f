"""What the draw does to logits as it reads them: divide by a temperature, leave out small ones.

Temperature, min-p, top-k and top-p change no order of the logits: each divides a row or cuts it off
below some value. So they need not rewrite the logits. They leave a divisor for each state row and a
cutoff for each logits row, and the draw applies both to what it reads. `settle` applies them in
place instead, where somebody must see the processed logits: a stage that comes after, an observer,
a caller that asked for processed logprobs. Both ways give the same tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp

BLOCK = 2048
"""Tokens that a program takes."""


@triton.jit
def _settle_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    cutoff_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    divisor = tl.load(divisor_ptr + tl.load(logit_rows_ptr + logit_idx))
    cutoff = tl.load(cutoff_ptr + logit_idx)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    if divisor == 1.0 and cutoff == float("-inf"):
        return
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    cell = logits_ptr + logit_idx * logits_stride + token_ids
    # `/` compiles to an approximate division, whose logits would not be the reference's.
    divided = tl.div_rn(tl.load(cell, mask=mask, other=0.0), divisor)
    tl.store(cell, tl.where(divided < cutoff, float("-inf"), divided), mask=mask)


def _settle_launch(logits: Tensor, logit_rows: Tensor, divisor: Tensor, cutoff: Tensor) -> Launch:
    num_logits, vocab_size = logits.shape
    return Launch(
        _settle_kernel,
        (num_logits, cdiv(vocab_size, BLOCK)),
        (logits, logits.stride(0), logit_rows, divisor, cutoff, vocab_size),
        {"BLOCK": BLOCK},
    )


def _settle_reference(logits: Tensor, logit_rows: Tensor, divisor: Tensor, cutoff: Tensor) -> None:
    """Divide each logits row, rounded to nearest, and cut it off, in place.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided. What lies below the cutoff
            after the division becomes -inf; NaN stays.
        logit_rows: [num_logits] int32. Logit -> state row.
        divisor: [max_rows] float32. 0 and 1 leave the row as it is.
        cutoff: [num_logits] float32. -inf cuts nothing.
    """
    by = divisor[logit_rows.long()]
    logits.div_(torch.where(by == 0.0, 1.0, by).unsqueeze(1))
    logits.masked_fill_(logits < cutoff.unsqueeze(1), float("-inf"))


settle_logits = TwinOp(
    "sampling.settle_logits",
    reference=_settle_reference,
    launch=_settle_launch,
    mutates=frozenset({"logits"}),
)


class Narrowing:
    """The divisor and the cutoff of each row of one step's logits.

    Args:
        no_division: [max_rows] float32 zeros. Never written.
        no_cutoff: [at least num_logits] float32, all -inf. Never written.
        num_logits: Rows of the logits.
    """

    def __init__(self, no_division: Tensor, no_cutoff: Tensor, num_logits: int) -> None:
        self.divisor = no_division
        """[max_rows] float32, by state row. 0 and 1 divide nothing."""
        self.cutoff = no_cutoff
        """[at least num_logits] float32, in units of the divided logits: what is smaller is not
        drawn. -inf cuts nothing. Only read; a stage raises what `raisable_cutoff` returns."""
        self._num_logits = num_logits
        self._no_division = no_division
        self._no_cutoff = no_cutoff

    @property
    def narrows(self) -> bool:
        """Whether any stage has had a say; until then there is nothing to settle."""
        return self.divisor is not self._no_division or self.cutoff is not self._no_cutoff

    def divide_by(self, temperature: Tensor) -> None:
        """Divide by a row's temperature from here on; [max_rows] float32, 0 for none."""
        self.divisor = temperature

    def raisable_cutoff(self) -> Tensor:
        """Return the cutoffs, [num_logits] float32, for a stage to raise in place, never lower."""
        if self.cutoff is self._no_cutoff:
            self.cutoff = self._no_cutoff[: self._num_logits].clone()
        return self.cutoff

    def settle(self, logits: Tensor, logit_rows: Tensor) -> None:
        """Apply to the logits in place what is pending, and start anew.

        Args:
            logits: [num_logits, vocab_size] float32.
            logit_rows: [num_logits] int32. Logit -> state row.
        """
        if self.narrows:
            settle_logits(logits, logit_rows, self.divisor, self.cutoff[: len(logits)])
            self.divisor, self.cutoff = self._no_division, self._no_cutoff
