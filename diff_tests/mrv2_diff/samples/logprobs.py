"""Samples of the ops that summarise logits and score tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrv2.sampling.likeliest import (
    CHUNK,
    MAX_CHUNKS,
    MAX_TOP,
    WIDTH,
    merge_summaries,
    summarize_logits,
)
from mrv2.sampling.logprobs import BLOCK
from mrv2_diff.samples.sample import (
    Bound,
    OpSamples,
    Sample,
    integers,
    prefix_sums,
    scattered_rows,
    sentinels,
    sizes_around,
    strided,
)
from mrv2_diff.samples.sampling import logits_cases, normal_logits

_MAX_ROWS = 13
_LOG_SUM = Bound(
    atol=5e-6,
    rtol=0.0,
    reason="torch adds a row in few lanes, so the reference's own error grows with the row: 2.2e-6 "
    "at 16,411 tokens, where the kernel's is 2e-7.",
)
_MERGED_LOG_SUM = Bound(
    atol=2e-6, rtol=0.0, reason="Exponentials of numbers up to 12, each off by half an ulp of them."
)


def _logits(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Logits of sizes around what a program takes, special values, ties, and other dtypes."""
    for vocab_size in (*sizes_around(CHUNK, 2 * CHUNK + 1579), 3 * CHUNK):
        yield f"vocabulary of {vocab_size}", normal_logits(2, vocab_size, generator)
    yield from (case for case in logits_cases(generator) if not case[0].startswith("vocab"))
    levels = normal_logits(3, 3 * CHUNK + 3, generator).round()
    yield "few distinct logits", levels
    yield "the likeliest in one lane", _in_one_lane(levels)
    yield "too close to tell", normal_logits(7, BLOCK + 3, generator) * 1e-7
    yield "NaN beside -inf", _nan_beside_nothing(3 * CHUNK - 9)
    yield "far below 0", torch.full((2, 99), -1e30)
    yield "wide", normal_logits(3, 4999, generator) * 30
    for dtype in (torch.bfloat16, torch.float16):
        half = normal_logits(3, CHUNK + 5, generator).to(dtype)
        yield str(dtype), strided(half, gap=3)


def _nan_beside_nothing(vocab_size: int) -> Tensor:
    """Rows of NaN and -inf alone: whole chunks of the one before chunks of the other."""
    logits = torch.full((4, vocab_size), -torch.inf)
    logits[0, :CHUNK] = torch.nan
    logits[1, CHUNK:] = torch.nan
    logits[2] = torch.nan
    logits[2, 7::5] = -torch.inf
    logits[3, : 2 * CHUNK + 17] = torch.nan
    logits[3, -1] = 3.0
    return logits


def _in_one_lane(logits: Tensor) -> Tensor:
    """Logits whose largest ones lie where one lane reads, chunk by chunk, and beside it."""
    logits = logits.clone()
    for chunk in range(3):
        first = chunk * CHUNK + 5 * WIDTH
        logits[:, first : first + WIDTH] += 40.0
    logits[:, CHUNK + 1] = 41.0
    return logits


def _tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token of each row: any, but the last row's last one."""
    num_logits, vocab_size = logits.shape
    token_ids = integers(0, vocab_size, (num_logits,), torch.int64, generator)
    token_ids[-1:] = vocab_size - 1
    return token_ids


