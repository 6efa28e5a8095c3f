"""Samples of the ops of `mrv2.state`."""

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
    sizes_around,
    strided,
)

_BLOCK = 256
_MAX_ROWS = 13
_MAX_BLOCKS = 530


def _gather_block_table(generator: torch.Generator) -> Iterator[Sample]:
    for num_columns in (*sizes_around(_BLOCK, 523), 0, _MAX_BLOCKS):
        for num_reqs in (1, 7, 0) if num_columns == 1 else (7,):
            table = integers(0, 2**31 - 1, (_MAX_ROWS, _MAX_BLOCKS), torch.int32, generator)
            yield Sample(
                name=f"{num_reqs} requests, {num_columns} columns",
                arguments={
                    "table": strided(table, gap=3),
                    "rows": scattered_rows(num_reqs, _MAX_ROWS, generator),
                    "num_columns": num_columns,
                    "out": strided(sentinels(9, _MAX_BLOCKS, dtype=torch.int32), gap=1),
                },
            )


def _slot_mapping(generator: torch.Generator) -> Iterator[Sample]:
    for name, query_lens, block_size in (
        ("one token", [1], 16),
        ("ragged, an empty request", [1, 0, 255, 256, 257, 521], 16),
        ("block size not a power of two", [5, 257, 1], 24),
        ("block size 1", [3, 2], 1),
        ("ends with an empty request", [2, 0], 16),
        ("padded", [2, 0, 300], 16),
    ):
        padding = 9 if name == "padded" else 0
        starts = integers(0, 100, (len(query_lens),), torch.int64, generator).tolist()
        positions = [
            torch.arange(start, start + length)
            for start, length in zip(starts, query_lens, strict=True)
        ]
        num_columns = 1 + (100 + max(query_lens)) // block_size
        # Large ids: their slots do not fit in 32 bits.
        tables = integers(0, 2**31 - 1, (len(query_lens), num_columns), torch.int32, generator)
        yield Sample(
            name=name,
            arguments={
                "block_table": strided(tables, gap=2),
                "query_start_loc": prefix_sums(query_lens),
                "positions": torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]),
                "block_size": block_size,
                "max_query_len": max(query_lens) + 300 * (padding > 0),
                "slots": sentinels(sum(query_lens) + padding, dtype=torch.int64),
            },
        )


SAMPLES = {
    "state.gather_block_table": OpSamples(generate=_gather_block_table),
    "state.slot_mapping": OpSamples(generate=_slot_mapping),
}
