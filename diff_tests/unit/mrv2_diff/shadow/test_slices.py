"""Which requests are followed, and what a step is cut to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mrv2_diff.shadow.slices import Answered, Room, Slice, Slicer, Work, is_drawn, joined

ROOM = Room(num_blocks=6, block_sizes=(32,), max_num_reqs=2, max_model_len=256)


def params(max_tokens: int | None = 8, **further: Any) -> Any:
    return SimpleNamespace(
        **{"logprobs": None, "logprob_token_ids": None, **further},
        max_tokens=max_tokens,
        refused=False,
    )


def new(req_id: str, prompt_len: int = 20, num_computed: int = 0, **further: Any) -> Any:
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=list(range(prompt_len)),
        sampling_params=params(**further),
        num_computed_tokens=num_computed,
    )


def step(
    arrive: list[Any] | None = None,
    go_on: dict[str, int] | None = None,
    resumed: set[str] | None = None,
    finished: set[str] | None = None,
    num_tokens: dict[str, int] | None = None,
) -> Any:
    """A SchedulerOutput's names; `go_on` is computed tokens by request."""
    arrive, go_on = arrive or [], go_on or {}
    counts = {request.req_id: len(request.prompt_token_ids) for request in arrive}
    counts |= dict.fromkeys(go_on, 1)
    return SimpleNamespace(
        scheduled_new_reqs=arrive,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(go_on),
            num_computed_tokens=list(go_on.values()),
            resumed_req_ids=resumed or set(),
        ),
        num_scheduled_tokens=counts | (num_tokens or {}),
        finished_req_ids=finished or set(),
    )


def output(tokens: dict[str, list[int]]) -> Any:
    return SimpleNamespace(
        req_id_to_index={req_id: index for index, req_id in enumerate(tokens)},
        sampled_token_ids=list(tokens.values()),
        logprobs=None,
    )


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


def slicer(counts: Counter[str], share: float = 1.0, room: Room = ROOM) -> Slicer:
    return Slicer(
        share, room, lambda asked: "no" if asked.refused else None, lambda n: counts.update([n])
    )


def test_a_share_is_drawn_by_id_alone() -> None:
    ids = [f"cmpl-{number}" for number in range(20_000)]
    drawn = [req_id for req_id in ids if is_drawn(req_id, 0.01)]
    assert 140 < len(drawn) < 260  # 200 and four standard deviations
    assert drawn == [req_id for req_id in ids if is_drawn(req_id, 0.01)]
    assert not any(is_drawn(req_id, 0.0) for req_id in ids)
    assert all(is_drawn(req_id, 1.0) for req_id in ids)


def test_a_step_without_a_followed_request_is_not_looked_at(counts: Counter[str]) -> None:
    class Untouchable:
        scheduled_new_reqs: tuple[Any, ...] = ()

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was read")

    assert slicer(counts).cut(Untouchable()) is None


