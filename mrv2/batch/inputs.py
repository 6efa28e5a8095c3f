"""A step's inputs, gathered on the device from the state rows in the order of the batch.

The host writes one small array (rows and prefix sums); everything else is derived on the device
from what the rows hold there, so a token that was drawn in the last step is an input of this one
without the host having seen it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.batch.decode import decode_blocks, decode_tokens
from mrv2.batch.layout import BatchLayout, Int32, section_len
from mrv2.batch.mixed import locate_draws, pad_slots
from mrv2.config import RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.staged import StagedWriteTensor
from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp
from mrv2.sampling.stage import LogitsView
from mrv2.state.block_tables import BlockTables, gather_block_table, slot_mapping
from mrv2.state.requests import RequestColumns


@triton.jit
def _gather_tokens_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    token_table_ptr: tl.tensor,
    token_table_stride: tl.tensor,
    num_computed_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx).to(tl.int64)
    start = tl.load(query_start_loc_ptr + batch_idx)
    query_len = tl.load(query_start_loc_ptr + batch_idx + 1) - start
    num_computed = tl.load(num_computed_ptr + row)
    if tl.program_id(1) == 0:
        tl.store(seq_lens_ptr + batch_idx, num_computed + query_len)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < query_len
    position = (num_computed + offset).to(tl.int64)
    token_id = tl.load(token_table_ptr + row * token_table_stride + position, mask=mask)
    tl.store(input_ids_ptr + start + offset, token_id, mask=mask)
    tl.store(positions_ptr + start + offset, position, mask=mask)


def _gather_tokens_launch(
    rows: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> Launch:
    block = 256
    grid = (rows.shape[0], cdiv(max_query_len, block))
    table = (token_table, token_table.stride(0))
    args = (rows, query_start_loc, *table, num_computed_tokens, input_ids, positions, seq_lens)
    return Launch(_gather_tokens_kernel, grid, args, {"BLOCK": block})


def _gather_tokens_reference(
    rows: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    num_computed_tokens: Tensor,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    """Gather token ids, positions and sequence lengths of a batch from the state rows.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is
            `num_tokens`.
        token_table: [max_rows, max_len] int32. Known tokens by row.
        num_computed_tokens: [max_rows] int32. Position of each row's first token in this step.
        max_query_len: Tokens of the longest query, or more.
        input_ids: [at least num_tokens] int32. Written up to there.
        positions: [at least num_tokens] int64. Written up to there.
        seq_lens: [num_reqs] int32. Written: computed tokens with this step's.
    """
    first = num_computed_tokens.index_select(0, rows)
    query_lens = query_start_loc.diff()
    batch_idx = torch.repeat_interleave(query_lens)
    num_tokens = batch_idx.shape[0]
    torch.add(first, query_lens, out=seq_lens)
    own = (first - query_start_loc[:-1])[batch_idx] + torch.arange(num_tokens)
    positions[:num_tokens] = own
    input_ids[:num_tokens] = token_table[rows[batch_idx], own]


gather_tokens = TwinOp(
    "batch.gather_tokens",
    reference=_gather_tokens_reference,
    launch=_gather_tokens_launch,
    mutates=frozenset({"input_ids", "positions", "seq_lens"}),
)


@triton.jit
def _locate_logits_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    rows_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    cu_num_logits_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    logits_indices_ptr: tl.tensor,
    logit_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    num_logits_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    batch_idx = tl.program_id(0)
    row = tl.load(rows_ptr + batch_idx)
    first = tl.load(cu_num_logits_ptr + batch_idx)
    num_logits = tl.load(cu_num_logits_ptr + batch_idx + 1) - first
    end = tl.load(query_start_loc_ptr + batch_idx + 1)
    seq_len = tl.load(seq_lens_ptr + batch_idx)
    tl.store(num_logits_ptr + batch_idx, num_logits)
    offset = tl.arange(0, BLOCK)
    for begin in range(0, num_logits, BLOCK):
        logit_offset = begin + offset
        mask = logit_offset < num_logits
        behind = num_logits - logit_offset
        tl.store(logits_indices_ptr + first + logit_offset, end - behind, mask=mask)
        tl.store(logit_rows_ptr + first + logit_offset, row + tl.zeros_like(offset), mask=mask)
        tl.store(
            positions_ptr + first + logit_offset, (seq_len - behind + 1).to(tl.int64), mask=mask
        )


def _locate_logits_launch(  # noqa: PLR0913 - its parameters are the op's
    rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
    max_num_logits: int,
    logits_indices: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    num_logits: Tensor,
) -> Launch:
    outputs = (logits_indices, logit_rows, positions, num_logits)
    args = (rows, query_start_loc, cu_num_logits, seq_lens, *outputs)
    return Launch(_locate_logits_kernel, (rows.shape[0],), args, {"BLOCK": 16}, num_warps=1)


def _locate_logits_reference(  # noqa: PLR0913 - its parameters are the op's
    rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
    max_num_logits: int,
    logits_indices: Tensor,
    logit_rows: Tensor,
    positions: Tensor,
    num_logits: Tensor,
) -> None:
    """Find the tokens whose hidden states become logits: the last ones of each request.

    Args:
        rows: [num_reqs] int32. Batch position -> row.
        query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is
            `num_tokens`.
        cu_num_logits: [num_reqs + 1] int32. First logit of each request; the last entry is
            `num_logits`.
        seq_lens: [num_reqs] int32. Computed tokens with this step's.
        max_num_logits: Logits of the request that wants most.
        logits_indices: [num_logits] int32. Written: logit -> token of the batch.
        logit_rows: [num_logits] int32. Written: logit -> row.
        positions: [num_logits] int64. Written: position of the token that the logit draws, one past
            its own.
        num_logits: [num_reqs] int32. Written: logits of each request.
    """
    torch.sub(cu_num_logits[1:], cu_num_logits[:-1], out=num_logits)
    batch_idx = torch.repeat_interleave(num_logits, output_size=positions.shape[0])
    following = batch_idx + 1
    behind = cu_num_logits[following] - torch.arange(positions.shape[0], dtype=torch.int32)
    torch.sub(query_start_loc[following], behind, out=logits_indices)
    torch.index_select(rows, 0, batch_idx, out=logit_rows)
    positions.copy_(seq_lens[batch_idx] - behind + 1)


locate_logits = TwinOp(
    "batch.locate_logits",
    reference=_locate_logits_reference,
    launch=_locate_logits_launch,
    mutates=frozenset({"logits_indices", "logit_rows", "positions", "num_logits"}),
)


class InputViews(NamedTuple):
    """The parts of the input buffers that a step of one shape uses; see `InputBatch`."""

    rows: Tensor
    query_start_loc: Tensor
    first_tokens: Tensor
    """[num_reqs]. `query_start_loc` without its end."""
    cu_num_logits: Tensor
    draw_rows: Tensor
    """What `pack_mixed` puts in the place of `cu_num_logits`."""
    one_each: Tensor
    """[num_reqs + 1]. `cu_num_logits` where everybody has one logit."""
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    logits_indices: Tensor
    logit_rows: Tensor
    logit_positions: Tensor
    num_logits: Tensor


class InputBuffers:
    """Device memory that every step's inputs are written into, at fixed addresses.

    Steps are queued on one stream, so a step's kernels have read a buffer before the next step's
    write it.

    Args:
        config: Sizes and device.
        arena: Memory of the packed layout, which the host writes.
    """

    def __init__(self, config: RunnerConfig, arena: Arena) -> None:
        device, num_reqs, num_tokens = config.device, config.max_num_reqs, config.max_num_tokens

        def buffer(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._packed = StagedWriteTensor((1, 3 * section_len(num_reqs)), torch.int32, device, arena)
        self._input_ids = buffer(num_tokens, torch.int32)
        self._positions = buffer(num_tokens, torch.int64)
        self._seq_lens = buffer(num_reqs, torch.int32)
        self._block_tables = tuple(
            torch.zeros(num_reqs, group.max_blocks, dtype=torch.int32, device=device)
            for group in config.kv_groups
        )
        self._slots = tuple(buffer(num_tokens, torch.int64) for _ in config.kv_groups)
        self._logits_indices = buffer(num_tokens, torch.int32)
        self._logit_rows = buffer(num_tokens, torch.int32)
        self._logit_positions = buffer(num_tokens, torch.int64)
        self._num_logits = buffer(num_reqs, torch.int32)
        self._one_each = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
        self._shape = (-1, -1, -1)
        self._views: InputViews | None = None

    def views(self, layout: BatchLayout) -> InputViews:
        """Return the parts that a layout uses; the last ones again while the shape stays."""
        shape = (layout.num_reqs, layout.num_tokens, layout.num_logits)
        if self._views is None or shape != self._shape:
            self._views, self._shape = self._cut(*shape), shape
        return self._views

    def padded(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return token ids and positions up to a padded number of tokens; [num_tokens] each.

        What lies behind a step's own tokens was some other step's.
        """
        if self._views is not None and num_tokens == self._shape[1]:
            return self._views.input_ids, self._views.positions
        return self._input_ids[:num_tokens], self._positions[:num_tokens]

    def stage(self, packed: Int32) -> None:
        """Stage a layout's packed values."""
        self._packed.stage_write(0, 0, packed)

    def _cut(self, num_reqs: int, num_tokens: int, num_logits: int) -> InputViews:
        section, packed = section_len(num_reqs), self._packed.tensor[0]
        return InputViews(
            rows=packed[:num_reqs],
            query_start_loc=packed[section : section + num_reqs + 1],
            first_tokens=packed[section : section + num_reqs],
            cu_num_logits=packed[2 * section : 2 * section + num_reqs + 1],
            draw_rows=packed[2 * section : 2 * section + num_reqs],
            one_each=self._one_each[: num_reqs + 1],
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            seq_lens=self._seq_lens[:num_reqs],
            block_tables=tuple(table[:num_reqs] for table in self._block_tables),
            slots=tuple(slots[:num_tokens] for slots in self._slots),
            logits_indices=self._logits_indices[:num_logits],
            logit_rows=self._logit_rows[:num_logits],
            logit_positions=self._logit_positions[:num_logits],
            num_logits=self._num_logits[:num_reqs],
        )


