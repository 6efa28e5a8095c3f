"""Samples of the ops of `mrv2.memory`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    integers,
    scattered_rows,
    sentinels,
    sizes_around,
    strided,
)

_BLOCK = 256
_NUM_ROWS = 11
_LENGTHS = (*sizes_around(_BLOCK, 521), 0, 7)
_NUM_COLUMNS = 600


def _packed(writes: list[tuple[int, int, Tensor]], dtype: torch.dtype) -> Tensor:
    """Headers of row, start, length and offset, then the values."""
    headers, offset = [], 4 * len(writes)
    for row, start, values in writes:
        headers += [row, start, len(values), offset]
        offset += len(values)
    return torch.cat(
        (torch.tensor(headers, dtype=dtype), *(values.to(dtype) for _, _, values in writes))
    )


def _staged_write(generator: torch.Generator) -> Iterator[Sample]:
    rows = scattered_rows(len(_LENGTHS), _NUM_ROWS, generator).tolist()
    writes = []
    for row, length in zip(rows, _LENGTHS, strict=True):
        # Up to the last column, so that a store past the end leaves the row.
        start = _NUM_COLUMNS - length
        values = integers(0, 1000, (length,), torch.int32, generator)
        writes.append((row, start, values))
    same_row = [(3, 5, torch.tensor([1, 2])), (3, 7, torch.tensor([3])), (3, 0, torch.tensor([4]))]
    for name, dtype, chosen in (
        ("ragged int32", torch.int32, writes),
        ("ragged int64", torch.int64, writes),
        ("several to one row", torch.int32, same_row),
        ("first cell", torch.int32, [(0, 0, torch.tensor([9]))]),
        ("an empty write", torch.int32, [(2, 1, torch.tensor([]))]),
        ("none", torch.int32, []),
    ):
        target = sentinels(_NUM_ROWS, _NUM_COLUMNS, dtype=dtype)
        yield Sample(
            name=name,
            arguments={
                "target": strided(target, gap=5) if chosen is writes else target,
                "packed": _packed(chosen, dtype),
                "num_writes": len(chosen),
                "max_length": max((len(values) for _, _, values in chosen), default=0),
            },
        )


SAMPLES = {"memory.staged_write": OpSamples(generate=_staged_write)}
