"""Random words as a pure function of (seed, position, token id).

There is no generator and no state: a word is computed where it is needed, so a draw depends neither
on the batch that a request happens to be in, nor on its place there, nor on how its prompt was cut.
All of it is 32-bit integer arithmetic, so the kernel's words and the reference's are the same
integers.

Two 32-bit words are the key of one draw, and each word of a token depends on both, through the
finaliser of MurmurHash3 (in the public domain). The finaliser is a bijection, so no two positions
below 2**32 of one request share a key.

Functions named `device_*` run inside kernels; `reference_*` are the same in torch, and state what
both return.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp

BLOCK = 1024
"""Tokens that a program of `words` hashes."""


@triton.jit
def device_mix(word: tl.tensor) -> tl.tensor:
    """As `reference_mix`, on uint32."""
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    word ^= word >> 16
    return word


@triton.jit
def device_key(seed: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """As `reference_key`, returning uint32."""
    seed_low = seed.to(tl.uint32)
    seed_high = (seed >> 32).to(tl.uint32)
    position_low = position.to(tl.uint32)
    position_high = (position >> 32).to(tl.uint32)
    first = device_mix(position_high ^ 0x9E3779B9)
    first = device_mix(first ^ seed_high)
    first = device_mix(first ^ seed_low)
    first = device_mix(first ^ position_low)
    second = device_mix(position_high ^ 0x7F4A7C15)
    second = device_mix(second ^ seed_low)
    second = device_mix(second ^ position_low)
    second = device_mix(second ^ seed_high)
    return first, second


@triton.jit
def device_words(
    first: tl.tensor, second: tl.tensor, token_ids: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """As `reference_words`, from a uint32 key to uint32."""
    token = token_ids.to(tl.uint32)
    high = device_mix(device_mix(token ^ first) ^ second)
    low = device_mix(device_mix(token ^ second) ^ first)
    return high, low


def reference_mix(word: Tensor) -> Tensor:
    """Return each word mixed, a bijection of 32-bit words.

    Args:
        word: Any shape, int32 with the bits of the word.
    """
    word = word ^ _shifted(word, 16)
    word = word * _as_int32(0x85EBCA6B)
    word = word ^ _shifted(word, 13)
    word = word * _as_int32(0xC2B2AE35)
    return word ^ _shifted(word, 16)


def reference_key(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words that key the draw of one token.

    Args:
        seed: Any shape, int64: all 64 bits count.
        position: As `seed`. Position of the token to be drawn.

    Returns:
        Two int32 tensors of that shape, with the bits of the words.
    """
    seed_low, seed_high = seed.int(), (seed >> 32).int()
    position_low, position_high = position.int(), (position >> 32).int()
    first = reference_mix(position_high ^ _as_int32(0x9E3779B9))
    for word in (seed_high, seed_low, position_low):
        first = reference_mix(first ^ word)
    second = reference_mix(position_high ^ _as_int32(0x7F4A7C15))
    for word in (seed_low, position_low, seed_high):
        second = reference_mix(second ^ word)
    return first, second


def reference_words(first: Tensor, second: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two random words of each token under a key; shapes broadcast.

    Args:
        first: int32, of `reference_key`.
        second: As `first`.
        token_ids: int32.

    Returns:
        The high and the low word, int32 with their bits.
    """
    high = reference_mix(reference_mix(token_ids ^ first) ^ second)
    low = reference_mix(reference_mix(token_ids ^ second) ^ first)
    return high, low


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned: torch cannot shift uint32, and int32 is its fastest integer."""
    return (word >> bits) & (0xFFFFFFFF >> bits)


def _as_int32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def _words_kernel(
    words_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    draw = tl.program_id(0).to(tl.int64)
    first, second = device_key(tl.load(seeds_ptr + draw), tl.load(positions_ptr + draw))
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < num_tokens
    high, low = device_words(first, second, token_ids)
    cell = words_ptr + (draw * num_tokens + token_ids) * 2
    tl.store(cell, high.to(tl.int32, bitcast=True), mask=mask)
    tl.store(cell + 1, low.to(tl.int32, bitcast=True), mask=mask)


def _words_launch(words: Tensor, seeds: Tensor, positions: Tensor) -> Launch:
    num_draws, num_tokens, _ = words.shape
    grid = (num_draws, triton.cdiv(num_tokens, BLOCK))
    return Launch(_words_kernel, grid, (words, seeds, positions, num_tokens), {"BLOCK": BLOCK})


def _words_reference(words: Tensor, seeds: Tensor, positions: Tensor) -> None:
    """Write the random words of every token of every draw.

    Args:
        words: [num_draws, num_tokens, 2] int32, contiguous. Bits of the high and the low word of
            each token id.
        seeds: [num_draws] int64.
        positions: [num_draws] int64.
    """
    first, second = reference_key(seeds, positions)
    token_ids = torch.arange(words.shape[1], dtype=torch.int32)
    high, low = reference_words(first.unsqueeze(1), second.unsqueeze(1), token_ids)
    words[..., 0] = high
    words[..., 1] = low


words = TwinOp(
    "sampling.words",
    reference=_words_reference,
    launch=_words_launch,
    mutates=frozenset({"words"}),
)
