"""The draw: Gumbel noise and an argmax, or the argmax alone for greedy rows.

Adding independent Gumbel noise to logits and taking the largest draws from their softmax without
computing it. The noise of a token is a pure function of (seed, position, token id), so the drawn
token is, too.

Large noise decides the draws of unlikely tokens. It comes from small `v` in -log(-log(1 - v)), and
`v` has full float32 precision down to 2**-40 and a step of 2**-64 below: the tail is not cut off
where 24 random bits end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp
from mrv2.sampling.order import to_ordered
from mrv2.sampling.rng import (
    device_high_word,
    device_key,
    device_low_word,
    device_sequence,
    reference_high_word,
    reference_key,
    reference_low_word,
)

BLOCK = 256
"""Tokens that a program of `draw` takes at a time. The result does not depend on it. With one warp,
57 us for 256 random rows of 151,936 float32 and 6.3 us for one, on an H200, 2026-11-29; the fastest
of 256 to 4096 with 1 to 16 warps."""
_NUM_WARPS = 1
_MAX_REGISTERS = 64
"""So that 32 programs run on a multiprocessor, and all `_PROGRAMS` at once."""
_HIGH = tl.constexpr(2.0**-32)
_LOW = tl.constexpr(2.0**-64)
_LEAST = tl.constexpr(2.0**-65)
"""Stands for v = 0, which would make infinite noise."""
_MOST = tl.constexpr(1 - 2.0**-24)
"""The float32 below 1, which would make no noise at all."""
_LOG_2 = 0.6931471805599453
_LOG2_E = tl.constexpr(1.4426950408889634)
_SLACK = tl.constexpr(2.0**-10)
_ROUNDING = tl.constexpr(2.0**-20)
_MANTISSA = tl.constexpr(2.0**-23)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LEAST_ORDERED = tl.constexpr(-0x7F800001)
"""-inf in the order of `_ordered`."""
_NOTHING = tl.constexpr(-(2**63))
_PART = 128
"""Tokens for which a program works noise out at a time, where it must for a whole block."""
_SPLIT_ROWS = 1024
"""Rows that programs may share."""
_PROGRAMS = 4224
"""Programs that an H200 runs at once, 32 on each of 132 multiprocessors."""
_CHUNK_ELEMENTS = 1 << 18
"""Elements in a temporary of the reference, which takes rows in chunks of about this size."""


@triton.jit
def device_gumbel(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """As `reference_gumbel`, from uint32."""
    v = high.to(tl.float32) * _HIGH + low.to(tl.float32) * _LOW
    v = tl.minimum(tl.maximum(v, _LEAST), _MOST)
    rest = 1.0 - v
    lost = 1.0 - rest
    exact = -tl.log(rest) * (v / tl.where(lost == 0.0, 1.0, lost))
    return -tl.log(tl.where(lost == 0.0, v, exact))


def reference_gumbel(high: Tensor, low: Tensor) -> Tensor:
    """Return Gumbel noise: -log(-log1p(-v)) for the uniform v that two words spell.

    A kernel has no log1p, so both halves take the log of `rest`, which is 1 - v as rounded, times
    v over what the rounding left of it. Where it left nothing, log1p(-v) is -v.

    Args:
        high: Any shape, int32 with the bits of the word.
        low: As `high`.

    Returns:
        float32 of that shape, finite: in [-2.82, 45.1].
    """
    v = _unsigned(high) * _HIGH.value + _unsigned(low) * _LOW.value
    v = v.clamp(_LEAST.value, _MOST.value)
    rest = 1.0 - v
    lost = 1.0 - rest
    exact = -rest.log() * (v / torch.where(lost == 0.0, 1.0, lost))
    return -torch.where(lost == 0.0, v, exact).log()


def _unsigned(word: Tensor) -> Tensor:
    return (word.long() & 0xFFFFFFFF).float()


@triton.jit
def _noise_kernel(
    noise_ptr: tl.tensor,
    words_ptr: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < num_words
    high = tl.load(words_ptr + offset * 2, mask=mask, other=1)
    low = tl.load(words_ptr + offset * 2 + 1, mask=mask, other=1)
    value = device_gumbel(high.to(tl.uint32, bitcast=True), low.to(tl.uint32, bitcast=True))
    tl.store(noise_ptr + offset, value, mask=mask)


def _noise_launch(noise: Tensor, words: Tensor) -> Launch:
    num_words, block = noise.numel(), 1024
    grid = (cdiv(num_words, block),)
    return Launch(_noise_kernel, grid, (noise, words, num_words), {"BLOCK": block})


def _noise_reference(noise: Tensor, words: Tensor) -> None:
    """Write the noise that pairs of random words spell.

    Args:
        noise: [num_words] float32.
        words: [num_words, 2] int32, contiguous. Bits of the high and the low word.
    """
    noise.copy_(reference_gumbel(words[:, 0], words[:, 1]))


noise = TwinOp(
    "sampling.noise",
    reference=_noise_reference,
    launch=_noise_launch,
    mutates=frozenset({"noise"}),
)


@triton.jit
def _either_nan(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max_or_nan(values: tl.tensor) -> tl.tensor:
    return tl.reduce(values, 0, _either_nan)


@triton.jit
def _ordered(score: tl.tensor) -> tl.tensor:
    # An int32 in the order of the floats: -0 equals 0, and NaN is the largest.
    return tl.where(score != score, 0x7FFFFFFF, to_ordered(score))


@triton.jit
def _noisy(
    logit: tl.tensor,
    token_ids: tl.tensor,
    divisor: tl.tensor,
    cutoff: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
) -> tl.tensor:
    # The score that counts, of one token or of many.
    score = tl.div_rn(logit, divisor)
    score = tl.where(score < cutoff, float("-inf"), score)
    step, start = device_sequence(first, second)
    high = device_high_word(step, start, token_ids)
    return score + device_gumbel(high, device_low_word(first, second, token_ids))


@triton.jit
def _bar(best: tl.tensor) -> tl.tensor:
    # log2 of what 2**32 times the softmax's numerator is multiplied by to be the largest high word
    # that can still win. The slack covers every rounding of the test; it lets in one more token in
    # a thousand. Nothing but a NaN passes once a NaN has won.
    in_bits = best * _LOG2_E
    slack = tl.minimum(_SLACK + (tl.abs(in_bits) + 70.0) * _ROUNDING, 1e30)
    bar = tl.where(best == float("-inf"), float("inf"), 32.0 - in_bits + slack)
    return tl.where(best != best, float("-inf"), bar)


@triton.jit
def _block_of(logits_ptr: tl.tensor, token_ids: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return tl.load(logits_ptr + token_ids, mask=token_ids < vocab_size, other=float("-inf"))


@triton.jit
def _packed(best: tl.tensor, winner: tl.tensor) -> tl.tensor:
    # The largest score, then the lowest id, in one integer.
    return (best.to(tl.int64) << 32) | (0x7FFFFFFF - winner).to(tl.int64)


@triton.jit
def _score_of(ordered: tl.tensor) -> tl.tensor:
    # The order of the bits is its own inverse.
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _draw_kernel(  # noqa: PLR0913, PLR0915 - a kernel takes its pointers one by one
    token_ids_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    cutoff_ptr: tl.tensor,
    best_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    vocab_size: tl.tensor,
    share: tl.tensor,
    splits: tl.tensor,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    first_id = tl.program_id(1) * share
    # A share is whole blocks, so masks need only the vocabulary's end, whose divisors are known.
    end_id = tl.minimum(first_id + share, vocab_size)
    row = tl.load(logit_rows_ptr + logit_idx)
    logits_ptr += logit_idx * logits_stride
    winner = tl.full((), 0, tl.int32)
    best = tl.full((), _LEAST_ORDERED, tl.int32)
    if tl.load(temperature_ptr + row) == 0.0:
        # A lane keeps the best of its own tokens. Ids ascend, so an equal one never replaces it.
        lane_best = tl.full((BLOCK,), -0x80000000, tl.int32)
        lane_id = tl.zeros((BLOCK,), tl.int32)
        for start in range(first_id, end_id, BLOCK):
            token_ids = start + tl.arange(0, BLOCK)
            mask = token_ids < vocab_size
            logit = tl.load(logits_ptr + token_ids, mask=mask, other=0.0).to(tl.float32)
            ordered = tl.where(mask, _ordered(logit), -0x80000000)
            lane_id = tl.where(ordered > lane_best, token_ids, lane_id)
            lane_best = tl.maximum(ordered, lane_best)
        best = tl.max(lane_best, axis=0)
        winner = tl.min(tl.where(lane_best == best, lane_id, 0x7FFFFFFF), axis=0)
    else:
        first, second = device_key(tl.load(seed_ptr + row), tl.load(positions_ptr + logit_idx))
        step, origin = device_sequence(first, second)
        divisor = tl.load(divisor_ptr + row)
        divisor = tl.where(divisor == 0.0, 1.0, divisor)
        cutoff = tl.load(cutoff_ptr + logit_idx)
        scale = _LOG2_E / divisor
        # Below this a logit is cut off for certain, and -inf is always.
        floor = cutoff * divisor
        floor = tl.maximum(floor - (tl.abs(floor) * _ROUNDING + 1e-30), -_LARGEST)
        bar = tl.full((), float("inf"), tl.float32)
        lanes = tl.arange(0, BLOCK)
        following = _block_of(logits_ptr, first_id + lanes, vocab_size)
        after = _block_of(logits_ptr, first_id + BLOCK + lanes, vocab_size)
        for start in range(first_id, end_id, BLOCK):
            token_ids = start + lanes
            mask = token_ids < vocab_size
            logit = following.to(tl.float32)
            following = after
            after = _block_of(logits_ptr, token_ids + 2 * BLOCK, vocab_size)
            high = device_high_word(step, origin, token_ids).to(tl.float32)
            # Noise is at most -log(v), so a token whose word is not below this cannot win.
            room = tl.exp2(logit * scale + bar)
            room = tl.where(logit < floor, 0.0, room)
            margin = room - high
            if not (_max_or_nan(margin) <= 0.0):
                # Score the likeliest to win, then the rest of the block if any can still win.
                exponent = tl.maximum(high, 1.0).to(tl.int32, bitcast=True).to(tl.float32)
                guess = logit * scale - exponent * _MANTISSA
                guess = tl.where(guess == guess, guess, float("inf"))
                guess = tl.where(margin <= 0.0, float("-inf"), guess)
                top = tl.max(guess, axis=0)
                chosen = tl.min(tl.where(guess == top, token_ids, 0x7FFFFFFF), axis=0)
                chosen = tl.minimum(chosen, vocab_size - 1)
                logit_of_chosen = tl.load(logits_ptr + chosen).to(tl.float32)
                score = _noisy(logit_of_chosen, chosen, divisor, cutoff, first, second)
                ordered = _ordered(score)
                better = ordered > best
                winner = tl.where(better, chosen, winner)
                best = tl.where(better, ordered, best)
                known = best
                if splits > 1:
                    # What has been scored elsewhere in the row counts, too.
                    seen = tl.atomic_max(best_ptr + logit_idx, _packed(best, winner))
                    known = tl.maximum(best, (seen >> 32).to(tl.int32))
                bar = _bar(_score_of(known))
                room = tl.where(logit < floor, 0.0, tl.exp2(logit * scale + bar))
                rival = ((high < room) | (room != room)) & (token_ids != chosen) & mask
                if tl.max(rival.to(tl.int32), axis=0) > 0:
                    # In small parts: this is rare, and registers are what limits the common path.
                    for part in range(start, tl.minimum(start + BLOCK, end_id), PART):
                        ids = part + tl.arange(0, PART)
                        inside = ids < vocab_size
                        some = tl.load(logits_ptr + ids, mask=inside, other=0.0)
                        some = some.to(tl.float32)
                        scores = _noisy(some, ids, divisor, cutoff, first, second)
                        ordered_all = tl.where(inside, _ordered(scores), -0x80000000)
                        ordered = tl.max(ordered_all, axis=0)
                        chosen = tl.min(tl.where(ordered_all == ordered, ids, 0x7FFFFFFF), axis=0)
                        better = (ordered > best) | ((ordered == best) & (chosen < winner))
                        winner = tl.where(better, chosen, winner)
                        best = tl.where(better, ordered, best)
                    bar = _bar(_score_of(tl.maximum(known, best)))
    if splits == 1:
        tl.store(token_ids_ptr + logit_idx, winner.to(tl.int64))
    else:
        # Who comes last writes the token and leaves the two cells as they were found.
        tl.atomic_max(best_ptr + logit_idx, _packed(best, winner))
        if tl.atomic_add(arrived_ptr + logit_idx, 1) == splits - 1:
            packed = tl.atomic_xchg(best_ptr + logit_idx, _NOTHING)
            tl.store(arrived_ptr + logit_idx, 0)
            tl.store(token_ids_ptr + logit_idx, 0x7FFFFFFF - (packed & 0x7FFFFFFF))


_spaces: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _space(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cells in which programs that share a row meet; every draw leaves them as they are.

    One stream draws at a time, so one pair serves a device.
    """
    if device not in _spaces:
        best = torch.full((_SPLIT_ROWS,), _NOTHING.value, dtype=torch.int64, device=device)
        _spaces[device] = best, torch.zeros(_SPLIT_ROWS, dtype=torch.int32, device=device)
    return _spaces[device]


