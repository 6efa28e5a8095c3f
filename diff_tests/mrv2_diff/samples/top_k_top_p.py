"""Samples of the op of `mrv2.sampling.top_k_top_p`.

A sum of probabilities may be rounded otherwise by the two halves, so p is moved away from sums at
which it would decide: then both must find the very same cutoff.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2.sampling import top_k_top_p
from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    scattered_rows,
    strided,
)

_MAX_ROWS = 13
_FEW = top_k_top_p.FEW
_INF, _NAN = float("inf"), float("nan")
_TOP_K = (0, 1, 2, 5, 50, 300, 1000, 3000, 10_000, 19_000, 40_000, 7, 0)
_TOP_P = (0.9, 1.0, 0.5, 0.95, 0.9, 0.3, 1.0, 0.99, 0.8, 1.0, 0.7, 0.02, 1.0)
_CLEAR = 2e-5
"""Distance of p from every sum, far above the error of either half."""


def _logits(num_logits: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_logits, vocab_size, generator=generator) * 2


def _cases(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Logits of sizes around the block, and rows that are peaked, flat, tied or no distribution."""
    for vocab_size in (1, 97, 4096, 4099):
        yield f"vocabulary of {vocab_size}", _logits(7, vocab_size, generator)
    for vocab_size in (_FEW - 1, _FEW + 1, 20_011):
        yield f"vocabulary of {vocab_size}", _logits(_MAX_ROWS, vocab_size, generator)
    large = _logits(_MAX_ROWS, 20_011, generator)
    yield "strided", strided(large, gap=5)
    yield "bfloat16", large.bfloat16()
    yield "float16", large.half()
    yield "steep", _logits(_MAX_ROWS, 20_011, generator) * 4
    yield "sorted", large.sort(dim=1).values
    yield "sorted downwards", large.sort(dim=1, descending=True).values
    flat = large.clone()
    flat[:6] = 0.25
    flat[6:10] = (flat[6:10] * 4).round() / 4
    yield "ties", flat
    hidden = large.clone()
    hidden[:, 129] = torch.linspace(5.0, 400.0, _MAX_ROWS)
    yield "a peak that the sample may miss", hidden
    masked = large.clone()
    masked[:, 30:] = -_INF
    masked[3, :29] = -_INF
    yield "few tokens left", masked
    yield "no logits", _logits(0, 37, generator)
    yield "special values", _special(37, generator)
    yield "special values over blocks", _special(20_011, generator)


def _special(vocab_size: int, generator: torch.Generator) -> Tensor:
    logits = _logits(_MAX_ROWS, vocab_size, generator)
    logits[0, -1], logits[1, 5], logits[2] = _NAN, _INF, -_INF
    logits[3], logits[4, : vocab_size - 3], logits[5] = 0.0, -_INF, _NAN
    logits[6, ::2], logits[6, 1::2] = 0.0, -0.0
    logits[7] = -1e38
    return logits


def _clear_of_sums(divided: Tensor, top_k: int, top_p: float, cutoff: float) -> float:
    """Return a p near `top_p` that lies between two sums of the row's probabilities."""
    kept = divided[divided >= cutoff].double()
    if top_p >= 1.0 or not len(kept) or not bool(divided.amax() < _INF):
        return top_p
    if 0 < top_k < len(kept):
        kept = kept[kept >= kept.topk(top_k).values[-1]]
    values, counts = kept.unique(return_counts=True)
    weight = ((values - values.max()).exp() * counts).flip(0)
    sums = weight.cumsum(0) / weight.sum()
    if not bool((sums.diff() > 4 * _CLEAR).any()):
        return float(sums[0]) / 2
    edges = torch.cat((torch.zeros(1), sums))
    gaps = (edges.diff() > 4 * _CLEAR).nonzero().flatten()
    middles = (edges[gaps] + edges[gaps + 1]) / 2
    return float(middles[(middles - top_p).abs().argmin()])


def _cut_to_top(generator: torch.Generator) -> Iterator[Sample]:
    for name, logits in _cases(generator):
        num_logits, vocab_size = logits.shape
        rows = scattered_rows(num_logits, _MAX_ROWS, generator)
        temperature = torch.rand(_MAX_ROWS, generator=generator) + 0.3
        temperature[-2] = 0.0
        divisor = torch.where(torch.rand(_MAX_ROWS, generator=generator) < 0.3, 0.0, temperature)
        top_p = torch.tensor(_TOP_P)
        cutoff = torch.full((num_logits,), -_INF)
        for logit, row in enumerate(rows.tolist()):
            values = logits[logit].float() / (divisor[row] if divisor[row] else 1.0)
            if logit % 3 == 2 and vocab_size > 99 and bool(values.isfinite().all()):
                cutoff[logit] = values.sort().values[vocab_size // 3]
            p = _clear_of_sums(values, _TOP_K[row], _TOP_P[row], float(cutoff[logit]))
            top_p[row] = p
        yield Sample(
            name=name,
            arguments={
                "cutoff": cutoff,
                "logits": logits,
                "logit_rows": rows,
                "temperature": temperature,
                "divisor": divisor,
                "top_k": torch.tensor(_TOP_K, dtype=torch.int32),
                "top_p": top_p,
            },
        )


SAMPLES = {"sampling.cut_to_top": OpSamples(generate=_cut_to_top)}
