"""A least number of tokens: until it is reached, nothing that would end the request is drawn.

A grammar may leave nothing but what ends the request. Then the grammar wins: a token that it
forbids would be worse than a short output.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.ragged import MirroredLists, places_of
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling.stage import LogitsStage, LogitsView, StageResources

BLOCK = 1024
"""Logits, or stop tokens, that the one program of a row takes at a time."""


@triton.jit
def _hold_stops_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides one by one
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    free_from_ptr: tl.tensor,
    yields_ptr: tl.tensor,
    stop_ids_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    start = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    if start == end:
        return
    if tl.load(positions_ptr + logit_idx) >= tl.load(free_from_ptr + row):
        return
    cells = logits_ptr + logit_idx * logits_stride
    # How many logits but the stops' are not -inf? Only a row that may yield is read to find out.
    others = tl.zeros((BLOCK,), dtype=tl.int32)
    if tl.load(yields_ptr + row) == 0:
        others += 1
    else:
        for first in range(0, vocab_size, BLOCK):
            token_ids = first + tl.arange(0, BLOCK)
            values = tl.load(cells + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
            others += (values != float("-inf")).to(tl.int32)
        for first in range(start, end, BLOCK):
            places = first + tl.arange(0, BLOCK)
            mask = places < end
            stop_ids = tl.load(stop_ids_ptr + places, mask=mask, other=0)
            values = tl.load(cells + stop_ids, mask=mask, other=float("-inf"))
            others -= (values != float("-inf")).to(tl.int32)
    # What is smaller in magnitude stays: all that is finite, or nothing.
    limit = tl.where(tl.sum(others) == 0, float("inf"), 0.0)
    # Each stop token stands in the list once, so no other lane reads what one has written.
    for first in range(start, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        mask = places < end
        stop_ids = tl.load(stop_ids_ptr + places, mask=mask, other=0)
        values = tl.load(cells + stop_ids, mask=mask, other=0.0)
        tl.store(cells + stop_ids, float("-inf"), mask=mask & ~(tl.abs(values) < limit))


def _hold_stops_launch(
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    free_from: Tensor,
    yields: Tensor,
    stop_ids: Tensor,
    bounds: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    return Launch(
        _hold_stops_kernel,
        (num_logits,),
        (
            logits,
            logits.stride(0),
            logit_rows,
            positions,
            free_from,
            yields,
            stop_ids,
            bounds,
            vocab_size,
        ),
        {"BLOCK": BLOCK},
    )


def _hold_stops_reference(
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    free_from: Tensor,
    yields: Tensor,
    stop_ids: Tensor,
    bounds: Tensor,
) -> None:
    """Set the logits of a row's stop tokens to -inf, in place, before a position.

    Args:
        logits: [num_logits, vocab_size] float32. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        positions: [num_logits] int64. Position of the token that each logit draws.
        free_from: [max_rows] int32. Position from which on a row may draw its stop tokens.
        yields: [max_rows] int32. Not 0 where the stop tokens whose logits are finite stay as they
            are if every other logit is -inf.
        stop_ids: [num_words] int32. Lists of token ids in [0, vocab_size), each list without
            repeats.
        bounds: [max_rows + 1] int32. Row r's list is stop_ids[bounds[r]:bounds[r + 1]].
    """
    rows = logit_rows.long()
    owners, places = places_of(bounds, logit_rows)
    is_held = positions < free_from[rows]
    owners, places = owners[is_held[owners]], places[is_held[owners]]
    cells = owners, stop_ids[places].long()
    before = logits[cells]
    logits.index_put_(cells, logits.new_tensor(float("-inf")))
    (may_yield,) = (is_held & (yields[rows] != 0)).nonzero(as_tuple=True)
    is_empty = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    is_empty[may_yield] = logits[may_yield].amax(dim=1) == float("-inf")
    stays = is_empty[owners] & before.isfinite()
    logits.index_put_((cells[0][stays], cells[1][stays]), before[stays])


hold_stops = TwinOp(
    "sampling.hold_stops",
    reference=_hold_stops_reference,
    launch=_hold_stops_launch,
    mutates=frozenset({"logits"}),
)


class MinTokens(LogitsStage):
    """The stage. Outputs are counted from the end of the prompt, wherever the request resumed."""

    def __init__(self, resources: StageResources) -> None:
        num_rows, arena = resources.num_rows, resources.arena
        self._stop_ids = MirroredLists(num_rows, resources.transfers)
        self._free_from = MirroredTensor(num_rows, torch.int32, arena)
        self._yields = MirroredTensor(num_rows, torch.int32, arena)
        self._vocab_size = resources.vocab_size

    def admit(self, row: int, arrival: Arrival) -> None:
        """Keep the stop tokens of a request that has too few outputs yet."""
        sampling = arrival.sampling
        free_from = arrival.prompt_len + sampling.min_tokens
        if len(arrival.token_ids) >= free_from:
            self._stop_ids.clear(row)
            return
        # A stop token outside the vocabulary is never drawn.
        inside = {token for token in sampling.stop_token_ids if 0 <= token < self._vocab_size}
        self._stop_ids.set(row, sorted(inside))
        self._free_from.set(row, min(free_from, np.iinfo(np.int32).max))
        self._yields.set(row, sampling.is_structured)

    def evict(self, row: int) -> None:
        """Drop the row's stop tokens."""
        self._stop_ids.clear(row)

    def flush(self) -> None:
        """Queue the stop tokens, and stage what else changed."""
        self._stop_ids.flush()
        self._free_from.flush()
        self._yields.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row had too few outputs when its request arrived, and has stop tokens."""
        return bool(self._stop_ids.is_set[rows].any())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Hold the stop tokens back."""
        hold_stops(
            logits,
            view.logit_rows,
            view.positions,
            self._free_from.device_tensor,
            self._yields.device_tensor,
            self._stop_ids.words,
            self._stop_ids.bounds,
        )