def _draw_launch(
    token_ids: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    divisor: Tensor,
    cutoff: Tensor,
) -> Launch:
    num_logits, vocab_size = logits.shape
    splits = 1
    if 0 < num_logits <= _SPLIT_ROWS:
        splits = max(1, min(_PROGRAMS // num_logits, cdiv(vocab_size, BLOCK)))
    share = cdiv(cdiv(vocab_size, splits), BLOCK) * BLOCK
    splits = cdiv(vocab_size, share)
    args = (
        token_ids,
        logits,
        logits.stride(0),
        logit_rows,
        positions,
        temperature,
        seed,
        divisor,
        cutoff,
        *_space(logits.device),
        vocab_size,
        share,
        splits,
    )
    constexprs = {"PART": _PART, "BLOCK": BLOCK}
    return Launch(
        _draw_kernel,
        (num_logits, splits),
        args,
        constexprs,
        num_warps=_NUM_WARPS,
        max_registers=_MAX_REGISTERS,
    )


def _draw_reference(
    token_ids: Tensor,
    logits: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    divisor: Tensor,
    cutoff: Tensor,
) -> None:
    """Draw one token for each logits row.

    The lowest id wins a tie. NaN counts as the largest. A token of -inf is drawn only where there
    is nothing else, and then it is token 0.

    Args:
        token_ids: [num_logits] int64. The drawn tokens.
        logits: [num_logits, vocab_size], any float dtype. Rows may be strided. The draw is from
            the softmax of what remains of them, in float32, once divided and cut off.
        logit_rows: [num_logits] int32. Logit -> state row.
        positions: [num_logits] int64. Position of the token to be drawn.
        temperature: [max_rows] float32. 0 takes the likeliest token, without noise; that is the
            only use made of it.
        seed: [max_rows] int64. All 64 bits count.
        divisor: [max_rows] float32. Divides the logits of rows that are not greedy, rounded to
            nearest. 0 and 1 divide nothing.
        cutoff: [at least num_logits] float32. What is smaller once divided counts as -inf, in rows
            that are not greedy. Never above the row's largest.
    """
    torch.argmax(logits, dim=1, out=token_ids)
    random = temperature.index_select(0, logit_rows).nonzero().flatten()
    if not len(random):
        return
    rows = logit_rows.long()
    chunk_size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(random), chunk_size):
        chunk = random[start : start + chunk_size]
        by = divisor[rows[chunk]].unsqueeze(1)
        scores = logits[chunk].float() / torch.where(by == 0.0, 1.0, by)
        scores.masked_fill_(scores < cutoff[chunk].unsqueeze(1), -torch.inf)
        key = reference_key(seed[rows[chunk]], positions[chunk])
        token_ids[chunk] = _drawn(scores, *key)


def _drawn(scores: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the token of each row that wins once noise is added; [num_rows] int64.

    Noise is at most -log(v). What cannot win by that is left out before the noise is worked out,
    which leaves little more than one token a row.
    """
    num_rows, vocab_size = scores.shape
    vocabulary = torch.arange(vocab_size, dtype=torch.int32)
    high = reference_high_word(first.unsqueeze(1), second.unsqueeze(1), vocabulary)
    # The noise is at most 31 log(2) - log(half), here without the constant.
    half = (high >> 1).bitwise_and_(0x7FFFFFFF).float()
    at_most = torch.sub(scores, half.log_(), out=half)
    chosen = at_most.argmax(dim=1, keepdim=True)
    noise = _noise_of(high.gather(1, chosen), first.unsqueeze(1), second.unsqueeze(1), chosen)
    best = scores.gather(1, chosen) + noise
    bar = best - best.abs().mul_(_ROUNDING.value).add_(_SLACK.value + 31 * _LOG_2)
    rows, tokens = (at_most < bar).logical_not_().nonzero(as_tuple=True)
    if len(rows) == num_rows:
        return chosen.squeeze(1)
    found = scores[rows, tokens] + _noise_of(high[rows, tokens], first[rows], second[rows], tokens)
    most = torch.full((num_rows,), -torch.inf).scatter_reduce_(0, rows, found, "amax")
    wins = (found == most[rows]) | found.isnan()
    lowest = torch.full((num_rows,), vocab_size)
    return lowest.scatter_reduce_(0, rows[wins], tokens[wins], "amin")


def _noise_of(high: Tensor, first: Tensor, second: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of tokens; their low words are lost in rounding from 2**25 up."""
    if bool((((high >> 25) & 0x7F) == 0).any()):
        return reference_gumbel(high, reference_low_word(first, second, tokens.int()))
    return reference_gumbel(high, torch.zeros_like(high))


draw = TwinOp(
    "sampling.draw",
    reference=_draw_reference,
    launch=_draw_launch,
    mutates=frozenset({"token_ids"}),
)
