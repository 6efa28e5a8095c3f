"""A step that ran in parts is put together as if it had run in one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2_diff.observation import Observation, merge, token_index

Observe = Callable[..., Observation]


def _assert_equal(one: Observation, other: Observation) -> None:
    for field in dataclasses.fields(Observation):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("slots", "layers"):
            assert [s.tolist() for s in ours] == [s.tolist() for s in theirs]
        elif field.name == "logprobs":
            assert (ours is None) == (theirs is None)
        elif isinstance(ours, list | dict):
            assert ours == theirs, field.name
        else:
            assert ours.tolist() == theirs.tolist(), field.name


def _only(step: Observation, req_id: str) -> Observation:
    """Return the part of a step that is one request's."""
    batch, draw = step.req_ids.index(req_id), step.draw_ids.index(req_id)
    tokens = token_index(step, [req_id])
    logprobs = step.logprobs
    return dataclasses.replace(
        step,
        req_ids=[req_id],
        query_lens=step.query_lens[batch : batch + 1],
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        seq_lens=step.seq_lens[batch : batch + 1],
        slots=tuple(slots[tokens] for slots in step.slots),
        layers=tuple(layer[torch.from_numpy(tokens)] for layer in step.layers),
        draw_ids=[req_id],
        logits=step.logits[draw : draw + 1],
        processed_logits=step.processed_logits[draw : draw + 1],
        tokens=step.tokens[draw : draw + 1],
        drawn=step.drawn[draw : draw + 1],
        logprobs=None
        if logprobs is None
        else dataclasses.replace(
            logprobs,
            token_ids=logprobs.token_ids[draw : draw + 1],
            values=logprobs.values[draw : draw + 1],
            ranks=logprobs.ranks[draw : draw + 1],
        ),
    )


def _undrawn(step: Observation, **changes: Any) -> Observation:
    """Return a part that ends before its request's last token."""
    none = np.empty(0, dtype=np.int64)
    no_logits = torch.empty(0, step.logits.shape[1])
    return dataclasses.replace(
        step,
        draw_ids=[],
        logits=no_logits,
        processed_logits=no_logits,
        tokens=none,
        drawn=none,
        logprobs=None,
        **changes,
    )


def test_one_part_is_the_step(observe: Observe) -> None:
    step = observe()
    assert merge([step]) is step


def test_a_step_is_the_sum_of_its_requests(observe: Observe) -> None:
    step = observe(num_logprobs=2)
    whole = merge([_only(step, "a"), _only(step, "b")])
    _assert_equal(whole, step)
    assert whole.logprobs is not None
    assert step.logprobs is not None
    assert whole.logprobs.token_ids.tolist() == step.logprobs.token_ids.tolist()
    assert whole.logprobs.values.tolist() == step.logprobs.values.tolist()
    assert whole.logprobs.ranks.tolist() == step.logprobs.ranks.tolist()


def test_the_chunks_of_a_prompt_follow_each_other(observe: Observe) -> None:
    step = observe()
    b = _only(step, "b")
    head = _undrawn(
        b,
        query_lens=np.array([2]),
        input_ids=b.input_ids[:2],
        positions=b.positions[:2],
        seq_lens=np.array([2]),
        slots=tuple(slots[:2] for slots in b.slots),
    )
    tail = dataclasses.replace(
        b,
        query_lens=np.array([1]),
        input_ids=b.input_ids[2:],
        positions=b.positions[2:],
        slots=tuple(slots[2:] for slots in b.slots),
    )
    _assert_equal(merge([head, tail]), b)
    # The head runs beside another request, whose tokens must not come between.
    a = _only(step, "a")
    beside = merge([_undrawn(head), a])
    assert beside.req_ids == ["b", "a"]
    whole = merge([beside, tail])
    assert whole.req_ids == ["b", "a"]
    assert whole.query_lens.tolist() == [3, 1]
    assert whole.input_ids.tolist() == [21, 22, 23, 11]
    assert whole.positions.tolist() == [0, 1, 2, 7]
    assert whole.seq_lens.tolist() == [3, 8], "the last length counts"
    assert [slots.tolist() for slots in whole.slots] == [[64, 65, 66, 39], [0, 1, 2, 7]]
    assert whole.draw_ids == ["a", "b"]


def test_tokens_are_listed_in_any_order_of_requests(observe: Observe) -> None:
    step = observe()
    assert step.input_ids[token_index(step, ["b", "a"])].tolist() == [21, 22, 23, 11]
    assert step.input_ids[token_index(step, ["b"])].tolist() == [21, 22, 23]
    assert token_index(step, []).tolist() == []


@pytest.mark.parametrize("wider_first", [False, True])
def test_logprobs_of_parts_of_unequal_width_are_padded(observe: Observe, wider_first: bool) -> None:
    narrow, wide = _only(observe(num_logprobs=1), "a"), _only(observe(num_logprobs=3), "b")
    parts = [wide, narrow] if wider_first else [narrow, wide]
    logprobs = merge(parts).logprobs
    assert logprobs is not None
    assert narrow.logprobs is not None
    assert wide.logprobs is not None
    row = 1 if wider_first else 0
    assert logprobs.token_ids[1 - row].tolist() == wide.logprobs.token_ids[0].tolist()
    assert logprobs.values[1 - row].tolist() == wide.logprobs.values[0].tolist()
    assert logprobs.token_ids[row].tolist() == [*narrow.logprobs.token_ids[0].tolist(), -1, -1]
    assert logprobs.values[row, :2].tolist() == narrow.logprobs.values[0].tolist()
    assert np.isnan(logprobs.values[row, 2:]).all()


def test_a_part_without_logprobs_is_padded_too(observe: Observe) -> None:
    logprobs = merge([_only(observe(), "a"), _only(observe(num_logprobs=2), "b")]).logprobs
    assert logprobs is not None
    assert logprobs.token_ids[0].tolist() == [-1, -1, -1]
    assert np.isnan(logprobs.values[0]).all()
    assert logprobs.ranks.tolist() == [-1, 1]
    assert merge([_only(observe(), "a"), _only(observe(), "b")]).logprobs is None


def test_each_part_adds_the_prompt_logprobs_that_it_returned(observe: Observe) -> None:
    step = observe(num_logprobs=2)
    assert step.logprobs is not None
    a, b = _only(step, "a"), _only(step, "b")
    merged = merge([dataclasses.replace(a, prompt_logprobs={"a": step.logprobs}), b])
    assert dict(merged.prompt_logprobs) == {"a": step.logprobs}
