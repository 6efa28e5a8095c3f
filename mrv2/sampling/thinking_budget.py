"""Thinking budget: once a section has as many tokens as the request allows, its end is forced.

Whether a logit is inside a section, and how far its forced end has come, is found anew from the
row's tokens. So a request that was preempted, rewound or drafted for goes on as if undisturbed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.errors import ConfigError
from mrv2.memory.mirrored import MirroredTensor
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.stage import LogitsStage, LogitsView, StageResources

BLOCK = 1024
"""Tokens of the history that a program takes at a time."""
_FORCED = tl.constexpr(1e9)
"""V1's logit of a forced token; the others stay what they are."""
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_LARGEST_BUDGET = 1 << 30
"""More than any history. A budget can be added to a position without leaving int32."""


@triton.jit
def _find_marker(
    history_ptr: tl.tensor,
    marker_ptr: tl.tensor,
    marker_len: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    # Where the marker first lies within [begin, end), or _NOWHERE.
    found = _NOWHERE
    last = end - marker_len
    start = begin
    while (start <= last) & (found == _NOWHERE):
        index = start + tl.arange(0, BLOCK)
        hit = index <= last
        for offset in range(marker_len):
            token_id = tl.load(history_ptr + index + offset, mask=hit, other=0)
            hit = hit & (token_id == tl.load(marker_ptr + offset))
        found = tl.min(tl.where(hit, index, _NOWHERE), axis=0)
        start += BLOCK
    return found


@triton.jit
def _num_unlike(
    history_ptr: tl.tensor,
    position: tl.tensor,
    marker_ptr: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    # How many of the history's last tokens are not those that the marker begins with.
    wrong = 0
    for start in range(0, length, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        mask = offset < length
        token_id = tl.load(history_ptr + position - length + offset, mask=mask, other=0)
        wanted = tl.load(marker_ptr + offset, mask=mask, other=0)
        wrong += tl.sum((token_id != wanted).to(tl.int32), axis=0)
    return wrong


@triton.jit
def _force_end_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    token_ids_stride: tl.tensor,
    prompt_len_ptr: tl.tensor,
    budget_ptr: tl.tensor,
    opened_ptr: tl.tensor,
    start_ptr: tl.tensor,
    start_len: tl.tensor,
    natural_ptr: tl.tensor,
    natural_len: tl.tensor,
    end_ptr: tl.tensor,
    end_len: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx).to(tl.int64)
    budget = tl.load(budget_ptr + row)
    if budget < 0:
        return
    history_ptr = token_ids_ptr + row * token_ids_stride
    position = tl.load(positions_ptr + logit_idx).to(tl.int32)
    prompt_len = tl.load(prompt_len_ptr + row)
    begin = tl.load(opened_ptr + row)
    scanned = prompt_len
    spent = prompt_len
    # Each turn looks for the end of a section, or for a section; the last one stays open or away.
    looking = True
    inside = begin >= 0
    while looking:
        if inside:
            spent = tl.maximum(begin + budget, prompt_len)
            before = tl.minimum(spent, position)
            closed = _find_marker(history_ptr, natural_ptr, natural_len, scanned, before, BLOCK)
            length = natural_len
            if (closed == _NOWHERE) & (spent < position):
                closed = _find_marker(history_ptr, end_ptr, end_len, spent, position, BLOCK)
                length = end_len
            looking = closed != _NOWHERE
            if looking:
                scanned = closed + length
                inside = False
        else:
            opened = _find_marker(history_ptr, start_ptr, start_len, scanned, position, BLOCK)
            looking = opened != _NOWHERE
            if looking:
                scanned = opened + 1
                begin = opened + start_len
                inside = True
    if inside & (position >= spent):
        # How much of the end is there: all that was forced, unless something else was drawn.
        done = tl.minimum(end_len - 1, position - spent)
        while (done > 0) & (_num_unlike(history_ptr, position, end_ptr, done, BLOCK) > 0):
            done -= 1
        token_id = tl.load(end_ptr + done)
        if (token_id >= 0) & (token_id < vocab_size):
            tl.store(logits_ptr + logit_idx * logits_stride + token_id, _FORCED)


def _force_end_launch(  # noqa: PLR0913 - as the kernel
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
    budget: Tensor,
    opened: Tensor,
    start: Tensor,
    natural_end: Tensor,
    end: Tensor,
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
        budget,
        opened,
        start,
        len(start),
        natural_end,
        len(natural_end),
        end,
        len(end),
        vocab_size,
    )
    return Launch(_force_end_kernel, (num_logits,), args, {"BLOCK": BLOCK})


def _force_end_reference(  # noqa: PLR0913 - as the kernel
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    prompt_len: Tensor,
    budget: Tensor,
    opened: Tensor,
    start: Tensor,
    natural_end: Tensor,
    end: Tensor,
) -> None:
    """Write 1e9 to the logit of the token that a used-up budget forces; others keep theirs.

    The history of a logit is its row's tokens before the position that it draws. A section begins
    behind a start marker: one that the prompt left open, or one in the output outside a section. A
    start marker within a section means nothing, and so does an end marker outside of one. Markers
    lie in the prompt or in the output, never across. The budget is spent once the section has as
    many tokens, or the first token is output if it had them before. Until then the section ends
    with a natural end marker, and from then on with an end marker none of whose tokens is older.
    Until that is complete, its next token is forced: the one behind the longest beginning of the
    marker in which the tokens since then end.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        positions: [num_logits] int64. Length of each logit's history, the whole prompt at least.
        token_ids: [max_rows, max_len] int32. Rows may be strided.
        prompt_len: [max_rows] int32. How many of the tokens are the prompt.
        budget: [max_rows] int32, below 2**30. Negative for none.
        opened: [max_rows] int32. Where the section begins that the prompt leaves open, -1 for none.
        start: [at least 1] int32.
        natural_end: [at least 1] int32.
        end: [at least 1] int32. A token outside the vocabulary is not forced.
    """
    rows = logit_rows.long()
    for logit in (budget[rows] >= 0).nonzero().flatten().tolist():
        row, position = int(rows[logit]), int(positions[logit])
        split = int(prompt_len[row])
        outputs = token_ids[row, split:position]
        begin = int(opened[row]) - split if opened[row] >= 0 else None
        done = _num_forced(outputs, begin, int(budget[row]), start, natural_end, end)
        if done is not None and 0 <= int(end[done]) < logits.shape[1]:
            logits[logit, end[done]] = _FORCED.value


def _num_forced(
    outputs: Tensor, begin: int | None, budget: int, start: Tensor, natural_end: Tensor, end: Tensor
) -> int | None:
    """Return how much of a forced end is there, or None where nothing is forced.

    Args:
        outputs: [num_outputs] int32.
        begin: Where the open section begins, seen from the first output; negative in the prompt.
        budget: Tokens of a section.
        start: Marker.
        natural_end: Marker.
        end: Marker.
    """
    starts, naturals, ends = (_places(outputs, marker) for marker in (start, natural_end, end))
    scanned = 0
    while True:
        if begin is None:
            found = [place for place in starts if place >= scanned]
            if not found:
                return None
            begin, scanned = found[0] + len(start), found[0] + 1
        spent = max(begin + budget, 0)
        last = spent - len(natural_end)
        closed = [place + len(natural_end) for place in naturals if scanned <= place <= last]
        closed += [place + len(end) for place in ends if place >= spent]
        if not closed:
            break
        begin, scanned = None, closed[0]
    if len(outputs) < spent:
        return None
    since = outputs[spent:]
    longest = min(len(end) - 1, len(since))
    fitting = (k for k in range(longest, 0, -1) if torch.equal(since[-k:], end[:k]))
    return next(fitting, 0)


def _places(tokens: Tensor, marker: Tensor) -> list[int]:
    """Return where the marker lies in the tokens, ascending."""
    if len(tokens) < len(marker):
        return []
    hits = (tokens.unfold(0, len(marker), 1) == marker).all(dim=1)
    return hits.nonzero().flatten().tolist()


force_end = TwinOp(
    "sampling.force_end",
    reference=_force_end_reference,
    launch=_force_end_launch,
    mutates=frozenset({"logits"}),
)


class ThinkingBudget(LogitsStage):
    """The stage: each row's budget, and where the section begins that its prompt leaves open."""

    def __init__(self, resources: StageResources) -> None:
        self._markers = resources.thinking
        self._requests = resources.requests
        self._budget = MirroredTensor(resources.num_rows, torch.int32, resources.arena)
        self._opened = MirroredTensor(resources.num_rows, torch.int32, resources.arena)
        for row in range(resources.num_rows):
            self._budget.set(row, -1)
        if self._markers is not None:
            natural_end = self._markers.natural_end or self._markers.end
            self._device_markers = tuple(
                resources.transfers.upload(np.array(marker, dtype=np.int32))
                for marker in (self._markers.start, natural_end, self._markers.end)
            )

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take the request's budget into its row.

        Raises:
            ConfigError: It has a budget, and the runner was given no markers.
        """
        budget = arrival.sampling.thinking_budget
        if budget is None:
            self.evict(row)
            return
        if self._markers is None:
            raise ConfigError(
                f"request {arrival.req_id!r} has a thinking budget of {budget}, and no thinking "
                "markers are configured: leave it out, or give RunnerConfig the markers"
            )
        prompt = np.array(arrival.token_ids[: arrival.prompt_len], dtype=np.int32)
        start, end = self._markers.start, self._markers.natural_end or self._markers.end
        last_start = _last_place(prompt, start)
        is_open = last_start > _last_place(prompt, end)
        self._opened.set(row, last_start + len(start) if is_open else -1)
        self._budget.set(row, min(budget, _LARGEST_BUDGET - 1))

    def evict(self, row: int) -> None:
        """Leave the row without a budget."""
        self._budget.set(row, -1)

    def flush(self) -> None:
        """Stage what changed."""
        self._budget.flush()
        self._opened.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row has a budget."""
        return bool((self._budget.host[rows] >= 0).any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Force the ends that are due."""
        start, natural_end, end = self._device_markers
        force_end(
            logits,
            view.logit_rows,
            view.positions,
            self._requests.token_ids.tensor,
            self._requests.prompt_len.device_tensor,
            self._budget.device_tensor,
            self._opened.device_tensor,
            start,
            natural_end,
            end,
        )


def _last_place(tokens: npt.NDArray[np.int32], marker: Sequence[int]) -> int:
    """Return where the marker last lies in the tokens, or -1."""
    if len(tokens) < len(marker):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(marker))
    places = np.flatnonzero((windows == np.array(marker)).all(axis=1))
    return int(places[-1]) if len(places) else -1
