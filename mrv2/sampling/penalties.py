"""Presence, frequency and repetition penalties, counted anew from the row's tokens for each logit.

No counts are kept from step to step, so a preemption, a resume or a draft that was turned down has
nothing to take back, and the memory does not grow with the rows. The work grows with the history,
not with the vocabulary.
"""

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
from mrv2.sampling.stage import LogitsStage, LogitsView, StageResources

BLOCK = 1024
"""Tokens of the history that a program takes at a time. Never fewer than its threads, so that no
token is counted by two of them."""
_NUM_WARPS = 8
MAX_SCRATCH_ROWS = 64
"""Rows of counts, and so logits that are penalised at a time: 39 MB for 151,936 tokens."""
_IN_PROMPT = tl.constexpr(1 << 30)
"""Added to the count of a token that is in the prompt. Counts of outputs stay below."""


@triton.jit
def _penalise_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_ids_stride: tl.tensor,
    prompt_len_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    counts_stride: tl.tensor,
    num_logits: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # A program owns one row of counts, all zero whenever it turns to another logit.
    counts_ptr += tl.program_id(0).to(tl.int64) * counts_stride
    for logit_idx in range(tl.program_id(0), num_logits, tl.num_programs(0)):
        row = tl.load(logit_rows_ptr + logit_idx).to(tl.int64)
        presence = tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        repetition = tl.load(repetition_ptr + row)
        if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
            reciprocal = tl.div_rn(1.0, repetition)
            history_ptr = token_ids_ptr + row * token_ids_stride
            history_len = tl.load(positions_ptr + logit_idx).to(tl.int32)
            prompt_len = tl.load(prompt_len_ptr + row)
            row_ptr = logits_ptr + tl.cast(logit_idx, tl.int64) * logits_stride
            for start in range(0, history_len, BLOCK):
                position = start + tl.arange(0, BLOCK)
                token_id = tl.load(history_ptr + position, mask=position < history_len, other=-1)
                known = (token_id >= 0) & (token_id < vocab_size)
                output = known & (position >= prompt_len)
                prompt = known & (position < prompt_len)
                tl.atomic_add(counts_ptr + token_id, 1, mask=output, sem="relaxed")
                tl.atomic_or(counts_ptr + token_id, _IN_PROMPT, mask=prompt, sem="relaxed")
            tl.debug_barrier()
            for start in range(0, history_len, BLOCK):
                position = start + tl.arange(0, BLOCK)
                token_id = tl.load(history_ptr + position, mask=position < history_len, other=-1)
                known = (token_id >= 0) & (token_id < vocab_size)
                # Of all places of a token exactly one takes its count, and leaves a zero.
                count = tl.atomic_xchg(counts_ptr + token_id, 0, mask=known, sem="relaxed")
                first = known & (count != 0)
                num_outputs = count & (_IN_PROMPT - 1)
                logit = tl.load(row_ptr + token_id, mask=first, other=0.0)
                logit *= tl.where(logit > 0.0, reciprocal, repetition)
                logit -= frequency * num_outputs.to(tl.float32)
                logit -= tl.where(num_outputs > 0, presence, 0.0)
                tl.store(row_ptr + token_id, logit, mask=first)
            # The next logit's counts must not be taken by a thread that is still at this one's.
            tl.debug_barrier()


def _penalise_launch(  # noqa: PLR0913 - as the kernel
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    counts: Tensor,
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
        presence,
        frequency,
        repetition,
        counts,
        counts.stride(0),
        num_logits,
        vocab_size,
    )
    grid = (min(num_logits, len(counts)),)
    return Launch(
        _penalise_kernel, grid, args, {"BLOCK": BLOCK}, num_warps=_NUM_WARPS, contracts=False
    )


