"""Samples of the ops of `mrv2.batch`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mrv2_diff.samples.sample import (
    OpSamples,
    Sample,
    integers,
    prefix_sums,
    scattered_rows,
    sentinels,
    strided,
)

_MAX_ROWS = 400
_MAX_LEN = 700
_QUERIES = (
    ("one token", [1]),
    ("ragged, an empty request", [1, 0, 255, 256, 257, 521]),
    ("decodes", [1, 1, 1, 1, 1, 1, 1]),
    ("ends with an empty request", [3, 0]),
)
_PADDING = 7
"""Tokens behind the last request's, which are nobody's."""


def _gather_tokens(generator: torch.Generator) -> Iterator[Sample]:
    for number, (name, query_lens) in enumerate(_QUERIES):
        num_reqs, num_tokens = len(query_lens), sum(query_lens) + _PADDING * (number % 2)
        rows = scattered_rows(num_reqs, _MAX_ROWS, generator)
        num_computed = integers(0, 5, (_MAX_ROWS,), torch.int32, generator)
        # The longest query ends at the end of its row.
        longest = query_lens.index(max(query_lens))
        num_computed[int(rows[longest])] = _MAX_LEN - query_lens[longest]
        table = integers(0, 50_000, (_MAX_ROWS, _MAX_LEN), torch.int32, generator)
        yield Sample(
            name=name,
            arguments={
                "rows": rows,
                "query_start_loc": prefix_sums(query_lens),
                "token_table": strided(table, gap=3),
                "num_computed_tokens": num_computed,
                "max_query_len": max(query_lens) + 300 * (number % 2),
                "input_ids": sentinels(num_tokens, dtype=torch.int32),
                "positions": sentinels(num_tokens, dtype=torch.int64),
                "seq_lens": sentinels(num_reqs, dtype=torch.int32),
            },
        )


def _locate_logits(generator: torch.Generator) -> Iterator[Sample]:
    for name, num_logits in (
        ("one", [1]),
        ("none at all", [0, 0]),
        ("some without", [1, 0, 1, 1, 0]),
        ("several a request", [1, 15, 0, 16, 17, 37]),
    ):
        query_lens = [count + extra for extra, count in enumerate(num_logits)]
        num_computed = integers(0, 100, (len(num_logits),), torch.int32, generator)
        yield Sample(
            name=name,
            arguments={
                "rows": scattered_rows(len(num_logits), _MAX_ROWS, generator),
                "query_start_loc": prefix_sums(query_lens),
                "cu_num_logits": prefix_sums(num_logits),
                "seq_lens": num_computed + torch.tensor(query_lens, dtype=torch.int32),
                "max_num_logits": max(num_logits),
                "logits_indices": sentinels(sum(num_logits), dtype=torch.int32),
                "logit_rows": sentinels(sum(num_logits), dtype=torch.int32),
                "positions": sentinels(sum(num_logits), dtype=torch.int64),
                "num_logits": sentinels(len(num_logits), dtype=torch.int32),
            },
        )


def _commit_step(generator: torch.Generator) -> Iterator[Sample]:
    many = 257
    for name, num_logits, num_sampled, seq_lens in (
        ("one", [1], [1], [1]),
        ("some without logits", [1, 0, 1, 1, 0], [1, 0, 1, 1, 0], [5, 3, 1, 699, 700]),
        ("all drafts accepted", [3, 0, 1, 5], [3, 0, 1, 5], [9, 4, 2, 30]),
        ("some drafts rejected", [3, 0, 4, 5], [1, 0, 2, 5], [9, 4, 4, 30]),
        ("requests that are none", [0, 1, 0, 2], [1, 1, 2, 1], [0, 8, 0, 9]),
        ("more than a head may say", [2, 1, 0], [5, 3, 2], [9, 1, 3]),
        ("fewer than a head may say", [2, 1], [-1, 0], [9, 1]),
        ("many tokens a request", [300, 2], [300, 1], [400, 3]),
        (
            "more than a block",
            [1, 0] * (many // 2) + [1],
            [1, 0] * (many // 2) + [1],
            list(range(1, many + 1)),
        ),
        ("full rows use the last column", [1, 1, 0], [1, 1, 0], [700, 699, 700]),
        ("none draws", [0, 0], [0, 0], [7, 11]),
    ):
        num_reqs, width = len(num_logits), max(1, *num_logits, *num_sampled)
        table = sentinels(_MAX_ROWS, _MAX_LEN + 1, dtype=torch.int32)
        token_ids = integers(0, 50_000, (num_reqs, width), torch.int64, generator)
        yield Sample(
            name=name,
            arguments={
                "rows": scattered_rows(num_reqs, _MAX_ROWS, generator),
                "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
                "num_logits": torch.tensor(num_logits, dtype=torch.int32),
                "token_ids": token_ids,
                "num_sampled": torch.tensor(num_sampled, dtype=torch.int32),
                "token_table": strided(table, gap=3),
                "num_computed_tokens": sentinels(_MAX_ROWS, dtype=torch.int32),
            },
        )


def _tokens_by_request(generator: torch.Generator) -> Iterator[Sample]:
    for name, num_logits, width in (
        ("one", [1], 1),
        ("some without", [1, 0, 1, 1, 0], 1),
        ("none at all", [0, 0], 1),
        ("several a request", [3, 0, 4, 1], 4),
        ("more room than any needs", [1, 2], 5),
        ("more than a block", [1, 0, 2] * 60, 2),
    ):
        yield Sample(
            name=name,
            arguments={
                "drawn": integers(0, 50_000, (sum(num_logits),), torch.int64, generator),
                "cu_num_logits": prefix_sums(num_logits),
                "token_ids": sentinels(len(num_logits), width, dtype=torch.int64),
            },
        )


def _decode_tokens(generator: torch.Generator) -> Iterator[Sample]:
    for name, num_reqs, num_idle, query_len in (
        ("one", 1, 0, 1),
        ("nobody", 0, 0, 1),
        ("all idle", 0, 3, 1),
        ("padded", 5, 3, 1),
        ("a full block", 128, 0, 1),
        ("more than a block, padded", 140, 116, 1),
        ("a draft each", 3, 0, 2),
        ("drafts, padded", 5, 3, 4),
        ("drafts, more than a block", 130, 2, 3),
        ("drafts of nobody", 0, 2, 3),
    ):
        rows = torch.cat(
            [
                scattered_rows(num_reqs, _MAX_ROWS - 1, generator),
                torch.full((num_idle,), _MAX_ROWS - 1, dtype=torch.int32),
            ]
        )
        most = _MAX_LEN - query_len + 1
        num_computed = integers(0, most, (_MAX_ROWS,), torch.int32, generator)
        table = integers(0, 50_000, (_MAX_ROWS, _MAX_LEN), torch.int32, generator)
        num_tokens = len(rows) * query_len
        yield Sample(
            name=name,
            arguments={
                "rows": rows,
                "idle_row": _MAX_ROWS - 1,
                "token_table": strided(table, gap=3),
                "num_computed_tokens": num_computed,
                "input_ids": sentinels(num_tokens, dtype=torch.int32),
                "positions": sentinels(num_tokens, dtype=torch.int64),
                "seq_lens": sentinels(len(rows), dtype=torch.int32),
                "draw_positions": sentinels(num_tokens, dtype=torch.int64),
                "logit_rows": sentinels(num_tokens, dtype=torch.int32),
                "num_logits": sentinels(len(rows), dtype=torch.int32),
                "query_len": query_len,
            },
        )


def _decode_blocks(generator: torch.Generator) -> Iterator[Sample]:
    max_blocks = 530
    for name, seq_lens, block_size, query_len in (
        ("one", [1], 16, 1),
        ("ends of blocks", [16, 17, 32, 33], 16, 1),
        ("idle ones between", [0, 5, 0, 40, 0], 16, 1),
        ("all idle", [0, 0], 16, 1),
        ("around a program's columns", [256 * 2, 256 * 2 + 1, 257 * 2 + 1], 2, 1),
        ("block size not a power of two", [23, 24, 25], 24, 1),
        ("block size 1", [3, 300], 1, 1),
        ("drafts across blocks", [4, 17, 0, 32, 34], 16, 4),
        ("drafts in blocks of 1", [3, 300, 0], 1, 3),
    ):
        num_reqs = len(seq_lens)
        longest = max(1, -(-max(seq_lens) // block_size))
        # Large ids: their slots do not fit in 32 bits.
        table = integers(0, 2**31 - 1, (_MAX_ROWS, max_blocks), torch.int32, generator)
        for num_columns in (longest, max_blocks):
            yield Sample(
                name=f"{name}, {num_columns} columns",
                arguments={
                    "table": strided(table, gap=3),
                    "rows": scattered_rows(num_reqs, _MAX_ROWS, generator),
                    "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
                    "block_size": block_size,
                    "num_columns": num_columns,
                    "gathered": strided(
                        sentinels(num_reqs + 2, max_blocks, dtype=torch.int32), gap=1
                    ),
                    "slots": sentinels(num_reqs * query_len, dtype=torch.int64),
                    "query_len": query_len,
                },
            )


def _pad_slots(_generator: torch.Generator) -> Iterator[Sample]:
    for name, query_lens, num_tokens in (
        ("nobody's alone", [0, 0], 5),
        ("no padding", [3, 1], 4),
        ("some padding", [3, 0, 1], 16),
        ("across blocks", [200, 57], 700),
    ):
        yield Sample(
            name=name,
            arguments={
                "query_start_loc": prefix_sums(query_lens),
                "slots": sentinels(num_tokens, dtype=torch.int64),
            },
        )


def _locate_draws(generator: torch.Generator) -> Iterator[Sample]:
    idle_row = _MAX_ROWS - 1
    for name, query_lens, draws in (
        ("one", [1], [True]),
        ("a chunk and a decode", [5, 1], [False, True]),
        ("idle ones behind", [5, 1, 0, 0], [True, True, False, False]),
        ("nobody", [0, 0], [False, False]),
        ("more than a block", [1] * 150, [True, False] * 75),
    ):
        rows = scattered_rows(len(query_lens), idle_row, generator)
        held = torch.tensor(draws)
        yield Sample(
            name=name,
            arguments={
                "query_start_loc": prefix_sums(query_lens),
                "seq_lens": integers(1, 5000, (len(query_lens),), torch.int32, generator),
                "draw_rows": torch.where(held, rows, idle_row).int(),
                "idle_row": idle_row,
                "logits_indices": sentinels(len(query_lens), dtype=torch.int32),
                "draw_positions": sentinels(len(query_lens), dtype=torch.int64),
                "num_logits": sentinels(len(query_lens), dtype=torch.int32),
            },
        )


SAMPLES = {
    "batch.pad_slots": OpSamples(generate=_pad_slots),
    "batch.locate_draws": OpSamples(generate=_locate_draws),
    "batch.decode_tokens": OpSamples(generate=_decode_tokens),
    "batch.decode_blocks": OpSamples(generate=_decode_blocks),
    "batch.gather_tokens": OpSamples(generate=_gather_tokens),
    "batch.locate_logits": OpSamples(generate=_locate_logits),
    "batch.commit_step": OpSamples(generate=_commit_step),
    "batch.tokens_by_request": OpSamples(generate=_tokens_by_request),
}
