"""The layout of a step, on values made by hand."""

import numpy as np

from mrv2.batch.layout import layout_batch
from mrv2.plan import Scheduled


def test_a_mixed_step() -> None:
    # A decode, a chunk in the middle of a prompt, the last chunk of one, and a whole prompt.
    scheduled = Scheduled(
        req_ids=["d", "m", "l", "w"],
        num_tokens=[1, 4, 2, 3],
        num_computed_tokens=[9, 4, 6, 0],
        num_known_tokens=[10, 20, 8, 3],
    )
    layout = layout_batch(scheduled, np.array([5, 0, 7, 2], dtype=np.int32))
    assert layout.req_ids == ["d", "m", "l", "w"]
    assert layout.rows.tolist() == [5, 0, 7, 2]
    assert layout.query_lens.tolist() == [1, 4, 2, 3]
    assert layout.num_computed_tokens.tolist() == [9, 4, 6, 0]
    assert layout.seq_lens.tolist() == [10, 8, 8, 3]
    assert layout.query_start_loc.tolist() == [0, 1, 5, 7, 10]
    assert layout.cu_num_logits.tolist() == [0, 1, 1, 2, 3]
    assert layout.logit_rows.tolist() == [5, 7, 2]
    assert (layout.num_reqs, layout.num_tokens, layout.num_logits) == (4, 10, 3)
    assert (layout.max_query_len, layout.max_seq_len) == (4, 10)
    assert all(
        values.dtype == np.int32
        for values in (layout.query_start_loc, layout.cu_num_logits, layout.seq_lens)
    )


def test_a_step_in_which_nobody_draws() -> None:
    scheduled = Scheduled(
        req_ids=["a", "b"],
        num_tokens=[2, 3],
        num_computed_tokens=[0, 1],
        num_known_tokens=[5, 5],
    )
    layout = layout_batch(scheduled, np.array([1, 0], dtype=np.int32))
    assert layout.cu_num_logits.tolist() == [0, 0, 0]
    assert layout.logit_rows.tolist() == []
    assert layout.num_logits == 0


def test_what_is_uploaded_is_the_rows_and_both_prefix_sums() -> None:
    scheduled = Scheduled(
        req_ids=["a", "b"], num_tokens=[2, 1], num_computed_tokens=[0, 4], num_known_tokens=[5, 5]
    )
    layout = layout_batch(scheduled, np.array([3, 1], dtype=np.int32))
    assert layout.packed.tolist() == [3, 1, 0, 2, 3, 0, 0, 1]
