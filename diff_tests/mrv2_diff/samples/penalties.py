"""Samples of `sampling.penalise`: histories around a block, with tokens that repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrv2.sampling import penalties
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


def _penalise(generator: torch.Generator) -> Iterator[Sample]:
    for length in sizes_around(penalties.BLOCK, _LONGEST - 1):
        lengths = [length, length // 2, 0, length, 1]
        yield Sample(name=f"history of {length}", arguments=_arguments(lengths, 173, generator))
    yield Sample(name="one logit", arguments=_arguments([40], 37, generator))
    yield Sample(name="no logits", arguments=_arguments([], 37, generator))
    yield Sample(name="few tokens", arguments=_arguments([1500, 1023, 7], 3, generator))
    yield Sample(
        name="more logits than counts", arguments=_arguments(list(range(11)), 29, generator, 2)
    )
    strange = _arguments([900, 900, 900], 41, generator)
    strange["token_ids"][:, ::3] = 41
    strange["token_ids"][:, 1::7] = -1
    strange["token_ids"][:, 2::5] = 2**31 - 1
    yield Sample(name="ids outside the vocabulary", arguments=strange)
    special = _arguments([60, 60, 60], 5, generator)
    special["logits"][:] = torch.tensor([0.0, -0.0, -torch.inf, torch.inf, torch.nan])
    yield Sample(name="special logits", arguments=special)
    off = _arguments([30, 30], 23, generator)
    for name, none in (("presence", 0.0), ("frequency", 0.0), ("repetition", 1.0)):
        off[name][:] = none
    yield Sample(name="no penalties", arguments=off)


def _arguments(
    lengths: Sequence[int], vocab_size: int, generator: torch.Generator, num_counts: int = 4
) -> dict[str, Tensor]:
    """Logits of requests with these histories; some rows lack a penalty, some all."""
    num_logits = len(lengths)
    rows = scattered_rows(num_logits, _MAX_ROWS, generator)
    rows[1:2] = rows[:1]
    token_ids = integers(0, vocab_size, (_MAX_ROWS, _LONGEST), torch.int32, generator)
    presence, frequency = (torch.randn(_MAX_ROWS, generator=generator) for _ in range(2))
    repetition = torch.rand(_MAX_ROWS, generator=generator) + 0.5
    presence[1::3] = 0.0
    frequency[1::2] = 0.0
    repetition[1::3] = 1.0
    longest = max(lengths, default=0)
    return {
        "logits": strided(torch.randn(num_logits, vocab_size, generator=generator) * 4, gap=3),
        "logit_rows": rows,
        "positions": torch.tensor(lengths, dtype=torch.int64),
        "token_ids": strided(token_ids, gap=2),
        "prompt_len": integers(0, longest + 2, (_MAX_ROWS,), torch.int32, generator),
        "presence": presence,
        "frequency": frequency,
        "repetition": repetition,
        "counts": torch.zeros(num_counts, vocab_size, dtype=torch.int32),
    }


SAMPLES = {"sampling.penalise": OpSamples(generate=_penalise)}