@dataclass(slots=True, kw_only=True)
class InputBatch:
    """A step's layout with its device values, all in batch order.

    Some are views of buffers that the next step reuses. Where the step was padded, they end at its
    own requests and tokens.
    """

    layout: BatchLayout
    rows: Tensor
    """[num_reqs] int32. Batch position -> state row."""
    query_start_loc: Tensor
    """[num_reqs + 1] int32."""
    cu_num_logits: Tensor
    """[num_reqs + 1] int32."""
    input_ids: Tensor
    """[num_tokens] int32."""
    positions: Tensor
    """[num_tokens] int64."""
    seq_lens: Tensor
    """[num_reqs] int32."""
    block_tables: tuple[Tensor, ...]
    """[num_reqs, max_blocks] int32 for each KV group.
    Columns beyond a request's own blocks are stale."""
    slots: tuple[Tensor, ...]
    """[num_tokens] int64 for each KV group."""
    num_logits: Tensor
    """[num_reqs] int32. Logits of each request."""
    logits_indices: Tensor
    """[num_logits] int32. Logit -> token of the batch; not written where `has_all_logits` is."""
    has_all_logits: bool
    """Whether every token has a logit, in the order of the tokens."""
    logits_view: LogitsView


def prepare_mixed_inputs(
    layout: BatchLayout,
    requests: RequestColumns,
    block_tables: BlockTables,
    buffers: InputBuffers,
) -> InputBatch:
    """Queue the kernels that make the inputs of a step of any requests, as `pack_mixed` packs it.

    Its packed values are on the device. Everybody has a logit, of the idle row where it draws none;
    `num_logits` says who draws.
    """
    views = buffers.views(layout)
    _gather_tokens_and_slots(layout, requests, block_tables, views)
    for slots in views.slots:
        pad_slots(views.query_start_loc, slots)
    locate_draws(
        views.query_start_loc,
        views.seq_lens,
        views.draw_rows,
        requests.idle_row,
        views.logits_indices,
        views.logit_positions,
        views.num_logits,
    )
    batch = _batch(layout, views, views.logits_indices, views.draw_rows, has_all_logits=False)
    batch.cu_num_logits = views.one_each
    return batch


