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
    logit_rows: Int32
    """[num_logits]. Logit -> state row."""
    num_tokens: int
    num_logits: int
    max_query_len: int
    max_seq_len: int

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
    query_lens = np.array(scheduled.num_tokens, dtype=np.int32)
    num_computed_tokens = np.array(scheduled.num_computed_tokens, dtype=np.int32)
    seq_lens = num_computed_tokens + query_lens
    num_logits = (seq_lens == np.array(scheduled.num_known_tokens, dtype=np.int32)).astype(np.int32)
    query_start_loc = _prefix_sums(query_lens)
    cu_num_logits = _prefix_sums(num_logits)
    return BatchLayout(
        req_ids=scheduled.req_ids,
        rows=rows,
        query_lens=query_lens,
        num_computed_tokens=num_computed_tokens,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        logit_rows=np.repeat(rows, num_logits),
        num_tokens=int(query_start_loc[-1]),
        num_logits=int(cu_num_logits[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
    )


def _prefix_sums(counts: Int32) -> Int32:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
