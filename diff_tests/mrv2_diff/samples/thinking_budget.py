"""Samples of `sampling.force_end`: few distinct tokens, so that markers abound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrv2.sampling import thinking_budget
from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    integers,
    scattered_rows,
    sizes_around,
    strided,
)

_MAX_ROWS = 13
_LONGEST = 2311
_VOCAB = 5
_MARKERS: tuple[tuple[list[int], list[int], list[int]], ...] = (
    ([1], [2], [2]),
    ([1, 3], [2, 0], [2, 0]),
    ([1], [2], [0, 3, 2]),
    ([1, 0, 1], [0, 0], [0, 0, 0, 3]),
)


def _force_end(generator: torch.Generator) -> Iterator[Sample]:
    for markers in _MARKERS:
        for number in range(4):
            arguments = _arguments([*range(3, 35, 3)], 7, markers, generator)
            yield Sample(name=f"short histories {number}, {markers}", arguments=arguments)
    for length in sizes_around(thinking_budget.BLOCK, _LONGEST - 1):
        arguments = _arguments(
            [length, 1 + length // 2, length, length], 400, _MARKERS[1], generator
        )
        yield Sample(name=f"history of {length}", arguments=arguments)
    for at in (1023, 1024, 2300):
        for length in (at + 1, at + 2, at + 3, at + 4):
            yield Sample(name=f"one section at {at}, {length} tokens", arguments=_lone(at, length))
    yield Sample(name="no logits", arguments=_arguments([], 7, _MARKERS[0], generator))
    outside = _arguments([9, 9, 9], 1, ([1], [2], [_VOCAB]), generator)
    outside["budget"][:] = 0
    outside["opened"][:] = 3
    outside["token_ids"][:] = 4
    yield Sample(name="an end outside the vocabulary", arguments=outside)
    long = _arguments([1900] * 5, 1, ([1], [2], [3] * 1500 + [4]), generator)
    long["token_ids"][:] = 3
    long["token_ids"][1::2, 1000] = 0
    long["opened"][:] = 5
    long["prompt_len"][:] = 6
    long["budget"][:] = torch.arange(_MAX_ROWS) + 500
    yield Sample(name="an end longer than a block", arguments=long)


def _arguments(
    lengths: Sequence[int],
    largest_budget: int,
    markers: tuple[list[int], list[int], list[int]],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Histories of random tokens, in some of which a forced end is under way."""
    num_logits = len(lengths)
    rows = scattered_rows(num_logits, _MAX_ROWS, generator)
    rows[1:2] = rows[:1]
    token_ids = integers(0, _VOCAB, (_MAX_ROWS, _LONGEST), torch.int32, generator)
    prompt_len = integers(1, 1 + min([4, *lengths]), (_MAX_ROWS,), torch.int32, generator)
    budget = integers(-1, largest_budget, (_MAX_ROWS,), torch.int32, generator)
    opened = torch.where(torch.rand(_MAX_ROWS, generator=generator) < 0.5, prompt_len - 1, -1)
    end = markers[2]
    for row in range(_MAX_ROWS):
        if opened[row] >= 0 and budget[row] >= 0:
            due = max(int(opened[row] + budget[row]), int(prompt_len[row]))
            forced = end[: len(token_ids[row, due:])]
            token_ids[row, due : due + len(forced)] = torch.tensor(forced, dtype=torch.int32)
    start, natural_end, end_marker = (torch.tensor(m, dtype=torch.int32) for m in markers)
    return {
        "logits": strided(torch.randn(num_logits, _VOCAB, generator=generator), gap=9),
        "logit_rows": rows,
        "positions": torch.tensor(lengths, dtype=torch.int64),
        "token_ids": strided(token_ids, gap=2),
        "prompt_len": prompt_len,
        "budget": budget,
        "opened": opened.int(),
        "start": start,
        "natural_end": natural_end,
        "end": end_marker,
    }


def _lone(at: int, length: int) -> dict[str, Tensor]:
    """One section of budget 1 that begins with a marker of two tokens at the edge of a block."""
    arguments = _arguments([length], 1, _MARKERS[1], torch.Generator().manual_seed(at))
    arguments["token_ids"][:] = 4
    arguments["token_ids"][:, at : at + 4] = torch.tensor([1, 3, 4, 2], dtype=torch.int32)
    arguments["prompt_len"][:] = 2
    arguments["opened"][:] = -1
    arguments["budget"][:] = 1
    return arguments


SAMPLES = {"sampling.force_end": OpSamples(generate=_force_end)}
