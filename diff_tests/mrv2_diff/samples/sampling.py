"""Samples of the ops of `mrv2.sampling`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2.sampling import gumbel, rng
from mrv2.sampling.narrowing import BLOCK as NARROWING_BLOCK
from mrv2_diff.samples.sample import (
    Bound,
    OpSamples,
    Sample,
    integers,
    scattered_rows,
    sentinels,
    sizes_around,
    strided,
)

_BLOCK = gumbel.BLOCK
_VOCAB_SIZES = sorted({*sizes_around(_BLOCK, 16_411), *sizes_around(NARROWING_BLOCK, 4999)})
_MAX_ROWS = 13
_NAN, _INF = float("nan"), float("inf")


def _words(generator: torch.Generator) -> Iterator[Sample]:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 1 << 32, 20_241])
    positions = torch.tensor([0, 1, 2**31, 2**33 + 5, 7, 0])
    for num_tokens in (*sizes_around(rng.BLOCK, 1579), 0):
        count = 1 if num_tokens == 1 else len(seeds)
        yield Sample(
            name=f"{num_tokens} tokens",
            arguments={
                "words": sentinels(count, num_tokens, 2, dtype=torch.int32),
                "seeds": seeds[:count].clone(),
                "positions": positions[:count].clone(),
            },
        )


def _noise(generator: torch.Generator) -> Iterator[Sample]:
    for count in (*sizes_around(1024, 1579), 0):
        words = integers(-(2**31), 2**31, (count, 2), torch.int32, generator)
        yield Sample(name=f"{count} random words", arguments=_noise_arguments(words))
    edges = [0, 1, 2, 255, 256, 2**24, 2**24 + 1, 2**31 - 1, -(2**31), -129, -128, -2, -1]
    corners = torch.cartesian_prod(*[torch.tensor(edges, dtype=torch.int32)] * 2)
    yield Sample(name="extreme words", arguments=_noise_arguments(corners))
    powers = torch.tensor([1 << shift for shift in range(31)], dtype=torch.int32)
    small = torch.stack((powers, torch.zeros_like(powers)), dim=1)
    yield Sample(name="ever smaller high words", arguments=_noise_arguments(small))
    yield Sample(name="ever smaller low words", arguments=_noise_arguments(small.flip(1)))


def _noise_arguments(words: Tensor) -> dict[str, Tensor]:
    return {
        "noise": sentinels(len(words), dtype=torch.float32),
        "words": words.contiguous(),
    }


def normal_logits(num_logits: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Logits of a usual spread."""
    return torch.randn(num_logits, vocab_size, generator=generator) * 4


def _special_logits(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows with ties, signed zeros, -inf, +inf and NaN, in this order below."""
    logits = normal_logits(9, vocab_size, generator)
    middle, last = vocab_size // 2, vocab_size - 1
    logits[0] = 0.5
    logits[1] = 0.0
    logits[1, :middle] = -0.0
    logits[2] = -_INF
    logits[3] = -_INF
    logits[3, last] = -3.0
    logits[4, middle] = _INF
    logits[4, last] = _INF
    logits[5, middle] = _NAN
    logits[6, last] = -_NAN
    logits[6, middle] = _INF
    logits[7, 0], logits[7, last] = 50.0, 50.0
    logits[8, : last // 2] = -_INF
    return logits


def logits_cases(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Logits of every size, and the special ones at two sizes."""
    for vocab_size in _VOCAB_SIZES:
        yield f"vocabulary of {vocab_size}", normal_logits(5, vocab_size, generator)
    yield "one logit", normal_logits(1, 37, generator)
    yield "no logits", normal_logits(0, 37, generator)
    yield "strided", strided(normal_logits(5, _BLOCK + 1, generator), gap=7)
    yield "special values", _special_logits(37, generator)
    yield "special values over blocks", strided(_special_logits(_BLOCK + 5, generator), gap=3)


def _logit_rows(num_logits: int, generator: torch.Generator) -> Tensor:
    """Rows in no order; the first two logits belong to one request."""
    rows = scattered_rows(num_logits, _MAX_ROWS, generator)
    rows[1:2] = rows[:1]
    return rows


def _temperatures(generator: torch.Generator, greedy: float) -> Tensor:
    """A column in which a share of the rows is greedy."""
    temperature = torch.rand(_MAX_ROWS, generator=generator) + 0.3
    temperature[torch.rand(_MAX_ROWS, generator=generator) < greedy] = 0.0
    return temperature


def _cutoffs(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Cutoffs between -inf, which cuts nothing, and the largest logit, which leaves one."""
    share = torch.rand(len(logits), generator=generator)
    cutoff = torch.full((len(logits),), -_INF)
    for row, values in enumerate(logits):
        finite = values[values.isfinite()]
        if len(finite) and share[row] > 0.3:
            cutoff[row] = finite.sort().values[int((len(finite) - 1) * share[row])]
    return cutoff


def _draw(generator: torch.Generator) -> Iterator[Sample]:
    for kind, greedy in (("greedy", 1.0), ("random", 0.0), ("mixed", 0.5)):
        cases = list(logits_cases(generator))
        half = normal_logits(5, _BLOCK + 1, generator)
        cases += [("bfloat16", half.bfloat16()), ("float16", half.half())]
        for name, logits in cases:
            num_logits = len(logits)
            narrowed = bool(torch.rand(1, generator=generator) < 0.5)
            uncut = torch.full((num_logits,), -_INF)
            yield Sample(
                name=f"{kind}, {name}",
                arguments={
                    "token_ids": sentinels(num_logits, dtype=torch.int64),
                    "logits": logits,
                    "logit_rows": _logit_rows(num_logits, generator),
                    "positions": integers(0, 2**34, (num_logits,), torch.int64, generator),
                    "temperature": _temperatures(generator, greedy),
                    "seed": integers(-(2**63), 2**63 - 1, (_MAX_ROWS,), torch.int64, generator),
                    "divisor": _temperatures(generator, 0.3),
                    "cutoff": _cutoffs(logits.float(), generator) if narrowed else uncut,
                },
            )


def _settle_logits(generator: torch.Generator) -> Iterator[Sample]:
    for kind, greedy in (("all divided", 0.0), ("some rows greedy", 0.5), ("all greedy", 1.0)):
        for name, logits in logits_cases(generator):
            yield Sample(
                name=f"{kind}, {name}",
                arguments={
                    "logits": logits,
                    "logit_rows": _logit_rows(len(logits), generator),
                    "divisor": _temperatures(generator, greedy),
                    "cutoff": _cutoffs(logits, generator),
                },
            )


SAMPLES = {
    "sampling.words": OpSamples(generate=_words),
    "sampling.noise": OpSamples(
        generate=_noise,
        bounds={
            "noise": Bound(
                atol=1e-6, rtol=5e-7, reason="Two logs and a division, each within 2 ulp of exact."
            )
        },
    ),
    "sampling.draw": OpSamples(generate=_draw),
    "sampling.settle_logits": OpSamples(generate=_settle_logits),
}
