"""Random words as a pure function of (seed, position, token id).

There is no generator and no state: a word is computed where it is needed, so a draw depends neither
on the batch that a request happens to be in, nor on its place there, nor on how its prompt was cut.
All of it is 32-bit integer arithmetic, so the kernel's words and the reference's are the same
integers.

Two 32-bit words are the key of one draw. They pick a sequence of 32-bit integers, an odd step and a
start, of which a token takes the element of its number; the finaliser of MurmurHash3 (in the public
domain) makes it the token's high word. Step and finaliser are bijections: the tokens of one draw
have distinct high words, and no two positions below 2**32 of one request share a key. The low word,
which few draws need, is mixed from token and key in another way.

Functions named `device_*` run inside kernels; `reference_*` are the same in torch, and state what
both return.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.ops.launch import Launch, cdiv
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
def device_sequence(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """As `reference_sequence`, from a uint32 key to uint32."""
    return first | 1, device_mix(first) ^ second


@triton.jit
def device_high_word(step: tl.tensor, start: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """As `reference_high_word`, to uint32."""
    return device_mix(token_ids.to(tl.uint32) * step + start)


@triton.jit
def device_low_word(first: tl.tensor, second: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """As `reference_low_word`, from a uint32 key to uint32."""
    return device_mix(device_mix(token_ids.to(tl.uint32) ^ second) ^ first)


def reference_mix(word: Tensor) -> Tensor:
    """Return each word mixed, a bijection of 32-bit words.

    Args:
        word: Any shape, int32 with the bits of the word.
    """
    return _mix_in_place(word.clone())


def _mix_in_place(word: Tensor) -> Tensor:
    word ^= _shifted(word, 16)
    word *= _as_int32(0x85EBCA6B)
    word ^= _shifted(word, 13)
    word *= _as_int32(0xC2B2AE35)
    word ^= _shifted(word, 16)
    return word


def reference_key(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two words that key the draw of one token.

    Args:
        seed: Any shape, int64: all 64 bits count.
        position: As `seed`. Position of the token to be drawn.

    Returns:
        Two int32 tensors of that shape, with the bits of the words.
    """
    seed, position = torch.broadcast_tensors(seed, position)
    seed_low, seed_high = seed.int(), (seed >> 32).int()
    position_low, position_high = position.int(), (position >> 32).int()
    # Both words in one tensor, which halves the number of small operations.
    start = (position_high ^ _as_int32(0x9E3779B9), position_high ^ _as_int32(0x7F4A7C15))
    key = _mix_in_place(torch.stack(start))
    for pair in ((seed_high, seed_low), (seed_low, position_low), (position_low, seed_high)):
        key = _mix_in_place(torch.stack(pair).bitwise_xor_(key))
    return key[0], key[1]


def reference_sequence(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return step and start of the sequence that a key picks.

    Args:
        first: int32, of `reference_key`.
        second: As `first`.

    Returns:
        Two int32 tensors of that shape, with the bits of the words. The step is odd.
    """
    return first | 1, reference_mix(first) ^ second


def reference_high_word(first: Tensor, second: Tensor, token_ids: Tensor) -> Tensor:
    """Return the high word of each token under a key; shapes broadcast.

    Args:
        first: int32, of `reference_key`.
        second: As `first`.
        token_ids: int32.

    Returns:
        int32 with the bits of the word.
    """
    step, start = reference_sequence(first, second)
    return _mix_in_place(token_ids * step + start)


def reference_low_word(first: Tensor, second: Tensor, token_ids: Tensor) -> Tensor:
    """Return the low word of each token under a key, as `reference_high_word` does the high one."""
    return reference_mix(reference_mix(token_ids ^ second) ^ first)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned: torch cannot shift uint32, and int32 is its fastest integer."""
    shifted = word >> bits
    shifted &= 0xFFFFFFFF >> bits
    return shifted


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
    step, start = device_sequence(first, second)
    high = device_high_word(step, start, token_ids)
    low = device_low_word(first, second, token_ids)
    cell = words_ptr + (draw * num_tokens + token_ids) * 2
    tl.store(cell, high.to(tl.int32, bitcast=True), mask=mask)
    tl.store(cell + 1, low.to(tl.int32, bitcast=True), mask=mask)


def _words_launch(words: Tensor, seeds: Tensor, positions: Tensor) -> Launch:
    num_draws, num_tokens, _ = words.shape
    grid = (num_draws, cdiv(num_tokens, BLOCK))
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
    first, second = first.unsqueeze(1), second.unsqueeze(1)
    words[..., 0] = reference_high_word(first, second, token_ids)
    words[..., 1] = reference_low_word(first, second, token_ids)


words = TwinOp(
    "sampling.words",
    reference=_words_reference,
    launch=_words_launch,
    mutates=frozenset({"words"}),
)
