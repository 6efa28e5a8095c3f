"""The shape of a step: which rows run, how many tokens each, where their logits are.

Host arithmetic alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv2.plan import NextDecode, Scheduled

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class BatchLayout:
    """A step's ragged shape, in batch order.

    Host values only; not frozen, since one is built at every step.
    """

    scheduled: Scheduled | NextDecode
    """What was laid out; what follows it is told by it."""
    req_ids: list[str]
    rows: Int32
    """[num_reqs]. Batch position -> state row."""
    query_lens: Int32
    """[num_reqs]. Tokens that each request runs."""
    num_computed_tokens: Int32
    """[num_reqs]. Tokens before this step's."""
    seq_lens: Int32
    """[num_reqs]. Tokens with this step's."""
    query_start_loc: Int32
    """[num_reqs + 1]. Inclusive prefix sums of `query_lens` with a leading zero."""
    cu_num_logits: Int32
    """[num_reqs + 1]. Inclusive prefix sums of the logits that each request wants, with a leading
    zero."""
    packed: Int32
    """[3 * num_reqs + 2]. `rows`, `query_start_loc` and `cu_num_logits` one after the other: what
    goes to the device. The latter two are views of it."""
    logit_rows: Int32
    """[num_logits]. Logit -> state row."""
    num_reqs: int
    num_tokens: int
    num_logits: int
    max_query_len: int
    max_seq_len: int
    max_num_logits: int
    """Logits of the request that wants most."""

    @property
    def is_decode(self) -> bool:
        """Whether every request runs one token and draws the next."""
        return self.max_query_len == 1 and self.num_logits == self.num_reqs

    @property
    def draws(self) -> npt.NDArray[np.int64]:
        """[num_logits]. Batch positions of the requests that draw; one logit each."""
        draws: npt.NDArray[np.int64]
        draws = (self.cu_num_logits[1:] != self.cu_num_logits[:-1]).nonzero()[0]
        return draws


