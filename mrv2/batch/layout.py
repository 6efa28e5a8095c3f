"""The shape of a step: which rows run, how many tokens each, where their logits are.

Host arithmetic alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv2.plan import NextDecode, Scheduled

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_ONE = np.int32(1)

UNNAMED = 0
"""`BatchLayout.batch_id` of a layout that nothing is kept for."""


@dataclass(slots=True, kw_only=True)
class BatchLayout:
    """A step's ragged shape, in batch order.

    Host values only; not frozen, since one is made at every step.
    """

    scheduled: Scheduled | NextDecode
    """What was laid out, in the host's order; what follows it is told by it."""
    batch_id: int = UNNAMED
    """The same in two layouts whose requests, rows, order and logits are the same: what was made
    for one of them serves the other. `UNNAMED` is the same as nothing."""
    req_ids: list[str]
    rows: Int32
    """[num_reqs]. Batch position -> state row."""
    order: Int64 | None = None
    """[num_reqs]. Batch position -> place in the host's order; None where they are the same."""
    query_lens: Int32
    """[num_reqs]. Tokens that each request runs, drafts among them."""
    num_computed_tokens: Int32
    """[num_reqs]. Tokens before this step's; no more than so many where `is_exact` is not set."""
    seq_lens: Int32
    """[num_reqs]. Tokens with this step's; a bound as `num_computed_tokens`."""
    is_exact: bool = True
    """Whether the two are what the device counts. While drafts are in flight they may be more."""
    query_start_loc: Int32
    """[num_reqs + 1]. Inclusive prefix sums of `query_lens` with a leading zero."""
    num_logits_of: Int32
    """[num_reqs]. Logits that each request wants: none in the middle of its prompt, else one for
    its last known token and one for each draft behind it."""
    cu_num_logits: Int32
    """[num_reqs + 1]. Inclusive prefix sums of `num_logits_of`, with a leading zero."""
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
    def is_uniform(self) -> bool:
        """Whether all requests run equally many tokens and want a logit of each.

        So it is in a decode, whose requests run one token each, and where each runs as many drafts.
        """
        return self.num_logits == self.num_tokens == self.max_query_len * self.num_reqs

    @property
    def is_decode(self) -> bool:
        """Whether every request runs one token and wants the next."""
        return self.max_query_len == 1 and self.num_logits == self.num_reqs

    @property
    def draws(self) -> Int64:
        """[number of requests that draw]. Batch positions of the requests that have a logit."""
        return self.num_logits_of.nonzero()[0]

    def set_computed(self, num_computed_tokens: Int32) -> None:
        """Take what the device counts in the place of bounds.

        Args:
            num_computed_tokens: [num_reqs].
        """
        self.num_computed_tokens = num_computed_tokens
        self.seq_lens = num_computed_tokens + self.query_lens
        self.max_seq_len = int(self.seq_lens.max())


def section_len(num_reqs: int) -> int:
    """Return the length of a section of `BatchLayout.packed`: `num_reqs + 1` in steps of 16 bytes.

    Triton compiles a kernel again for a pointer that is not aligned to 16 bytes.
    """
    return -(-(num_reqs + 1) // 4) * 4


def layout_batch(
    scheduled: Scheduled | NextDecode,
    rows: Int32,
    *,
    batch_id: int = UNNAMED,
    draws: bool = True,
    may_draft: bool = True,
) -> BatchLayout:
    """Lay a step out in the order of its lists.

    A request that runs its last known token wants a logit for it and for each draft behind it.

    Args:
        scheduled: The step's requests; at least one.
        rows: [num_reqs]. Their state rows.
        batch_id: The layout's.
        draws: Whether tokens are drawn at all; if not, no request wants a logit.
        may_draft: Whether requests may run drafts; it takes longer where they may.
    """
    num_reqs = len(rows)
    query_lens = np.array(scheduled.num_tokens, dtype=np.int32)
    num_computed_tokens = np.array(scheduled.num_computed_tokens, dtype=np.int32)
    num_known_tokens = np.array(scheduled.num_known_tokens, dtype=np.int32)
    seq_lens = num_computed_tokens + query_lens
    if may_draft:
        num_logits_of = np.maximum(seq_lens - num_known_tokens + 1, 0)
    else:
        num_logits_of = (seq_lens == num_known_tokens).astype(np.int32)
    if not draws:
        num_logits_of[:] = 0
    packed, (packed_rows, query_start_loc, cu_num_logits) = _packed(num_reqs)
    packed_rows[:] = rows
    np.add.accumulate(query_lens, out=query_start_loc[1:])
    np.add.accumulate(num_logits_of, out=cu_num_logits[1:])
    num_logits = int(cu_num_logits[-1])
    max_num_logits = int(num_logits_of.max()) if may_draft else min(num_logits, 1)
    one_each = num_logits == num_reqs and max_num_logits == 1
    return BatchLayout(
        scheduled=scheduled,
        batch_id=batch_id,
        req_ids=scheduled.req_ids,
        rows=rows,
        query_lens=query_lens,
        num_computed_tokens=num_computed_tokens,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        num_logits_of=num_logits_of,
        cu_num_logits=cu_num_logits,
        packed=packed,
        logit_rows=rows if one_each else rows.repeat(num_logits_of),
        num_reqs=num_reqs,
        num_tokens=int(query_start_loc[-1]),
        num_logits=num_logits,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        max_num_logits=max_num_logits,
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

    Only the lengths differ, by one.
    """
    return BatchLayout(
        scheduled=scheduled,
        batch_id=layout.batch_id,
        req_ids=layout.req_ids,
        rows=layout.rows,
        order=layout.order,
        query_lens=layout.query_lens,
        num_computed_tokens=layout.seq_lens,
        seq_lens=layout.seq_lens + _ONE,
        is_exact=layout.is_exact,
        query_start_loc=layout.query_start_loc,
        num_logits_of=layout.num_logits_of,
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


def pack_uniform(layout: BatchLayout, num_reqs: int, idle_row: int) -> Int32:
    """Return the `packed` of a uniform step with idle requests behind its own.

    Args:
        layout: A uniform step.
        num_reqs: Requests in all.
        idle_row: The row of those behind.
    """
    packed, (rows, query_start_loc, cu_num_logits) = _packed(num_reqs)
    rows[: layout.num_reqs] = layout.rows
    rows[layout.num_reqs :] = idle_row
    starts = np.arange(0, (num_reqs + 1) * layout.max_query_len, layout.max_query_len)
    query_start_loc[:] = cu_num_logits[:] = starts
    return packed


def pack_mixed(layout: BatchLayout, num_reqs: int, idle_row: int) -> Int32:
    """Return the `packed` of a step with requests behind its own that are nobody's.

    No request of it wants more than one logit. In it, the rows that draw take the place of
    `cu_num_logits`: for each request its row, or the idle one where it draws nothing. Everybody has
    one logit.

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


def idle_decode(num_reqs: int, idle_row: int, seq_len: int, query_len: int = 1) -> BatchLayout:
    """Return a uniform step of so many requests that are none.

    Args:
        num_reqs: Batch positions.
        idle_row: The row that all of them name.
        seq_len: Tokens of each, for whoever sizes something by the longest; at least `query_len`.
        query_len: Tokens that each runs.
    """
    scheduled = Scheduled(
        req_ids=[""] * num_reqs,
        num_tokens=[query_len] * num_reqs,
        num_computed_tokens=[seq_len - query_len] * num_reqs,
        num_known_tokens=[seq_len - query_len + 1] * num_reqs,
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
        num_logits_of=np.ones(num_reqs, dtype=np.int32),
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