def prepare_inputs(
    layout: BatchLayout,
    requests: RequestColumns,
    block_tables: BlockTables,
    buffers: InputBuffers,
) -> InputBatch:
    """Queue the kernels that make the inputs of a layout whose packed values are on the device."""
    views = buffers.views(layout)
    if layout.is_uniform:
        _gather_uniform(layout, requests, block_tables, views)
        one_each = layout.max_query_len == 1
        logits_indices = views.first_tokens if one_each else views.logits_indices
        logit_rows = views.rows if one_each else views.logit_rows
        return _batch(layout, views, logits_indices, logit_rows, has_all_logits=True)
    _gather(layout, requests, block_tables, views)
    has_all = layout.num_logits == layout.num_tokens
    return _batch(layout, views, views.logits_indices, views.logit_rows, has_all_logits=has_all)


def _batch(
    layout: BatchLayout,
    views: InputViews,
    logits_indices: Tensor,
    logit_rows: Tensor,
    *,
    has_all_logits: bool,
) -> InputBatch:
    return InputBatch(
        layout=layout,
        rows=views.rows,
        query_start_loc=views.query_start_loc,
        cu_num_logits=views.cu_num_logits,
        input_ids=views.input_ids,
        positions=views.positions,
        seq_lens=views.seq_lens,
        block_tables=views.block_tables,
        slots=views.slots,
        num_logits=views.num_logits,
        logits_indices=logits_indices,
        has_all_logits=has_all_logits,
        logits_view=LogitsView(
            logit_rows=logit_rows,
            positions=views.logit_positions,
            rows_np=layout.logit_rows,
            batch_id=layout.batch_id,
        ),
    )