def test_arrival_to_end(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    first = cutter.cut(step([new("a", 20)], go_on={"stranger": 9}))
    assert first is not None
    assert [arrived.req_id for arrived in first.arrived] == ["a"]
    assert first.arrived[0].num_blocks == (1,)
    assert first.work == [Work(req_id="a", start=0, end=20)]
    assert not first.is_complete
    first.answer(output({"stranger": [4], "a": [7]}))
    assert first.is_complete
    assert first.answers["a"].token_id == 7
    assert set(first.answers) == {"a"}
    second = cutter.cut(step(go_on={"stranger": 10, "a": 20}))
    assert second is not None
    assert second.work == [Work(req_id="a", start=20, end=21)]
    assert cutter.cut(step(go_on={"stranger": 11})) is None  # "a" is not in this step
    last = cutter.cut(step(go_on={"stranger": 12}, finished={"a", "other"}))
    assert last is not None
    assert (last.finished, last.work, last.is_complete) == (["a"], [], True)
    assert not cutter.followed
    assert counts == {"sampled_requests": 1}


def test_a_prefix_hit_and_a_resume_are_seen(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    first = cutter.cut(step([new("a", 80, num_computed=64)], num_tokens={"a": 16}))
    assert first is not None
    assert first.work == [Work(req_id="a", start=64, end=80)]
    again = cutter.cut(step(go_on={"a": 32}, resumed={"a"}, num_tokens={"a": 49}))
    assert again is not None
    assert again.restarted == ["a"]
    assert counts["resumed_requests"] == 1
    assert again.work == [Work(req_id="a", start=32, end=81)]


def test_what_does_not_fit_is_not_followed_and_room_comes_back(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    cut = cutter.cut(step([new("a", 100), new("b", 60), new("c", 1)]))  # 4, 3 and 1 of 6 blocks
    assert cut is not None
    assert sorted(cutter.followed) == ["a", "c"]
    assert counts["no_room_requests"] == 1
    cutter.cut(step([new("d", 1)]))
    assert counts["no_room_requests"] == 2  # rows: two at most
    cutter.cut(step(finished={"a", "c"}))
    cutter.cut(step([new("e", 1)]))
    assert counts["no_room_requests"] == 3  # the shadow has ended neither
    cutter.give_back("c")
    cutter.cut(step([new("f", 80)]))
    assert counts["no_room_requests"] == 4  # two blocks are left
    cutter.give_back("a")
    cutter.give_back("a")  # once is enough
    cutter.cut(step([new("g", 180)]))  # all six
    assert cutter.followed == {"g": 6}


def test_a_request_without_a_limit_needs_the_longest(counts: Counter[str]) -> None:
    assert ROOM.needed(10, None) == (8,)
    assert ROOM.needed(250, 100) == (8,)
    assert Room(num_blocks=9, block_sizes=(32, 16), max_num_reqs=1, max_model_len=256).needed(
        30, 3
    ) == (2, 3)


def test_what_mrv2_refuses_is_not_followed(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    refused = new("a")
    refused.sampling_params.refused = True
    embeds = new("b")
    embeds.prompt_token_ids = None
    wrong = step([refused])
    wrong.scheduled_new_reqs.append(embeds)
    assert cutter.cut(wrong) is None
    assert counts == {"unsupported_requests": 2}


def test_a_shadow_that_is_behind_takes_none_but_follows_on(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    cutter.cut(step([new("a")]))
    cut = cutter.cut(step([new("b")], go_on={"a": 20}), is_behind=True)
    assert cut is not None
    assert (cut.arrived, cut.work) == ([], [Work(req_id="a", start=20, end=21)])
    assert counts == {"sampled_requests": 1, "busy_requests": 1}
    cutter.cut(step([new("c")]))
    assert set(cutter.followed) == {"a", "c"}


def test_the_next_turn_of_a_session_is_given_up(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    cutter.cut(step([new("a")]))
    cut = cutter.cut(step([new("a", 60)]))
    assert cut is not None
    assert (cut.finished, cut.arrived, cut.work) == (["a"], [], [])
    assert counts["dropped_requests"] == 1


def test_an_id_can_come_again_in_the_step_in_which_it_ends(counts: Counter[str]) -> None:
    cutter = slicer(counts)
    cutter.cut(step([new("a")]))
    cut = cutter.cut(step([new("a", 5)], finished={"a"}))
    assert cut is not None
    assert cut.finished == ["a"]
    assert cut.work == [Work(req_id="a", start=0, end=5)]
    assert cutter.followed == {"a": 1}


def test_a_drop_that_may_be_an_earlier_ones_leaves_the_room_of_the_one_with_its_id(
    counts: Counter[str],
) -> None:
    cutter = slicer(counts)
    cutter.cut(step([new("a")]))
    cutter.cut(step([new("a", 80)], finished={"a"}))
    cutter.forget("a")
    assert cutter.followed == {"a": 3}
    cutter.give_back("a")
    cutter.forget("a")
    assert cutter.followed == {}
    cutter.cut(step([new("b", 180)]))
    assert cutter.followed == {"b": 6}


def test_grammars_of_followed_requests_are_kept(counts: Counter[str]) -> None:
    cut = slicer(counts).cut(step([new("a")], go_on={"x": 3}))
    assert cut is not None
    cut.constrain(None)
    assert cut.grammar == {}
    masks = np.arange(4, dtype=np.int32).reshape(2, 2)
    cut.constrain(SimpleNamespace(structured_output_request_ids=["x", "a"], grammar_bitmask=masks))
    assert list(cut.grammar) == ["a"]
    masks[:] = -1  # the scheduler's buffer is used again
    assert cut.grammar["a"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("asked", "named", "kept"),
    [(None, None, None), (1, None, 2), (-1, None, 3), (0, None, 1), (1, [4], None)],
)
def test_logprobs_are_those_that_the_request_asked_for(
    counts: Counter[str], asked: int | None, named: list[int] | None, kept: int | None
) -> None:
    class Lists:
        def slice_request(self, index: int, count: int) -> Any:
            assert count == 1
            rows = np.array([[index * 10, 5, 6]])
            return SimpleNamespace(logprob_token_ids=rows, logprobs=-rows / 4)

    cut = slicer(counts).cut(
        step([new("a", logprobs=asked, logprob_token_ids=named)], go_on={"x": 3})
    )
    assert cut is not None
    answered = output({"x": [1], "a": [2]})
    answered.logprobs = Lists()
    cut.answer(answered)
    found = cut.answers["a"].logprobs
    if kept is None:
        assert found is None
        return
    assert found is not None
    assert found[0].tolist() == [10, 5, 6][:kept]
    assert found[1].tolist() == [-2.5, -1.25, -1.5][:kept]
    assert found[0].base is None, "the batch's own lists would be kept"


def work(*asked: tuple[str, int], **further: Any) -> Slice:
    """A slice with tokens of requests."""
    return Slice(
        work=[Work(req_id=req_id, start=0, end=num_tokens) for req_id, num_tokens in asked],
        answers={req_id: Answered(token_id=num_tokens) for req_id, num_tokens in asked},
        **further,
    )


def ids(parts: list[Slice]) -> list[list[str]]:
    return [[one.req_id for one in part.work] for part in parts]


def test_slices_without_a_common_request_are_joined() -> None:
    parts = [work(("a", 5)), work(("a", 1)), work(("b", 6)), work(("a", 1)), work(("b", 1))]
    found = joined(parts, 64)
    assert ids(found) == [["a", "b"], ["a", "b"], ["a"]]
    assert [part.num_steps for part in found] == [2, 2, 1]
    assert {name: one.token_id for name, one in found[0].answers.items()} == {"a": 5, "b": 6}


def test_what_v1_ran_together_stays_together() -> None:
    parts = [work(("a", 1)), work(("a", 1), ("b", 1)), work(("b", 1)), work(("c", 1))]
    assert ids(joined(parts, 64)) == [["a", "c"], ["a", "b"], ["b"]]


def test_a_joined_step_has_no_more_tokens_than_it_may() -> None:
    parts = [work(("a", 40)), work(("b", 30)), work(("c", 24)), work(("b", 1)), work(("d", 64))]
    assert ids(joined(parts, 64)) == [["a", "c"], ["b"], ["b"], ["d"]]


def test_an_end_stays_behind_its_request_and_nothing_passes_a_forgetting() -> None:
    parts = [
        work(("a", 1)),
        work(("b", 1), finished=["a"]),
        Slice(forget_all=True),
        work(("c", 1)),
        work(("c", 1)),
    ]
    found = joined(parts, 64)
    assert ids(found) == [["a"], ["b"], [], ["c"], ["c"]]
    assert (found[1].finished, found[2].forget_all) == (["a"], True)


def test_the_end_of_one_and_the_arrival_of_the_next_with_its_id_keep_their_order() -> None:
    parts = [work(("a", 3)), Slice(finished=["a"]), work(("a", 4)), work(("b", 1))]
    found = joined(parts, 64)
    assert ids(found) == [["a", "b"], [], ["a"]]
    assert found[1].finished == ["a"]
