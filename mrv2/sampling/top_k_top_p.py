"""Top-k and top-p: only the likeliest tokens are drawn.

Both ask for one value of a row: the smallest logit `t` such that the tokens above `t` weigh less
than a goal. For top-k a token weighs one and the goal is k; for top-p it weighs its probability and
the goal is p of the whole. The kernel reads the row once. A sample of it says beforehand between
which values to look for `t`. What lies there is set aside, what lies above is weighed, and `t` is
found among the few. Where the sample was wrong, the row is read again between better bounds, until
`t` is found: the sample decides how long it takes and never what is found. Nothing is sorted, and
nothing is written but candidates.
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
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.order import from_ordered, to_ordered
from mrv2.sampling.stage import LogitsView, NarrowingStage, StageResources

BLOCK = 2048
"""Tokens that a program takes at a time. Each lane sets its own candidates aside. With 16 warps,
104 us for 256 rows of 151,936 normal float32 logits, k = 50 and p = 0.9, and 219 us for p = 0.9
alone, on an H200, 2026-11-29; 4096 tokens, or 8 and 32 warps, were slower."""
SLOTS = 8
"""Candidates that a lane has room for."""
FEW = 2048
"""Candidates that a search is made among."""
_NUM_WARPS = 16
_MAX_REGISTERS = 64
"""So that two rows share a multiprocessor."""
_SAMPLE = 8192
"""Tokens that tell where to look, half of them for top-k. Fewer mislead top-p: 747 us with 4096."""
_RUN = tl.constexpr(128)
"""Tokens of the sample that lie together."""
_STEPS = tl.constexpr(11)
"""Halvings of the sample's range for a bound."""
_FEW = tl.constexpr(1400.0)
"""Candidates to aim at: a lane seldom has more than its slots, nor all lanes more than `FEW`."""
_TOP = tl.constexpr(400.0)
"""Of the likeliest tokens, these are set aside for top-p in any case: most rows need no others."""
_HALF = tl.constexpr(500.0)
"""Tokens to set aside on each side of where the sample says that `t` is."""
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_TOP_P = 2.0**-126
"""A smaller one may be 0 on the device, and then not even the likeliest token would be kept."""
_CHUNK_ELEMENTS = 1 << 20
"""Elements in a temporary of the reference, which takes rows in chunks of about this size."""


