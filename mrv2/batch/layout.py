"""The shape of a step: which rows run, how many tokens each, where their logits are.

Host arithmetic alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv2.plan import Scheduled

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class BatchLayout:
    """A step's ragged shape, in batch order.

    Host values only; not frozen, since one is built at every step.
    """

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
    is uploaded. The latter two are views of it."""
    logit_rows: Int32
    """[num_logits]. Logit -> state row."""
    num_tokens: int
    num_logits: int
    max_query_len: int
    max_seq_len: int
    max_num_logits: int
    """Logits of the request that wants most."""

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)


def layout_batch(scheduled: Scheduled, rows: Int32) -> BatchLayout:
    """Lay a step out in the host's order.

    A request wants one logit if it runs its last known token, and none otherwise.

    Args:
        scheduled: The step's requests; at least one.
        rows: [num_reqs]. Their state rows.
    """
    query_lens, num_computed_tokens, num_known_tokens = np.array(
        (scheduled.num_tokens, scheduled.num_computed_tokens, scheduled.num_known_tokens),
        dtype=np.int32,
    )
    num_reqs = len(rows)
    seq_lens = num_computed_tokens + query_lens
    num_logits = seq_lens == num_known_tokens
    packed = np.zeros(3 * num_reqs + 2, dtype=np.int32)
    packed[:num_reqs] = rows
    query_start_loc = packed[num_reqs : 2 * num_reqs + 1]
    cu_num_logits = packed[2 * num_reqs + 1 :]
    np.cumsum(query_lens, out=query_start_loc[1:])
    np.cumsum(num_logits, out=cu_num_logits[1:])
    return BatchLayout(
        req_ids=scheduled.req_ids,
        rows=rows,
        query_lens=query_lens,
        num_computed_tokens=num_computed_tokens,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        packed=packed,
        logit_rows=rows[num_logits],
        num_tokens=int(query_start_loc[-1]),
        num_logits=int(cu_num_logits[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        max_num_logits=1,
    )
