"""Which KV blocks each row holds, for each KV group, and the slots of a step's tokens in them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.config import KVGroup
from mrv2.errors import CapacityError, ProtocolError
from mrv2.memory.arena import Arena
from mrv2.memory.staged import StagedWriteTensor
from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival


@triton.jit(do_not_specialize=["num_columns"])
def _gather_block_table_kernel(
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    rows_ptr: tl.tensor,
    num_columns: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    block_ids = tl.load(table_ptr + row * table_stride + column, mask=mask)
    tl.store(out_ptr + batch_idx.to(tl.int64) * out_stride + column, block_ids, mask=mask)


def _gather_block_table_launch(
    table: Tensor, rows: Tensor, num_columns: int, out: Tensor
) -> Launch:
    block = 256
    grid = (rows.shape[0], cdiv(num_columns, block))
    args = (table, table.stride(0), rows, num_columns, out, out.stride(0))
    return Launch(_gather_block_table_kernel, grid, args, {"BLOCK": block})


def _gather_block_table_reference(
    table: Tensor, rows: Tensor, num_columns: int, out: Tensor
) -> None:
    """Gather the block tables of a batch in its order.

    Args:
        table: [max_rows, max_blocks] int32. Block ids by row.
        rows: [num_reqs] int32. Batch position -> row.
        num_columns: Columns to gather: blocks of the longest request of the batch.
        out: [>= num_reqs, >= num_columns] int32. Written in its first `num_reqs` rows and
            `num_columns` columns.
    """
    gathered = out[: rows.shape[0], :num_columns]
    torch.index_select(table[:, :num_columns], 0, rows, out=gathered)


gather_block_table = TwinOp(
    "state.gather_block_table",
    reference=_gather_block_table_reference,
    launch=_gather_block_table_launch,
    mutates=frozenset({"out"}),
)


@triton.jit
def _slot_mapping_kernel(
    block_table_ptr: tl.tensor,
    block_table_stride: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    block_size: tl.tensor,
    slots_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + batch_idx)
    end = tl.load(query_start_loc_ptr + batch_idx + 1)
    token_idx = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token_idx < end
    position = tl.load(positions_ptr + token_idx, mask=mask, other=0)
    column = position // block_size
    block_id = tl.load(
        block_table_ptr + batch_idx.to(tl.int64) * block_table_stride + column, mask=mask, other=0
    )
    slot = block_id.to(tl.int64) * block_size + position % block_size
    tl.store(slots_ptr + token_idx, slot, mask=mask)


def _slot_mapping_launch(
    block_table: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    max_query_len: int,
    slots: Tensor,
) -> Launch:
    block = 256
    grid = (query_start_loc.shape[0] - 1, cdiv(max_query_len, block))
    args = (block_table, block_table.stride(0), query_start_loc, positions, block_size, slots)
    return Launch(_slot_mapping_kernel, grid, args, {"BLOCK": block})


def _slot_mapping_reference(
    block_table: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    max_query_len: int,
    slots: Tensor,
) -> None:
    """Find the KV slot of every token of a batch.

    `block_table[request, position // block_size] * block_size + position % block_size`.

    Args:
        block_table: [num_reqs, num_columns] int32. Gathered, in batch order.
        query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is
            `num_tokens`.
        positions: [at least num_tokens] int64.
        block_size: Tokens in a block.
        max_query_len: Tokens of the longest query, or more.
        slots: [at least num_tokens] int64. Written up to there.
    """
    batch_idx = torch.repeat_interleave(query_start_loc.diff())
    num_tokens = batch_idx.shape[0]
    own = positions[:num_tokens]
    column = own.div(block_size, rounding_mode="floor")
    block_ids = block_table[batch_idx, column]
    torch.add(own, block_ids - column, alpha=block_size, out=slots[:num_tokens])


slot_mapping = TwinOp(
    "state.slot_mapping",
    reference=_slot_mapping_reference,
    launch=_slot_mapping_launch,
    mutates=frozenset({"slots"}),
)


class BlockTables:
    """The block table of each KV group, a row for each request.

    Args:
        groups: KV groups in the scheduler's order.
        num_rows: Rows.
        arena: Memory of the tables.
    """

    def __init__(self, groups: Sequence[KVGroup], num_rows: int, arena: Arena) -> None:
        self.groups = tuple(groups)
        self.tables = tuple(
            StagedWriteTensor(
                (num_rows, group.max_blocks), torch.int32, arena.transfers.device, arena
            )
            for group in groups
        )
        self._num_blocks = np.zeros((len(self.groups), num_rows), dtype=np.int32)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Stage the blocks of a request that arrived, from the first column on."""
        self.append(row, arrival.block_ids)

    def evict(self, row: int) -> None:
        """Forget the row's blocks."""
        self._num_blocks[:, row] = 0

    def flush(self) -> None:
        """Nothing: what changed is staged already."""

    def check(self, req_id: str, row: int | None, block_ids: Sequence[Sequence[int]]) -> None:
        """Refuse blocks that cannot be appended, and change nothing.

        Args:
            req_id: Whose they are, for the message.
            row: The request's row; None for one that is empty.
            block_ids: New blocks for each KV group.

        Raises:
            CapacityError: A group's table has no room for them, or its cache has no such block.
            ProtocolError: They are not for as many groups as there are.
        """
        if len(block_ids) != len(self.groups):
            raise ProtocolError(
                f"request {req_id!r}: blocks are given for {len(block_ids)} KV groups; "
                f"there are {len(self.groups)}"
            )
        for index, (group, blocks) in enumerate(zip(self.groups, block_ids, strict=True)):
            num_held = 0 if row is None else int(self._num_blocks[index, row])
            if num_held + len(blocks) > group.max_blocks:
                raise CapacityError(
                    f"request {req_id!r}: {len(blocks)} blocks are added to {num_held} of "
                    f"KV group {index}; its max_blocks is {group.max_blocks}"
                )
            if blocks and not 0 <= min(blocks) <= max(blocks) < group.num_blocks:
                outside = min(blocks) if min(blocks) < 0 else max(blocks)
                raise CapacityError(
                    f"request {req_id!r} is given block {outside} of KV group {index}; "
                    f"the cache has {group.num_blocks} blocks"
                )

    def num_held(
        self,
        rows: npt.NDArray[np.int32],
        added_to: Sequence[int] = (),
        added: Sequence[Sequence[Sequence[int]]] = (),
    ) -> npt.NDArray[np.int32]:
        """Return how many blocks rows hold, [num_groups, num_rows] int32, a copy.

        Args:
            rows: Whose blocks are counted.
            added_to: Rows that are to get more, each once.
            added: New blocks for each KV group, for each row of `added_to`; they count.
        """
        num_blocks = self._num_blocks
        if added:
            num_blocks = num_blocks.copy()
            counts = [[len(blocks) for blocks in block_ids] for block_ids in added]
            num_blocks[:, added_to] += np.array(counts, dtype=np.int32).T
        return num_blocks[:, rows]

    def append(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Stage more blocks behind those that the row holds.

        Args:
            row: The request's row.
            block_ids: New blocks for each KV group; a group may have none.

        Raises:
            CapacityError: A group's table has no room for them.
        """
        for index, (table, blocks) in enumerate(zip(self.tables, block_ids, strict=True)):
            table.stage_write(row, int(self._num_blocks[index, row]), blocks)
            self._num_blocks[index, row] += len(blocks)

    def take_back(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Forget the blocks that were appended last.

        Args:
            row: The request's row.
            block_ids: The same as `append` was given.
        """
        for index, blocks in enumerate(block_ids):
            self._num_blocks[index, row] -= len(blocks)