def _gather_uniform(
    layout: BatchLayout, requests: RequestColumns, block_tables: BlockTables, views: InputViews
) -> None:
    decode_tokens(
        views.rows,
        requests.idle_row,
        requests.token_ids.tensor,
        requests.num_computed_tokens.tensor,
        views.input_ids,
        views.positions,
        views.seq_lens,
        views.logit_positions,
        views.logit_rows,
        views.num_logits,
        layout.max_query_len,
    )
    for group, table, gathered, slots in zip(
        block_tables.groups, block_tables.tables, views.block_tables, views.slots, strict=True
    ):
        num_columns = -(-layout.max_seq_len // group.block_size)
        decode_blocks(
            table.tensor,
            views.rows,
            views.seq_lens,
            group.block_size,
            num_columns,
            gathered,
            slots,
            layout.max_query_len,
        )


def _gather(
    layout: BatchLayout, requests: RequestColumns, block_tables: BlockTables, views: InputViews
) -> None:
    _gather_tokens_and_slots(layout, requests, block_tables, views)
    locate_logits(
        views.rows,
        views.query_start_loc,
        views.cu_num_logits,
        views.seq_lens,
        layout.max_num_logits,
        views.logits_indices,
        views.logit_rows,
        views.logit_positions,
        views.num_logits,
    )


def _gather_tokens_and_slots(
    layout: BatchLayout, requests: RequestColumns, block_tables: BlockTables, views: InputViews
) -> None:
    gather_tokens(
        views.rows,
        views.query_start_loc,
        requests.token_ids.tensor,
        requests.num_computed_tokens.tensor,
        layout.max_query_len,
        views.input_ids,
        views.positions,
        views.seq_lens,
    )
    for group, table, gathered, slots in zip(
        block_tables.groups, block_tables.tables, views.block_tables, views.slots, strict=True
    ):
        num_columns = -(-layout.max_seq_len // group.block_size)
        gather_block_table(table.tensor, views.rows, num_columns, gathered)
        slot_mapping(
            gathered,
            views.query_start_loc,
            views.positions,
            group.block_size,
            layout.max_query_len,
            slots,
        )
