"""A preempted request that comes back is a new one to V2, with the tokens that it has so far."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class New:
    """As vLLM's NewRequestData, which needs no vLLM to be translated."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    sampling_params: str = "its own"
    prefill_token_ids: list[int] | None = None


@dataclass
class Cached:
    """As CachedRequestData."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass
class Step:
    """As SchedulerOutput."""

    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)


A = New("a", [1, 2, 3], ([4],))
B = New("b", [5], ([6],))


@pytest.fixture
def dialect() -> Any:
    pytest.importorskip("vllm", reason="the package of the lockstep imports it")
    from mrv2_diff.lockstep.dialect import V2Dialect

    return V2Dialect()


def _cached(*req_ids: str, **changes: Any) -> Cached:
    count = len(req_ids)
    values: dict[str, Any] = {
        "req_ids": list(req_ids),
        "new_block_ids": [None] * count,
        "num_computed_tokens": [7 + index for index in range(count)],
        "num_output_tokens": [1] * count,
    }
    return Cached(**(values | changes))


def test_a_new_request_carries_its_prompt_as_what_is_to_be_computed(dialect: Any) -> None:
    step = Step(scheduled_new_reqs=[A, B])
    before = copy.deepcopy(step)
    told = dialect.translate(step)
    assert [new.prefill_token_ids for new in told.scheduled_new_reqs] == [[1, 2, 3], [5]]
    assert step == before
    assert told.scheduled_new_reqs[0].prefill_token_ids is not A.prompt_token_ids


def test_a_resumed_request_arrives_again_with_its_tokens(dialect: Any) -> None:
    dialect.translate(Step(scheduled_new_reqs=[A, B]))
    dialect.translate(Step(preempted_req_ids={"a"}, scheduled_cached_reqs=_cached("b")))
    cached = _cached(
        "b",
        "a",
        resumed_req_ids={"a"},
        all_token_ids={"a": [1, 2, 3, 9, 8]},
        new_block_ids=[([7],), ([2, 3],)],
    )
    told = dialect.translate(Step(scheduled_cached_reqs=cached))
    (back,) = told.scheduled_new_reqs
    assert (back.req_id, back.prompt_token_ids, back.sampling_params) == ("a", [1, 2, 3], "its own")
    assert back.prefill_token_ids == [1, 2, 3, 9, 8]
    assert (back.block_ids, back.num_computed_tokens) == (([2, 3],), 8)
    rest = told.scheduled_cached_reqs
    assert rest == _cached("b", new_block_ids=[([7],)])


def test_the_tokens_of_a_request_that_missed_a_step_are_not_said(dialect: Any) -> None:
    dialect.translate(Step(scheduled_new_reqs=[A]))
    cached = _cached("a", all_token_ids={"a": [1, 2, 3, 9]})
    told = dialect.translate(Step(scheduled_cached_reqs=cached))
    assert told.scheduled_new_reqs == []
    assert told.scheduled_cached_reqs == _cached("a")


def test_an_id_that_ended_and_comes_again_is_another_request(dialect: Any) -> None:
    dialect.translate(Step(scheduled_new_reqs=[A]))
    again = New("a", [9], ([1],))
    dialect.translate(Step(finished_req_ids={"a"}, scheduled_new_reqs=[again]))
    assert dialect.known == {"a": again}
    dialect.translate(Step(finished_req_ids={"a", "never there"}))
    assert dialect.known == {}


def test_what_is_not_translated_is_refused(dialect: Any) -> None:
    with pytest.raises(ValueError, match="drafts are not translated"):
        dialect.translate(Step(scheduled_spec_decode_tokens={"a": [1]}))
    cached = _cached("a", resumed_req_ids={"a"}, all_token_ids={"a": [1]}, new_block_ids=[([1],)])
    with pytest.raises(ValueError, match="'a' is resumed and never arrived"):
        dialect.translate(Step(scheduled_cached_reqs=cached))
