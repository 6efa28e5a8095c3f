"""Samples of the ops of `mrv2.memory`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2.memory.arena import PIECE
from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    integers,
    sentinels,
    sizes_around,
)

_LENGTHS = (*sizes_around(PIECE, 300), 7, 1)
_FAR = 40
"""Words between two writes that nobody may touch."""


_MAPPED = 1 << 28
"""High word of the address of a word that is mapped."""


def _packed(writes: list[tuple[int, Tensor]], mapped: tuple[int, ...] = ()) -> Tensor:
    """Headers of start (two words), length and offset, then the values.

    Writes of the numbers in `mapped` go to mapped memory.
    """
    headers, offset = list[int](), 4 * len(writes)
    for number, (start, values) in enumerate(writes):
        headers += [start, _MAPPED if number in mapped else 0, len(values), offset]
        offset += len(values)
    return torch.cat((torch.tensor(headers).int(), *(values.int() for _, values in writes)))


def _staged_write(generator: torch.Generator) -> Iterator[Sample]:
    values = [integers(-1000, 1000, (n,), torch.int32, generator) for n in _LENGTHS]
    ragged, start = [], _FAR
    for value in values:
        ragged.append((start, value))
        start += min(len(value), PIECE) + _FAR
    order = torch.randperm(len(ragged), generator=generator).tolist()
    side_by_side = [(3, torch.tensor([1, 2])), (5, torch.tensor([3])), (0, torch.tensor([4, 5, 6]))]
    edges = [(0, torch.tensor([9])), (99, torch.tensor([-1]))]
    for name, writes, mapped, num_words in (
        ("ragged", [ragged[index] for index in order], (), start),
        ("every other one to mapped memory", ragged, tuple(range(0, len(ragged), 2)), start),
        ("all to mapped memory", side_by_side, (0, 1, 2), 6),
        ("side by side", side_by_side, (), 6),
        ("the first and the last word", edges, (), 100),
        ("an empty write", [(2, torch.tensor([]))], (), 4),
        ("none", [], (), 4),
    ):
        yield Sample(
            name=name,
            arguments={
                "target": sentinels(num_words, dtype=torch.int32),
                "mapped": sentinels(num_words, dtype=torch.int32),
                "packed": _packed(writes, mapped),
                "num_pieces": len(writes),
            },
        )


def _publish(generator: torch.Generator) -> Iterator[Sample]:
    for name, num_reqs, width, cursor in (
        ("one", 1, 1, 0),
        ("the last slot", 3, 1, 7),
        ("none at all", 0, 1, 2),
        ("around a block", 1024, 1, 4),
        ("more than a block", 1025, 1, 5),
        ("drafts, some rejected", 5, 4, 3),
        ("drafts, more than a block", 350, 3, 1),
    ):
        yield Sample(
            name=name,
            arguments={
                "token_ids": integers(0, 2**40, (num_reqs, width), torch.int64, generator),
                "num_sampled": integers(0, width + 1, (num_reqs,), torch.int32, generator),
                "cursor": torch.tensor([cursor], dtype=torch.int32),
                "ring": sentinels(8, 1100, dtype=torch.int64),
            },
        )


SAMPLES = {
    "memory.staged_write": OpSamples(generate=_staged_write),
    "memory.publish": OpSamples(generate=_publish),
}