@triton.jit
def _between(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    # The mean of two int32, rounded down, which a sum could not hold.
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _larger_or_nan(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weight(value: tl.tensor, scale: tl.tensor, origin: tl.tensor, MASS: tl.constexpr) -> tl.tensor:
    if MASS:
        return tl.exp2((value - origin) * scale)
    return tl.full(value.shape, 1.0, tl.float32)


@triton.jit
def _with_more_than(
    sample: tl.tensor, low: tl.tensor, high: tl.tensor, rank: tl.tensor
) -> tl.tensor:
    # A value that more than `rank` of the sample reach, by little; `low` where not so many do.
    for _ in range(_STEPS):
        middle = 0.5 * low + 0.5 * high
        more = tl.sum((sample >= middle).to(tl.float32), axis=0) > rank
        low = tl.where(more, middle, low)
        high = tl.where(more, high, middle)
    return low


@triton.jit
def _around(
    sample: tl.tensor, least: tl.tensor, largest: tl.tensor, rank: tl.tensor, share: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    # Bounds that the wanted value lies between, if its rank in the sample is about `rank`.
    low = _with_more_than(sample, least, largest, rank + _HALF * share)
    high = _with_more_than(sample, least, largest, tl.maximum(rank - _HALF * share, 0.0))
    return low, tl.maximum(low, high)


@triton.jit
def _rank_by_mass(
    sample: tl.tensor, least: tl.tensor, largest: tl.tensor, scale: tl.tensor, top_p: tl.tensor
) -> tl.tensor:
    # How many of the sample have `top_p` of its probability.
    weight = tl.exp2((sample - largest) * scale)
    goal = tl.sum(weight, axis=0) * top_p
    low = least
    high = largest
    for _ in range(_STEPS):
        middle = 0.5 * low + 0.5 * high
        enough = tl.sum(tl.where(sample >= middle, weight, 0.0), axis=0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return tl.sum((sample >= low).to(tl.float32), axis=0)


@triton.jit
def _bounds(
    logits_ptr: tl.tensor,
    vocab_size: tl.tensor,
    scale: tl.tensor,
    floor: tl.tensor,
    target: tl.tensor,
    MASS: tl.constexpr,
    SAMPLE: tl.constexpr,
    FEW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    # Where to look: from `top` up, and in [low, high) below it. And a logit near the largest.
    lanes = tl.arange(0, SAMPLE)
    stride = tl.maximum(vocab_size // SAMPLE, 1) * _RUN
    token_ids = (lanes // _RUN) * stride + lanes % _RUN
    mask = token_ids < vocab_size
    sample = tl.load(logits_ptr + token_ids, mask=mask, other=float("-inf")).to(tl.float32)
    usable = (sample >= floor) & (sample <= _LARGEST)
    sample = tl.where(usable, sample, float("-inf"))
    largest = tl.maximum(tl.max(sample, axis=0), floor)
    least = tl.min(tl.where(usable, sample, largest), axis=0)
    top = floor
    low = floor
    high = floor
    if vocab_size > FEW:
        share = SAMPLE / vocab_size.to(tl.float32)
        if MASS:
            rank = _rank_by_mass(sample, least, largest, scale, target)
            near = rank <= _TOP * share
            aside = tl.where(near, 2.0 * _TOP, _TOP)
            top = _with_more_than(sample, least, largest, aside * share)
        else:
            rank = target * share
            enough = rank + 4.0 * tl.sqrt(rank) + 8.0
            near = enough <= _FEW * share
            top = _with_more_than(sample, least, largest, enough)
            top = tl.where(near, top, float("inf"))
        low = top
        high = top
        if not near:
            low, high = _around(sample, least, largest, rank, share)
            high = tl.minimum(high, top)
            low = tl.minimum(low, high)
    return top, low, high, largest


@triton.jit
def _values_at(logits_ptr: tl.tensor, token_ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return tl.load(logits_ptr + token_ids, mask=token_ids < vocab_size, other=float("-inf"))


@triton.jit
def _set_aside(  # noqa: PLR0913 - one pass over a row
    logits_ptr: tl.tensor,
    spare_ptr: tl.tensor,
    vocab_size: tl.tensor,
    scale: tl.tensor,
    origin: tl.tensor,
    floor: tl.tensor,
    top: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    MASS: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    # One pass: candidates side by side behind the slots, how many or -1 if there is no room for
    # them; the weight of all, that from `high` up, and the peak.
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.float32)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    # Blocks are asked for before they are looked at, as a load does not pass a store.
    first = _values_at(logits_ptr, lanes, vocab_size)
    second = _values_at(logits_ptr, BLOCK + lanes, vocab_size)
    third = _values_at(logits_ptr, 2 * BLOCK + lanes, vocab_size)
    for start in range(0, vocab_size, BLOCK):
        value = first.to(tl.float32)
        first = second
        second = third
        third = _values_at(logits_ptr, start + 3 * BLOCK + lanes, vocab_size)
        peak = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.where(value >= floor, _weight(value, scale, origin, MASS), 0.0)
        total += weight
        above += tl.where(value >= high, weight, 0.0)
        kept = (value >= top) | ((value >= low) & (value < high))
        cell = spare_ptr + count * BLOCK + lanes
        tl.store(cell, value, mask=kept & (count < SLOTS))
        count += kept.to(tl.int32)
    fits = (tl.max(count, axis=0) <= SLOTS) & (tl.sum(count, axis=0) <= FEW)
    found = tl.full((), -1, tl.int32)
    if fits:
        # Other threads read what these have written.
        tl.debug_barrier()
        found = tl.sum(count, axis=0)
        place = spare_ptr + SLOTS * BLOCK + tl.cumsum(count, axis=0) - count
        for slot in tl.static_range(SLOTS):
            taken = slot < count
            value = tl.load(spare_ptr + slot * BLOCK + lanes, mask=taken, other=0.0)
            tl.store(place + slot, value, mask=taken)
        tl.debug_barrier()
    return found, tl.sum(total, axis=0), tl.sum(above, axis=0), tl.reduce(peak, 0, _larger_or_nan)


@triton.jit
def _candidates(found_ptr: tl.tensor, found: tl.tensor, FEW: tl.constexpr) -> tl.tensor:
    # [FEW]; -inf where there is none.
    places = tl.arange(0, FEW)
    return tl.load(found_ptr + places, mask=places < found, other=float("-inf"))


@triton.jit
def _select(
    ordered: tl.tensor, inside: tl.tensor, weight: tl.tensor, offset: tl.tensor, goal: tl.tensor
) -> tl.tensor:
    # The least value such that what lies inside above it weighs, with `offset`, less than `goal`.
    low = tl.min(tl.where(inside, ordered, 0x7FFFFFFF), axis=0)
    high = tl.max(tl.where(inside, ordered, -0x80000000), axis=0)
    weight = tl.where(inside, weight, 0.0)
    step = tl.full((), 0, tl.int32)
    while low < high:
        middle = _between(low, high)
        step += 1
        if (step > 10) & (step % 2 == 1):
            # By now hardly a candidate is left between: try the least of them.
            low = tl.min(tl.where(inside & (ordered >= low), ordered, 0x7FFFFFFF), axis=0)
            middle = low
        enough = offset + tl.sum(tl.where(ordered > middle, weight, 0.0), axis=0) >= goal
        low = tl.where(enough, middle + 1, low)
        high = tl.where(enough, high, middle)
    return from_ordered(low)


@triton.jit
def _find(  # noqa: PLR0913, PLR0915 - its state is the state of one search
    logits_ptr: tl.tensor,
    spare_ptr: tl.tensor,
    vocab_size: tl.tensor,
    scale: tl.tensor,
    floor: tl.tensor,
    target: tl.tensor,
    MASS: tl.constexpr,
    SAMPLE: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # The value looked for, or `floor`; whether all that reach it are candidates; their number.
    top, low, high, origin = _bounds(
        logits_ptr, vocab_size, scale, floor, target, MASS, SAMPLE, FEW
    )
    threshold = floor
    complete = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    # `t` is in [reached, missed): from `reached` up is enough, from `missed` up is not.
    reached = floor
    missed = tl.full((), float("inf"), tl.float32)
    passes = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching == 1:
        found, total, above, peak = _set_aside(
            logits_ptr,
            spare_ptr,
            vocab_size,
            scale,
            origin,
            floor,
            top,
            low,
            high,
            MASS,
            SLOTS,
            FEW,
            BLOCK,
        )
        passes += 1
        goal = target
        if MASS:
            goal = target * total
        if (not (peak <= _LARGEST)) or (total < goal) or (total == 0.0):
            searching = tl.full((), 0, tl.int32)
        elif total == float("inf"):
            # The sample missed a peak so high that the weights overflowed.
            origin = peak
        else:
            fits = found >= 0
            value = _candidates(spare_ptr + SLOTS * BLOCK, found, FEW)
            weight = tl.where(value >= floor, _weight(value, scale, origin, MASS), 0.0)
            likeliest = value >= top
            others = (value >= low) & (value < high)
            weight_of_top = tl.sum(tl.where(likeliest, weight, 0.0), axis=0)
            weight_of_others = tl.sum(tl.where(others, weight, 0.0), axis=0)
            in_top = fits & (weight_of_top >= goal)
            in_others = fits & (above < goal) & (above + weight_of_others >= goal)
            if in_top | in_others:
                inside = tl.where(in_top, likeliest.to(tl.int32), others.to(tl.int32)) == 1
                offset = tl.where(in_top, 0.0, above)
                threshold = _select(to_ordered(value), inside, weight, offset, goal)
                complete = in_top.to(tl.int32)
                searching = tl.full((), 0, tl.int32)
            else:
                enough = above >= goal
                reached = tl.where(enough, tl.maximum(reached, high), reached)
                missed = tl.where(enough, missed, tl.minimum(missed, high))
                missed = tl.where(fits & (weight_of_top < goal), tl.minimum(missed, top), missed)
                short = fits & (above + weight_of_others < goal)
                missed = tl.where(short, tl.minimum(missed, low), missed)
                first = to_ordered(reached)
                last = tl.minimum(to_ordered(missed), to_ordered(peak) + 1)
                if last - 1 <= first:
                    threshold = reached
                    searching = tl.full((), 0, tl.int32)
                else:
                    # Go as far as the weights beside it suggest; if that will not do, halve.
                    width = high - low
                    per_weight = width / tl.maximum(weight_of_others, 1e-30)
                    up = high + (above - goal) * per_weight
                    down = low - (goal - above - weight_of_others) * per_weight
                    middle = tl.where(enough, up, down)
                    next_low = tl.maximum(middle - 0.5 * width, reached)
                    next_high = tl.minimum(middle + 0.5 * width, missed)
                    leap = fits & (passes < 4) & (weight_of_others > 0.0) & (next_low < next_high)
                    halved = from_ordered(_between(first, last))
                    low = tl.where(leap, next_low, reached)
                    high = tl.where(leap, next_high, halved)
                    top = tl.full((), float("inf"), tl.float32)
                    # The slots are written again.
                    tl.debug_barrier()
    return threshold, complete, found


@triton.jit
def _raw_floor(cutoff: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    # The least float that the division does not bring below the cutoff.
    near = to_ordered(cutoff * divisor) + tl.arange(0, 16) - 8
    value = from_ordered(near)
    reaches = tl.div_rn(value, divisor) >= cutoff
    floor = tl.min(tl.where(reaches, value, float("inf")), axis=0)
    return tl.where(cutoff > -_LARGEST, floor, -_LARGEST)


@triton.jit
def _cut_to_top_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    cutoff_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    spare_ptr: tl.tensor,
    vocab_size: tl.tensor,
    SAMPLE: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    counts = (top_k > 0) & (top_k < vocab_size)
    random = tl.load(temperature_ptr + row) != 0.0
    if not (random & (counts | (top_p < 1.0))):
        return
    divisor = tl.load(divisor_ptr + row)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    cutoff = tl.load(cutoff_ptr + logit_idx)
    logits_ptr += logit_idx * logits_stride
    spare_ptr += logit_idx * (SLOTS * BLOCK + FEW)
    scale = _LOG2_E / divisor
    # The search is among the logits as they are: division keeps their order, and the smallest that
    # stays, once divided, is the cutoff.
    unset = _raw_floor(cutoff, divisor)
    floor = unset
    complete = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    if counts:
        floor, complete, found = _find(
            logits_ptr,
            spare_ptr,
            vocab_size,
            scale,
            floor,
            top_k.to(tl.float32),
            False,
            SAMPLE // 2,
            SLOTS,
            FEW,
            BLOCK,
        )
    if top_p < 1.0:
        if complete == 1:
            value = _candidates(spare_ptr + SLOTS * BLOCK, found, FEW)
            inside = value >= floor
            origin = tl.max(value, axis=0)
            weight = tl.where(inside, _weight(value, scale, origin, True), 0.0)
            goal = top_p * tl.sum(weight, axis=0)
            floor = _select(to_ordered(value), inside, weight, 0.0, goal)
        else:
            tl.debug_barrier()
            floor, complete, found = _find(
                logits_ptr,
                spare_ptr,
                vocab_size,
                scale,
                floor,
                top_p,
                True,
                SAMPLE,
                SLOTS,
                FEW,
                BLOCK,
            )
    if floor > unset:
        tl.store(cutoff_ptr + logit_idx, tl.maximum(cutoff, tl.div_rn(floor, divisor)))


def _cut_to_top_launch(
    cutoff: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    temperature: Tensor,
    divisor: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    spare = torch.empty(num_logits, SLOTS * BLOCK + FEW, dtype=torch.float32, device=logits.device)
    args = (
        cutoff,
        logits,
        logits.stride(0),
        logit_rows,
        temperature,
        divisor,
        top_k,
        top_p,
        spare,
        vocab_size,
    )
    constexprs = {"SAMPLE": _SAMPLE, "SLOTS": SLOTS, "FEW": FEW, "BLOCK": BLOCK}
    return Launch(
        _cut_to_top_kernel,
        (num_logits,),
        args,
        constexprs,
        num_warps=_NUM_WARPS,
        max_registers=_MAX_REGISTERS,
    )


def _cut_to_top_reference(
    cutoff: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    temperature: Tensor,
    divisor: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> None:
    """Raise cutoffs so far that top-k, then top-p remain.

    Of the logits, divided, that are not below the row's cutoff, top-k keeps all that are at least
    the k-th largest. Of those, top-p keeps a token where what is larger than it has less than p of
    their probability. Equal tokens stay or go together. A row that holds NaN or +inf is left alone.

    Args:
        cutoff: [num_logits] float32, in units of the divided logits. Only raised.
        logits: [num_logits, vocab_size], any float dtype. Rows may be strided.
        logit_rows: [num_logits] int32. Logit -> state row.
        temperature: [max_rows] float32. Rows of 0 are greedy and are left alone.
        divisor: [max_rows] float32. Divides the logits, rounded to nearest; 0 and 1 do nothing.
        top_k: [max_rows] int32. 0 and anything from vocab_size on keep all.
        top_p: [max_rows] float32, above 0. 1 keeps all.
    """
    vocab_size = logits.shape[1]
    rows = logit_rows.long()
    k, p = top_k[rows], top_p[rows]
    counts = (k > 0) & (k < vocab_size)
    which = ((temperature[rows] != 0.0) & (counts | (p < 1.0))).nonzero().flatten()
    k = torch.where(counts, k, vocab_size).long()
    chunk_size = max(1, _CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(which), chunk_size):
        chunk = which[start : start + chunk_size]
        by = divisor[rows[chunk]].unsqueeze(1)
        divided = logits[chunk].float() / torch.where(by == 0.0, 1.0, by)
        divided.masked_fill_(divided < cutoff[chunk].unsqueeze(1), -torch.inf)
        sound = divided.amax(dim=1) < torch.inf
        smallest = _smallest_kept(divided, k[chunk], p[chunk])
        cutoff[chunk] = torch.where(sound, smallest.maximum(cutoff[chunk]), cutoff[chunk])


def _smallest_kept(divided: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Return each row's smallest logit within top-k and top-p; -inf where all are.

    The order of the arithmetic is V1's, from the smallest up, so that where p lies within a
    rounding of a sum the two decide alike.
    """
    if bool((p >= 1.0).all()):
        largest = divided.topk(min(int(k.max()), divided.shape[1]), dim=1).values
        return largest.gather(1, k.unsqueeze(1) - 1).squeeze(1)
    ascending = divided.sort(dim=1).values
    smallest = ascending.gather(1, (ascending.shape[1] - k).unsqueeze(1))
    ascending.masked_fill_(ascending < smallest, -torch.inf)
    mass = ascending.softmax(dim=1).cumsum_(dim=1)
    stays = mass > (1.0 - p).unsqueeze(1)
    stays[:, -1] = True
    by_mass = ascending.gather(1, stays.byte().argmax(dim=1, keepdim=True))
    return torch.where(p.unsqueeze(1) < 1.0, by_mass, smallest).squeeze(1)


cut_to_top = TwinOp(
    "sampling.cut_to_top",
    reference=_cut_to_top_reference,
    launch=_cut_to_top_launch,
    mutates=frozenset({"cutoff"}),
)


class TopKTopP(NarrowingStage):
    """The stage."""

    def __init__(self, resources: StageResources) -> None:
        self._vocab_size = resources.vocab_size
        self._temperature = resources.columns.temperature
        self._top_k = MirroredTensor(resources.num_rows, torch.int32, resources.arena)
        self._top_p = MirroredTensor(resources.num_rows, torch.float32, resources.arena)
        for row in range(resources.num_rows):
            self.evict(row)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take the request's top-k and top-p."""
        top_k = arrival.sampling.top_k
        self._top_k.set(row, top_k if top_k < self._vocab_size else 0)
        self._top_p.set(row, max(arrival.sampling.top_p, _LEAST_TOP_P))

    def evict(self, row: int) -> None:
        """Cut nothing from the row."""
        self._top_k.set(row, 0)
        self._top_p.set(row, 1.0)

    def flush(self) -> None:
        """Stage what changed."""
        self._top_k.flush()
        self._top_p.flush()

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row that is drawn at random has a top-k or a top-p."""
        cuts = (self._top_k.host[rows] > 0) | (self._top_p.host[rows] < 1.0)
        return bool((cuts & (self._temperature.host[rows] != 0.0)).any())

    def narrow(self, narrowing: Narrowing, logits: Tensor, view: LogitsView) -> None:
        """Raise the cutoffs."""
        cut_to_top(
            narrowing.raisable_cutoff(),
            logits,
            view.logit_rows,
            self._temperature.device_tensor,
            narrowing.divisor,
            self._top_k.device_tensor,
            self._top_p.device_tensor,
        )
