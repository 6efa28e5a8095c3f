"""Sets of tokens: the right bits, whatever the vocabulary's size leaves in the last word."""

import numpy as np
import pytest
import torch

from mrv2.sampling.bitmask import absent, num_words, pack


def test_the_lowest_bit_of_the_first_word_is_token_0() -> None:
    assert pack([0, 5, 33], 40).tolist() == [0b100001, 0b10]


def test_the_highest_bit_is_the_sign() -> None:
    assert pack([31, 31], 32).tolist() == [-(2**31)]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 331, 4099])
def test_packed_and_read_again(vocab_size: int) -> None:
    chosen = np.random.default_rng(vocab_size).random((4, vocab_size)) < 0.4
    sets = np.stack([pack(np.flatnonzero(row).tolist(), vocab_size) for row in chosen])
    assert sets.shape == (4, num_words(vocab_size))
    assert sets.dtype == np.int32
    assert np.array_equal(~absent(torch.from_numpy(sets), vocab_size).numpy(), chosen)


def test_no_sets_at_all() -> None:
    assert absent(torch.zeros(0, 2, dtype=torch.int32), 40).shape == (0, 40)
