"""Samples of the ops that mask logits or add to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2.sampling import allowed_tokens, grammar, logit_bias, min_tokens
from mrv2.sampling.bitmask import num_words, pack
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
_INF = float("inf")


def logits_of(num_logits: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Random logits, some of them -inf."""
    logits = torch.randn(num_logits, vocab_size, generator=generator) * 4
    return logits.masked_fill_(torch.rand(logits.shape, generator=generator) < 0.05, -_INF)


def rows_of(num_logits: int, generator: torch.Generator) -> Tensor:
    """Rows in no order; the first two logits belong to one request."""
    rows = scattered_rows(num_logits, _MAX_ROWS, generator)
    rows[1:2] = rows[:1]
    return rows


def lists_of(by_row: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Return packed words, and the bounds of each row's list."""
    lengths = [len(by_row.get(row, ())) for row in range(_MAX_ROWS)]
    words = [by_row[row].int() for row in sorted(by_row)]
    return torch.cat((*words, torch.tensor([0], dtype=torch.int32))), prefix_sums(lengths)


def _some_ids(count: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Distinct ids in no order, the last one of the vocabulary among them."""
    ids = torch.randperm(vocab_size - 1, generator=generator)[: max(count - 1, 0)]
    return torch.cat((ids, torch.tensor([vocab_size - 1])))[:count]


def _set(share: float, vocab_size: int, generator: torch.Generator) -> Tensor:
    count = max(1, round(share * vocab_size))
    return torch.from_numpy(pack(_some_ids(count, vocab_size, generator).tolist(), vocab_size))


def _allow_tokens(generator: torch.Generator) -> Iterator[Sample]:
    sizes = (*sizes_around(allowed_tokens.BLOCK, 4999), 32, 33, 64)
    for vocab_size in sizes:
        for kind, every in (("each row", 1), ("every other row", 2), ("no row", _MAX_ROWS + 1)):
            logit_rows = rows_of(1 if vocab_size == 64 else 5, generator)
            # Row 0 never has a set where some have none.
            limited = [row for row in range(_MAX_ROWS) if row % every == every - 1]
            sets = {row: _set(row / _MAX_ROWS, vocab_size, generator) for row in limited}
            words, bounds = lists_of(sets)
            logits = logits_of(len(logit_rows), vocab_size, generator)
            yield Sample(
                name=f"vocabulary of {vocab_size}, {kind}",
                arguments={
                    "logits": strided(logits, gap=5) if every == 2 else logits,
                    "logit_rows": logit_rows,
                    "words": words,
                    "bounds": bounds,
                },
            )
    words, bounds = lists_of({4: _set(0.5, 37, generator)})
    yield Sample(
        name="no logits",
        arguments={
            "logits": logits_of(0, 37, generator),
            "logit_rows": rows_of(0, generator),
            "words": words,
            "bounds": bounds,
        },
    )


def _hold_stops(generator: torch.Generator) -> Iterator[Sample]:
    for vocab_size in sizes_around(min_tokens.BLOCK, 2503):
        for count in sorted({1, min(3, vocab_size), vocab_size}):
            stops = {
                row: _some_ids(count, vocab_size, generator) for row in range(_MAX_ROWS) if row % 3
            }
            logits = logits_of(7, vocab_size, generator)
            yield _held(f"{vocab_size} tokens, {count} stop", logits, stops, generator)
    yield _held("nothing but stops", *_only_stops(generator), generator, yielding=True)
    yield _held("nothing but stops, strict", *_only_stops(generator), generator, yielding=False)
    yield _held("no logits", logits_of(0, 37, generator), {1: torch.tensor([3])}, generator)
    none: dict[int, Tensor] = {}
    yield _held("no stops", logits_of(3, 37, generator), none, generator)


def _only_stops(generator: torch.Generator) -> tuple[Tensor, dict[int, Tensor]]:
    """Rows that a grammar left nothing but stop tokens, some of whose logits are not finite."""
    vocab_size = min_tokens.BLOCK + 9
    stops = torch.tensor([0, 5, min_tokens.BLOCK, vocab_size - 1])
    logits = torch.full((6, vocab_size), -_INF)
    logits[:, stops] = torch.randn(6, len(stops), generator=generator)
    logits[1, stops[1]] = -_INF
    logits[2, stops[2]] = _INF
    logits[3, stops[3]] = float("nan")
    logits[4, 7] = -3.0
    logits[5, 7] = float("nan")
    return strided(logits, gap=3), dict.fromkeys(range(_MAX_ROWS), stops)


def _held(
    name: str,
    logits: Tensor,
    stops: dict[int, Tensor],
    generator: torch.Generator,
    *,
    yielding: bool | None = None,
) -> Sample:
    """A sample in which about half of the rows have outputs enough; all have too few if `yielding`.

    Args:
        name: Of the sample.
        logits: Of the sample.
        stops: Stop tokens by row.
        generator: Draws the rest.
        yielding: Whether rows yield; at random by default.
    """
    stop_ids, bounds = lists_of(stops)
    positions = integers(2**31 - 5, 2**31 - 1, (len(logits),), torch.int64, generator)
    free_from = integers(2**31 - 5, 2**31 - 1, (_MAX_ROWS,), torch.int32, generator)
    yields = integers(0, 2, (_MAX_ROWS,), torch.int32, generator)
    if yielding is not None:
        free_from.fill_(2**31 - 1)
        yields.fill_(int(yielding))
    return Sample(
        name=name,
        arguments={
            "logits": logits,
            "logit_rows": rows_of(len(logits), generator),
            "positions": positions,
            "free_from": free_from,
            "yields": yields,
            "stop_ids": stop_ids,
            "bounds": bounds,
        },
    )


def _add_bias(generator: torch.Generator) -> Iterator[Sample]:
    for count in (*sizes_around(logit_bias.BLOCK, 997), 0):
        vocab_size = max(count, 37)
        pairs = {}
        for row in range(_MAX_ROWS):
            if row % 3 and count:
                ids = _some_ids(count, vocab_size, generator).int()
                biases = torch.randn(count, generator=generator) * 50
                pairs[row] = torch.stack((ids, biases.view(torch.int32)), dim=1).flatten()
        words, bounds = lists_of(pairs)
        logits = logits_of(6, vocab_size, generator)
        yield Sample(
            name=f"{count} biases",
            arguments={
                "logits": strided(logits, gap=3),
                "logit_rows": rows_of(6, generator),
                "words": words,
                "bounds": bounds,
            },
        )


def _apply_bitmask(generator: torch.Generator) -> Iterator[Sample]:
    for vocab_size in (*sizes_around(grammar.BLOCK, 4999), 32, 33):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            bitmask = integers(
                -(2**31), 2**31 - 1, (3, num_words(vocab_size)), torch.int32, generator
            )
            logits = logits_of(7, vocab_size, generator).to(dtype)
            yield Sample(
                name=f"{dtype}, vocabulary of {vocab_size}",
                arguments={
                    "logits": strided(logits, gap=5) if dtype != torch.float32 else logits,
                    "bitmask": strided(bitmask, gap=2) if vocab_size == 33 else bitmask,
                    "logit_idx": torch.tensor([6, 0, 3], dtype=torch.int32),
                },
            )
    logits = logits_of(2, 65, generator)
    bitmask = torch.tensor([[0, 0, 2], [-1, -1, -1]], dtype=torch.int32)
    for name, rows in (("all or nothing", [1, 0]), ("none", [])):
        yield Sample(
            name=name,
            arguments={
                "logits": logits,
                "bitmask": bitmask[: len(rows)],
                "logit_idx": torch.tensor(rows, dtype=torch.int32),
            },
        )


SAMPLES = {
    "sampling.allow_tokens": OpSamples(generate=_allow_tokens),
    "sampling.hold_stops": OpSamples(generate=_hold_stops),
    "sampling.add_bias": OpSamples(generate=_add_bias),
    "sampling.apply_bitmask": OpSamples(generate=_apply_bitmask),
}