def _penalise_reference(  # noqa: PLR0913 - as the kernel
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    counts: Tensor,
) -> None:
    """Penalise the tokens of each logit's history, in place; all other tokens keep their logits.

    The history of a logit is its row's tokens before the position that it draws: prompt, then
    output. First the repetition penalty scales what is in either: positive logits are multiplied by
    its reciprocal, others by itself. Then what is in the output loses `frequency` times its count,
    and after that `presence`. Each product and each difference is rounded to float32.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        positions: [num_logits] int64. Length of each logit's history.
        token_ids: [max_rows, max_len] int32. Rows may be strided. Ids outside the vocabulary count
            for nothing.
        prompt_len: [max_rows] int32. How many of the tokens are the prompt.
        presence: [max_rows] float32. 0 for none.
        frequency: [max_rows] float32. 0 for none.
        repetition: [max_rows] float32, above 0. 1 for none.
        counts: [at least 1, vocab_size] int32, contiguous. Scratch: zeros before and after.
    """
    penalises = (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)
    wanted = penalises[logit_rows.long()].nonzero().flatten()
    for start in range(0, len(wanted), len(counts)):
        chunk = wanted[start : start + len(counts)]
        rows = logit_rows[chunk].long()
        longest = int(positions[chunk].max())
        history = token_ids[rows, :longest].long()
        place = torch.arange(longest)
        known = (place < positions[chunk].unsqueeze(1)) & (history >= 0)
        known &= history < logits.shape[1]
        history.masked_fill_(~known, 0)
        is_output = (known & (place >= prompt_len[rows].unsqueeze(1))).int()
        counted = counts[: len(chunk)]
        counted.scatter_add_(1, history, is_output)
        num_outputs = counted.gather(1, history)
        counted.scatter_(1, history, 0)
        # A token that stands in several places gets the same value from each of them.
        values = logits[chunk.unsqueeze(1), history]
        factor = repetition[rows].unsqueeze(1)
        values *= torch.where(values > 0, 1.0 / factor, factor)
        values -= frequency[rows].unsqueeze(1) * num_outputs
        values -= presence[rows].unsqueeze(1) * (num_outputs > 0)
        which, where = known.nonzero(as_tuple=True)
        logits[chunk[which], history[which, where]] = values[which, where]


penalise = TwinOp(
    "sampling.penalise",
    reference=_penalise_reference,
    launch=_penalise_launch,
    mutates=frozenset({"logits"}),
)


class Penalties(LogitsStage):
    """The stage: three columns, and a scratch that is allocated for the first row that needs it."""

    def __init__(self, resources: StageResources) -> None:
        self._resources = resources
        columns = [
            MirroredTensor(resources.num_rows, torch.float32, resources.arena) for _ in range(3)
        ]
        self._presence, self._frequency, self._repetition = columns
        self._penalises = np.zeros(resources.num_rows, dtype=np.bool_)
        self._counts: Tensor | None = None
        for row in range(resources.num_rows):
            self._repetition.set(row, 1.0)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take the request's penalties into its row."""
        sampling = arrival.sampling
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._set(row, presence, frequency, sampling.repetition_penalty)

    def evict(self, row: int) -> None:
        """Leave the row without penalties."""
        self._set(row, 0.0, 0.0, 1.0)

    def flush(self) -> None:
        """Stage what changed, and make sure of the scratch before a logit needs it."""
        for column in (self._presence, self._frequency, self._repetition):
            column.flush()
        if self._counts is None and self._penalises.any():
            resources = self._resources
            self._counts = torch.zeros(
                (min(resources.num_rows, MAX_SCRATCH_ROWS), resources.vocab_size),
                dtype=torch.int32,
                device=resources.transfers.device,
            )

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row penalises."""
        return bool(self._penalises[rows].any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Penalise the tokens before each logit's position."""
        assert self._counts is not None, "flush comes before apply"
        penalise(
            logits,
            view.logit_rows,
            view.positions,
            self._resources.requests.token_ids.tensor,
            self._resources.requests.prompt_len.device_tensor,
            self._presence.device_tensor,
            self._frequency.device_tensor,
            self._repetition.device_tensor,
            self._counts,
        )

    def _set(self, row: int, presence: float, frequency: float, repetition: float) -> None:
        self._presence.set(row, presence)
        self._frequency.set(row, frequency)
        self._repetition.set(row, repetition)
        self._penalises[row] = presence != 0.0 or frequency != 0.0 or repetition != 1.0
