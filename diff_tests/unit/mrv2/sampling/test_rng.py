"""The hash: against known values, against plain integers, and as a source of randomness."""

import torch

from mrv2.sampling.rng import (
    reference_high_word,
    reference_key,
    reference_low_word,
    reference_mix,
)


def mixed(word: int) -> int:
    """The finaliser in plain integers."""
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        word = ((word ^ (word >> shift)) * multiplier) & 0xFFFFFFFF
    return word ^ (word >> 16)


def as_unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.long() & 0xFFFFFFFF


def words_under(first: torch.Tensor, second: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """High and low words of the tokens."""
    return torch.stack(
        (reference_high_word(first, second, tokens), reference_low_word(first, second, tokens))
    )


def words_of(seed: int, position: int, num_tokens: int = 50_000) -> torch.Tensor:
    first, second = reference_key(torch.tensor([seed]), torch.tensor([position]))
    token_ids = torch.arange(num_tokens, dtype=torch.int32)
    return words_under(first, second, token_ids)


def test_finaliser_is_murmur3s() -> None:
    # MurmurHash3_x86_32 of the empty string is the finaliser of its seed alone.
    assert mixed(1) == 0x514E28B7
    assert mixed(0xFFFFFFFF) == 0x81F16F39


def test_mix_is_the_finaliser_in_plain_integers() -> None:
    words = torch.randint(-(2**31), 2**31, (1000,), dtype=torch.int32)
    words[:4] = torch.tensor([0, -1, -(2**31), 2**31 - 1])
    expected = [mixed(word) for word in as_unsigned(words).tolist()]
    assert as_unsigned(reference_mix(words)).tolist() == expected


def test_every_bit_of_seed_and_position_reaches_both_key_words() -> None:
    base = torch.stack(reference_key(torch.tensor([5]), torch.tensor([9])))
    bits = torch.tensor([1 << bit if bit < 63 else -(2**63) for bit in range(64)])
    of_seed = torch.stack(reference_key(5 ^ bits, torch.full_like(bits, 9)))
    of_position = torch.stack(reference_key(torch.full_like(bits, 5), 9 ^ bits))
    assert bool((of_seed != base).all())
    assert bool((of_position != base).all())


def test_positions_of_a_request_do_not_share_a_key() -> None:
    first, second = reference_key(torch.tensor(3), torch.arange(200_000))
    assert len(first.unique()) == 200_000
    assert len(second.unique()) == 200_000


def test_both_words_depend_on_both_halves_of_the_key() -> None:
    tokens = torch.arange(100, dtype=torch.int32)
    one, two, three = (torch.tensor([key], dtype=torch.int32) for key in (1, 2, 3))
    base = words_under(one, two, tokens)
    assert bool((words_under(three, two, tokens) != base).all())
    assert bool((words_under(one, three, tokens) != base).all())


def test_a_flipped_bit_of_the_input_flips_half_of_the_output() -> None:
    # 3.2 million bits each: a share outside 0.5 +- 0.002 is 7 standard deviations off.
    base = words_of(seed=77, position=1000)
    for other in (words_of(76, 1000), words_of(77, 1001), words_of(77 + 2**40, 1000)):
        flipped = as_unsigned(base ^ other)
        share = sum(int(((flipped >> bit) & 1).sum()) for bit in range(32)) / (32 * base.numel())
        assert abs(share - 0.5) < 0.002


def test_high_and_low_word_are_uncorrelated() -> None:
    high, low = as_unsigned(words_of(seed=1, position=2)).double()
    assert abs(float(torch.corrcoef(torch.stack((high, low)))[0, 1])) < 0.02