def _summarize_logits(generator: torch.Generator) -> Iterator[Sample]:
    for name, logits in _logits(generator):
        num_logits, vocab_size = logits.shape
        top = int(integers(0, 8, (1,), torch.int64, generator))
        for chunks, num_top in ((1, MAX_TOP), (2, top), (MAX_CHUNKS, 3)):
            if chunks > 1 and vocab_size <= CHUNK and name != "one logit":
                continue
            if chunks == MAX_CHUNKS and not name.startswith(("vocabulary", "NaN", "few")):
                continue
            split_size = chunks * CHUNK
            num_splits = -(-vocab_size // split_size)
            token_ids = _tokens(logits, generator)
            yield Sample(
                name=f"{name}, {num_top} of {chunks} chunks",
                arguments={
                    "edges": sentinels(num_logits, num_splits, 2, dtype=torch.float32),
                    "log_sums": sentinels(num_logits, num_splits, dtype=torch.float32),
                    "words": sentinels(num_logits, num_splits, 1 + num_top, dtype=torch.int64),
                    "logits": logits,
                    "token_ids": token_ids.int() if num_top % 2 else token_ids,
                    "split_size": split_size,
                },
            )


def _merge_summaries(generator: torch.Generator) -> Iterator[Sample]:
    for name, logits in _logits(generator):
        num_logits, vocab_size = logits.shape
        split_size = max(1, vocab_size // int(integers(1, 12, (1,), torch.int64, generator)))
        split_size = min(split_size, 999)
        num_splits = -(-vocab_size // split_size)
        wanted = int(integers(0, MAX_TOP + 1, (1,), torch.int64, generator))
        num_top = min(wanted, vocab_size)
        given = _tokens(logits, generator)
        parts = (
            torch.empty(num_logits, num_splits, 2),
            torch.empty(num_logits, num_splits),
            torch.empty(num_logits, num_splits, 1 + num_top, dtype=torch.int64),
        )
        summarize_logits.reference(*parts, logits, given, split_size)
        for extra in (0, 700):
            columns = 1 + num_top + extra
            yield Sample(
                name=f"{name}, {num_top} of {num_splits} splits in {columns} columns",
                arguments={
                    "token_ids": sentinels(num_logits, columns, dtype=torch.int32),
                    "edges": sentinels(num_logits, 2, dtype=torch.float32),
                    "log_sum": sentinels(num_logits, dtype=torch.float32),
                    "count": sentinels(num_logits, dtype=torch.int32),
                    "given_ids": given.int() if extra else given,
                    "split_edges": parts[0],
                    "split_log_sums": parts[1],
                    "split_words": parts[2],
                },
            )


def _summary(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return edges, log-sum and count of rows, by the references."""
    num_logits = len(logits)
    parts = (
        torch.empty(num_logits, 1, 2),
        torch.empty(num_logits, 1),
        torch.empty(num_logits, 1, 1, dtype=torch.int64),
    )
    summarize_logits.reference(*parts, logits, token_ids, logits.shape[1])
    edges, log_sum = torch.empty(num_logits, 2), torch.empty(num_logits)
    count, ids = (torch.empty(shape, dtype=torch.int32) for shape in (num_logits, (num_logits, 1)))
    merge_summaries.reference(ids, edges, log_sum, count, token_ids, *parts)
    return edges, log_sum, count


def _score_tokens(generator: torch.Generator) -> Iterator[Sample]:
    for name, logits in _logits(generator):
        num_logits, vocab_size = logits.shape
        for raw in (False, True):
            token_ids = _tokens(logits, generator)
            edges, log_sum, count = _summary(logits, token_ids)
            if raw:
                edges[:, 0], log_sum = 0.0, torch.zeros_like(log_sum)
            columns = int(integers(1, 40, (1,), torch.int64, generator))
            ids = integers(0, vocab_size, (num_logits, columns), torch.int32, generator)
            ids[:, 0] = token_ids
            yield Sample(
                name=f"{name}, {'logits' if raw else 'logprobs'}",
                arguments={
                    "values": sentinels(num_logits, columns, dtype=torch.float32),
                    "ranks": sentinels(num_logits, dtype=torch.int32),
                    "logits": logits,
                    "token_ids": ids,
                    "num_scored": columns - (columns > 7) * 5,
                    "edges": edges,
                    "log_sum": log_sum,
                    "count": count,
                },
            )


def _list_columns(generator: torch.Generator) -> Iterator[Sample]:
    for name, logits in (
        *((f"vocabulary of {size}", normal_logits(3, size, generator)) for size in (1, 37, 4099)),
        ("none", normal_logits(0, 37, generator)),
        ("bfloat16", strided(normal_logits(5, 999, generator).bfloat16(), gap=3)),
        ("float16", normal_logits(5, 999, generator).half()),
    ):
        num_logits, vocab_size = logits.shape
        lengths = [0, 1, 128, 129, 300, 0, 3, 2, 0, 5, 1, 0, 7]
        words = integers(0, vocab_size, (sum(lengths),), torch.int32, generator)
        words[1:2], words[-1:] = vocab_size, -1
        rows = scattered_rows(num_logits, _MAX_ROWS, generator)
        rows[1:2] = rows[:1]
        for columns in (301, 340):
            yield Sample(
                name=f"{name}, {columns} columns",
                arguments={
                    "token_ids": sentinels(num_logits, columns, dtype=torch.int32),
                    "values": sentinels(num_logits, columns, dtype=torch.float32),
                    "logits": logits,
                    "logit_rows": rows,
                    "bounds": prefix_sums(lengths),
                    "words": words,
                    "edges": torch.rand(num_logits, 2, generator=generator),
                    "log_sum": torch.rand(num_logits, generator=generator),
                },
            )


SAMPLES = {
    "sampling.summarize_logits": OpSamples(
        generate=_summarize_logits, bounds={"log_sums": _LOG_SUM}
    ),
    "sampling.merge_summaries": OpSamples(
        generate=_merge_summaries, bounds={"log_sum": _MERGED_LOG_SUM}
    ),
    "sampling.score_tokens": OpSamples(generate=_score_tokens),
    "sampling.list_columns": OpSamples(generate=_list_columns),
}
