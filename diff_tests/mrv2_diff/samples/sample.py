"""What a sample is, and the pieces that samples are made of.

Sizes lie around a kernel's block: 1, block - 1, block, block + 1 and a prime. Rows come in no order
and with gaps. Outputs start as sentinels: zeros would hide a store that should not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

SENTINEL = -77
"""Fills outputs and gaps. Small: a kernel that takes it for an index stays near its array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One set of arguments of an op, on the CPU. A run may write them, so each use takes a copy."""

    name: str
    """What is special about it, unique among the op's samples."""
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far a float may be from the reference's: `|ours - theirs| <= atol + rtol * |theirs|`."""

    atol: float
    rtol: float
    reason: str
    """Why the two halves need not agree exactly, in a sentence."""


Generate: TypeAlias = Callable[[torch.Generator], Iterator[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSamples:
    """The samples of one op, and where it may differ from its reference."""

    generate: Generate
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """By argument. An argument that is not here is compared bit for bit."""


def sizes_around(block: int, prime: int) -> tuple[int, ...]:
    """Return 1, the sizes at the edge of a block, and a prime beyond it."""
    return (1, block - 1, block, block + 1, prime)


def sentinels(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an output that nothing has been written to."""
    return torch.full(shape, SENTINEL, dtype=dtype)


def strided(values: Tensor, gap: int) -> Tensor:
    """Return the matrix with `gap` cells of something else behind each row."""
    num_rows, num_columns = values.shape
    wide = torch.full((num_rows, num_columns + gap), SENTINEL, dtype=values.dtype)
    wide[:, :num_columns] = values
    return wide[:, :num_columns]


def scattered_rows(count: int, max_rows: int, generator: torch.Generator) -> Tensor:
    """Return distinct rows in no order, the last row of the table among them.

    Returns:
        [count] int32 in [0, max_rows).
    """
    rows = torch.randperm(max_rows - 1, generator=generator)[: max(count - 1, 0)]
    rows = torch.cat((rows, torch.tensor([max_rows - 1])))[:count]
    return rows[torch.randperm(count, generator=generator)].int()


def prefix_sums(counts: Sequence[int]) -> Tensor:
    """Return the inclusive sums with a leading zero, [len(counts) + 1] int32."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def integers(
    low: int, high: int, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return uniform integers in [low, high)."""
    return torch.randint(low, high, tuple(shape), dtype=dtype, generator=generator)
