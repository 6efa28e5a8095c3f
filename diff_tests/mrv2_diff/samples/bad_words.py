"""Samples of `sampling.mask_bad_words`: few distinct tokens, so that words are often complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrv2.sampling import bad_words
from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    integers,
    prefix_sums,
    scattered_rows,
    sizes_around,
    strided,
)

_MAX_ROWS = 13
_MAX_LEN = 40
_VOCAB = 3


def _mask_bad_words(generator: torch.Generator) -> Iterator[Sample]:
    for count in (*sizes_around(bad_words.BLOCK, 307), 0):
        words = [_words(count, generator) if row % 4 else [] for row in range(_MAX_ROWS)]
        yield Sample(name=f"{count} words", arguments=_arguments(words, 7, generator))
    words = [_words(3, generator) for _ in range(_MAX_ROWS)]
    yield Sample(name="one logit", arguments=_arguments(words, 1, generator))
    yield Sample(name="no logits", arguments=_arguments(words, 0, generator))
    outside = [[[_VOCAB], [-1], [2**31 - 1], [0, _VOCAB + 3]] for _ in range(_MAX_ROWS)]
    outside[_MAX_ROWS - 1].append([1])
    yield Sample(name="ids outside the vocabulary", arguments=_arguments(outside, 7, generator))
    long = [[[1] * 17, [1] * 39], [[1] * 30, [2]], []]
    constant = _arguments([long[row % 3] for row in range(_MAX_ROWS)], 7, generator)
    constant["token_ids"][:] = 1
    constant["prompt_len"][:] = 3
    yield Sample(name="long words", arguments=constant)


def _words(count: int, generator: torch.Generator) -> list[list[int]]:
    lengths = integers(1, 5, (count,), torch.int64, generator).tolist()
    return [integers(0, _VOCAB, (n,), torch.int64, generator).tolist() for n in lengths]


def _packed(words: Sequence[Sequence[Sequence[int]]]) -> tuple[Tensor, Tensor]:
    lists = [bad_words.encode(of_row) for of_row in words]
    packed = [word for of_row in lists for word in of_row]
    bounds = prefix_sums([len(of_row) for of_row in lists])
    return bounds, torch.tensor(packed or [0], dtype=torch.int32)


def _arguments(
    words: Sequence[Sequence[Sequence[int]]], num_logits: int, generator: torch.Generator
) -> dict[str, Tensor]:
    rows = scattered_rows(num_logits, _MAX_ROWS, generator)
    rows[1:2] = rows[:1]
    token_ids = integers(0, _VOCAB, (_MAX_ROWS, _MAX_LEN), torch.int32, generator)
    bounds, packed = _packed(words)
    return {
        "logits": strided(torch.randn(num_logits, _VOCAB, generator=generator), gap=9),
        "logit_rows": rows,
        "positions": integers(6, _MAX_LEN, (num_logits,), torch.int64, generator),
        "token_ids": strided(token_ids, gap=2),
        "prompt_len": integers(1, 9, (_MAX_ROWS,), torch.int32, generator),
        "bounds": bounds,
        "words": packed,
    }


SAMPLES = {"sampling.mask_bad_words": OpSamples(generate=_mask_bad_words)}