def section_len(num_reqs: int) -> int:
    """Return the length of a section of `BatchLayout.packed`: `num_reqs + 1` in steps of 16 bytes.

    Triton compiles a kernel again for a pointer that is not aligned to 16 bytes.
    """
    return -(-(num_reqs + 1) // 4) * 4


def layout_batch(scheduled: Scheduled | NextDecode, rows: Int32) -> BatchLayout:
    """Lay a step out in the host's order.

    A request wants one logit if it runs its last known token, and none otherwise.

    Args:
        scheduled: The step's requests; at least one.
        rows: [num_reqs]. Their state rows.
    """
    num_reqs = len(rows)
    query_lens = np.array(scheduled.num_tokens, dtype=np.int32)
    num_computed_tokens = np.array(scheduled.num_computed_tokens, dtype=np.int32)
    num_known_tokens = np.array(scheduled.num_known_tokens, dtype=np.int32)
    seq_lens = num_computed_tokens + query_lens
    draws = seq_lens == num_known_tokens
    packed, (packed_rows, query_start_loc, cu_num_logits) = _packed(num_reqs)
    packed_rows[:] = rows
    np.add.accumulate(query_lens, out=query_start_loc[1:])
    np.add.accumulate(draws, out=cu_num_logits[1:], dtype=np.int32)
    return BatchLayout(
        scheduled=scheduled,
        req_ids=scheduled.req_ids,
        rows=rows,
        query_lens=query_lens,
        num_computed_tokens=num_computed_tokens,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        packed=packed,
        logit_rows=rows[draws],
        num_reqs=num_reqs,
        num_tokens=int(query_start_loc[-1]),
        num_logits=int(cu_num_logits[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        max_num_logits=1,
    )


def is_next_decode(layout: BatchLayout, scheduled: Scheduled | NextDecode) -> bool:
    """Say whether a step is the plain decode that follows another, in time that no batch changes.

    The plan has to say so itself, see `NextDecode`; lists are not compared.

    Args:
        layout: The step before.
        scheduled: The step in question.
    """
    return (
        isinstance(scheduled, NextDecode)
        and scheduled.follows(layout.scheduled)
        and layout.is_decode
    )


def lay_out_next_decode(layout: BatchLayout, scheduled: Scheduled | NextDecode) -> BatchLayout:
    """Return what `layout_batch` would, for the plain decode that follows another.

    Only the lengths differ, by one. `packed` is the same object, which need not be staged again.
    """
    return BatchLayout(
        scheduled=scheduled,
        req_ids=layout.req_ids,
        rows=layout.rows,
        query_lens=layout.query_lens,
        num_computed_tokens=layout.seq_lens,
        seq_lens=layout.seq_lens + np.int32(1),
        query_start_loc=layout.query_start_loc,
        cu_num_logits=layout.cu_num_logits,
        packed=layout.packed,
        logit_rows=layout.logit_rows,
        num_reqs=layout.num_reqs,
        num_tokens=layout.num_tokens,
        num_logits=layout.num_logits,
        max_query_len=1,
        max_seq_len=layout.max_seq_len + 1,
        max_num_logits=1,
    )


def pack_decode(layout: BatchLayout, num_reqs: int, idle_row: int) -> Int32:
    """Return the `packed` of a decode step with idle requests behind its own.

    Args:
        layout: A decode step.
        num_reqs: Requests in all.
        idle_row: The row of those behind.
    """
    packed, (rows, query_start_loc, cu_num_logits) = _packed(num_reqs)
    rows[: layout.num_reqs] = layout.rows
    rows[layout.num_reqs :] = idle_row
    query_start_loc[:] = cu_num_logits[:] = np.arange(num_reqs + 1, dtype=np.int32)
    return packed


def pack_mixed(layout: BatchLayout, num_reqs: int, idle_row: int) -> Int32:
    """Return the `packed` of a step with requests behind its own that are nobody's.

    In it, the rows that draw take the place of `cu_num_logits`: for each request its row, or the
    idle one where it draws nothing. Everybody has one logit.

    Args:
        layout: Any step.
        num_reqs: Requests in all.
        idle_row: The row of those behind, which have no token.
    """
    packed, (rows, query_start_loc, last) = _packed(num_reqs)
    draw_rows = last[:num_reqs]
    rows[: layout.num_reqs] = layout.rows
    rows[layout.num_reqs :] = idle_row
    query_start_loc[: layout.num_reqs] = layout.query_start_loc[:-1]
    query_start_loc[layout.num_reqs :] = layout.num_tokens
    draw_rows[:] = idle_row
    if layout.num_logits == layout.num_reqs:
        draw_rows[: layout.num_reqs] = layout.rows
    else:
        draw_rows[layout.draws] = layout.logit_rows
    return packed


def idle_decode(num_reqs: int, idle_row: int, seq_len: int) -> BatchLayout:
    """Return a decode step of so many requests that are none.

    Args:
        num_reqs: Batch positions.
        idle_row: The row that all of them name.
        seq_len: Tokens of each, for whoever sizes something by the longest.
    """
    scheduled = Scheduled(
        req_ids=[""] * num_reqs,
        num_tokens=[1] * num_reqs,
        num_computed_tokens=[seq_len - 1] * num_reqs,
        num_known_tokens=[seq_len] * num_reqs,
    )
    return layout_batch(scheduled, np.full(num_reqs, idle_row, dtype=np.int32))


def idle_mixed(num_tokens: int, num_reqs: int, idle_row: int, seq_len: int) -> BatchLayout:
    """Return a padded step of no requests at all: what a graph for any requests is captured over.

    Args:
        num_tokens: Tokens, nobody's.
        num_reqs: Batch positions.
        idle_row: The row that all of them name.
        seq_len: Tokens of the longest, for whoever sizes something by it.
    """
    packed, (rows, query_start_loc, last) = _packed(num_reqs)
    draw_rows = last[:num_reqs]
    rows[:] = draw_rows[:] = idle_row
    nothing = np.zeros(num_reqs, dtype=np.int32)
    return BatchLayout(
        scheduled=Scheduled(req_ids=[], num_tokens=[], num_computed_tokens=[], num_known_tokens=[]),
        req_ids=[],
        rows=rows,
        query_lens=nothing,
        num_computed_tokens=nothing,
        seq_lens=nothing,
        query_start_loc=query_start_loc,
        cu_num_logits=np.arange(num_reqs + 1, dtype=np.int32),
        packed=packed,
        logit_rows=draw_rows,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_logits=num_reqs,
        max_query_len=num_tokens,
        max_seq_len=seq_len,
        max_num_logits=1,
    )


def _packed(num_reqs: int) -> tuple[Int32, tuple[Int32, Int32, Int32]]:
    """Return a `packed` of zeros and its sections: [num_reqs] and twice [num_reqs + 1]."""
    section = section_len(num_reqs)
    packed = np.zeros(3 * section, dtype=np.int32)
    return packed, (
        packed[:num_reqs],
        packed[section : section + num_reqs + 1],
        packed[2 * section : 2 * section + num_reqs + 1],
    )
