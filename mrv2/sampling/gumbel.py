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

from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp
from mrv2.sampling.rng import device_key, device_words, reference_key, reference_words

BLOCK = 8192
"""Tokens that a program of `draw` takes at a time. The result does not depend on it. The fastest of
2048 to 16384 with 4 to 32 warps, for 1, 64 and 256 rows of 151,936 on an H200, 2026-11-29: 84 us
for 64 random rows, 26 us for 64 greedy ones."""
_NUM_WARPS = 32
_HIGH = tl.constexpr(2.0**-32)
_LOW = tl.constexpr(2.0**-64)
_LEAST = tl.constexpr(2.0**-65)
"""Stands for v = 0, which would make infinite noise."""
_MOST = tl.constexpr(1 - 2.0**-24)
"""The float32 below 1, which would make no noise at all."""
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
    grid = (triton.cdiv(num_words, block),)
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
def _ordered(score: tl.tensor) -> tl.tensor:
    # An int32 in the order of the floats: -0 equals 0, and NaN is the largest.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _draw_kernel(  # noqa: PLR0913 - a kernel takes its pointers one by one
    token_ids_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    divisor_ptr: tl.tensor,
    cutoff_ptr: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    logit_idx = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows_ptr + logit_idx)
    first, second = device_key(tl.load(seed_ptr + row), tl.load(positions_ptr + logit_idx))
    random = tl.load(temperature_ptr + row) != 0.0
    divisor = tl.load(divisor_ptr + row)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    cutoff = tl.load(cutoff_ptr + logit_idx)
    logits_ptr += logit_idx * logits_stride
    # A lane keeps the best of its own tokens. Ids ascend, so an equal one never replaces it.
    best = tl.full((BLOCK,), -0x80000000, tl.int32)
    best_id = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        mask = token_ids < vocab_size
        score = tl.load(logits_ptr + token_ids, mask=mask, other=0.0).to(tl.float32)
        if random:
            score = tl.div_rn(score, divisor)
            score = tl.where(score < cutoff, float("-inf"), score)
            high, low = device_words(first, second, token_ids)
            score += device_gumbel(high, low)
        ordered = tl.where(mask, _ordered(score), -0x80000000)
        best_id = tl.where(ordered > best, token_ids, best_id)
        best = tl.maximum(ordered, best)
    winner = tl.min(tl.where(best == tl.max(best, axis=0), best_id, 0x7FFFFFFF), axis=0)
    tl.store(token_ids_ptr + logit_idx, winner.to(tl.int64))


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
        vocab_size,
    )
    return Launch(_draw_kernel, (num_logits,), args, {"BLOCK": BLOCK}, num_warps=_NUM_WARPS)


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
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32)
    chunk_size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(random), chunk_size):
        chunk = random[start : start + chunk_size]
        first, second = reference_key(seed[rows[chunk]], positions[chunk])
        high, low = reference_words(first.unsqueeze(1), second.unsqueeze(1), vocabulary)
        by = divisor[rows[chunk]].unsqueeze(1)
        scores = logits[chunk].float() / torch.where(by == 0.0, 1.0, by)
        scores.masked_fill_(scores < cutoff[chunk].unsqueeze(1), -torch.inf)
        token_ids[chunk] = (scores + reference_gumbel(high, low)).argmax(dim=1)


draw = TwinOp(
    "sampling.draw",
    reference=_draw_reference,
    launch=_draw_launch,
    mutates=frozenset({"token_ids"}),
)
