"""Samples of the op of `mrv2.sampling.min_p`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2.sampling import min_p
from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    integers,
    scattered_rows,
    sizes_around,
    strided,
)

_MAX_ROWS = 13
_INF, _NAN = float("inf"), float("nan")


def _cases(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for vocab_size in sizes_around(min_p.BLOCK, 9001):
        yield f"vocabulary of {vocab_size}", _logits(7, vocab_size, generator)
    wide = _logits(7, min_p.BLOCK + 5, generator)
    yield "strided", strided(wide, gap=3)
    yield "bfloat16", wide.bfloat16()
    yield "float16", wide.half()
    yield "no logits", _logits(0, 37, generator)
    special = _logits(7, 37, generator)
    special[0, 36], special[1, 5], special[2] = _NAN, _INF, -_INF
    special[3], special[4, :30], special[5] = 0.5, -_INF, _NAN
    yield "special values", special


def _logits(num_logits: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_logits, vocab_size, generator=generator) * 4


def _cut_by_min_p(generator: torch.Generator) -> Iterator[Sample]:
    for name, logits in _cases(generator):
        num_logits = len(logits)
        share = torch.rand(_MAX_ROWS, generator=generator)
        share[integers(0, _MAX_ROWS, (4,), torch.int64, generator)] = 0.0
        share[-1] = 1.0
        temperature = torch.rand(_MAX_ROWS, generator=generator) + 0.3
        temperature[:3] = 0.0
        cutoff = torch.full((num_logits,), -_INF)
        cutoff[1::2] = 1.5
        yield Sample(
            name=name,
            arguments={
                "cutoff": cutoff,
                "logits": logits,
                "logit_rows": scattered_rows(num_logits, _MAX_ROWS, generator),
                "temperature": temperature,
                "divisor": torch.where(share > 0.3, temperature, 0.0),
                "log_min_p": share.log(),
            },
        )


SAMPLES = {"sampling.cut_by_min_p": OpSamples(generate=_cut_by_min_p)}
