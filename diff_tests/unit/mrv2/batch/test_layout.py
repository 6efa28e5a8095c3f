"""The layout of a step, on values made by hand."""

from dataclasses import fields

import numpy as np
import pytest

from mrv2.batch.layout import (
    BatchLayout,
    is_next_decode,
    lay_out_next_decode,
    layout_batch,
)
from mrv2.plan import NextDecode, Scheduled


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
    assert layout.packed.tolist() == [3, 1, 0, 0, 0, 2, 3, 0, 0, 0, 1, 0]


def decode(req_ids: list[str], num_computed_tokens: list[int], num_known: int = 1) -> Scheduled:
    """Return a step in which each request runs one token of those that are known."""
    return Scheduled(
        req_ids=req_ids,
        num_tokens=[1] * len(req_ids),
        num_computed_tokens=num_computed_tokens,
        num_known_tokens=[first + num_known for first in num_computed_tokens],
    )


def test_the_next_decodes_are_laid_out_as_from_nothing() -> None:
    rows = np.array([5, 0, 7], dtype=np.int32)
    work: Scheduled | NextDecode = decode(["x", "y", "z"], [4, 9, 2])
    layout = layout_batch(work, rows)
    for _ in range(3):
        work = work.next_decode()
        assert is_next_decode(layout, work)
        following, expected = lay_out_next_decode(layout, work), layout_batch(work.listed(), rows)
        assert following.packed is layout.packed
        for field in fields(BatchLayout):
            ours, theirs = getattr(following, field.name), getattr(expected, field.name)
            if field.name == "scheduled":
                assert ours is work
            elif isinstance(theirs, np.ndarray):
                assert np.array_equal(ours, theirs)
            else:
                assert ours == theirs
        layout = following


def test_only_what_was_made_of_the_last_step_is_its_next_decode() -> None:
    first, twin = decode(["x", "y"], [4, 9]), decode(["x", "y"], [4, 9])
    layout = layout_batch(first, np.array([1, 2], dtype=np.int32))
    second = first.next_decode()
    assert is_next_decode(layout, second)
    assert not is_next_decode(layout, second.listed())
    assert not is_next_decode(layout, twin.next_decode())
    assert not is_next_decode(layout, second.next_decode())
    assert not is_next_decode(layout, first)
    following = lay_out_next_decode(layout, second)
    assert is_next_decode(following, second.next_decode())
    assert not is_next_decode(following, second)
    assert not is_next_decode(following, first.next_decode())


@pytest.mark.parametrize(
    ("num_tokens", "num_known"), [([1, 1], [5, 11]), ([1, 2], [5, 11])], ids=["undrawn", "two run"]
)
def test_nothing_follows_a_step_that_was_no_plain_decode(
    num_tokens: list[int], num_known: list[int]
) -> None:
    scheduled = Scheduled(
        req_ids=["x", "y"],
        num_tokens=num_tokens,
        num_computed_tokens=[4, 9],
        num_known_tokens=num_known,
    )
    layout = layout_batch(scheduled, np.array([1, 2], dtype=np.int32))
    assert not is_next_decode(layout, scheduled.next_decode())
