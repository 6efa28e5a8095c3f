"""Another form of a step asks for the same work."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

Schedule = Callable[[Any], list[Any]]

NAMES = ("same", "reordered", "other neighbours", "other chunks")
VARIED = tuple(f"varied {seed}" for seed in range(12))

CACHED = {"d1": 1, "c1": 5, "d2": 1, "r1": 4, "d3": 1}
"""Tokens of requests that are known: decodes, a chunk, and one that is resumed."""
NEW = {"n1": 7, "n2": 1, "n3": 2}
UNCACHED = {"n1": 7, "n2": 1}
COMPUTED = {"d1": 40, "c1": 6, "d2": 4, "r1": 0, "d3": 9, "n1": 0, "n2": 0, "n3": 32}
BLOCKS = {"c1": ([3],), "d2": ([4, 5],), "r1": ([6],), "n1": ([7],), "n2": ([8],), "n3": ([1, 9],)}


def _schedule(name: str) -> Schedule:
    from mrv2_diff.lockstep.schedules import SCHEDULES, Varied

    assert tuple(SCHEDULES) == NAMES
    return Varied(int(name.split()[1])) if name in VARIED else SCHEDULES[name]


def _step(cached: dict[str, int] = CACHED, new: dict[str, int] = NEW) -> Any:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    known = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids={"r1"} & set(cached),
        new_token_ids=[],
        all_token_ids={"r1": [1, 2, 3, 4]} if "r1" in cached else {},
        new_block_ids=[BLOCKS.get(req_id) for req_id in cached],
        num_computed_tokens=[COMPUTED[req_id] for req_id in cached],
        num_output_tokens=[int(req_id.startswith("d")) for req_id in cached],
    )
    arriving = [
        NewRequestData(
            req_id=req_id,
            prompt_token_ids=[1] * (COMPUTED[req_id] + count),
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=BLOCKS[req_id],
            num_computed_tokens=COMPUTED[req_id],
            lora_request=None,
        )
        for req_id, count in new.items()
    ]
    return SchedulerOutput(
        scheduled_new_reqs=arriving,
        scheduled_cached_reqs=known,
        num_scheduled_tokens={**cached, **new},
        total_num_scheduled_tokens=sum(cached.values()) + sum(new.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids={"gone"},
        free_encoder_mm_hashes=[],
        preempted_req_ids={"y1"},
        new_block_ids_to_zero=[3, 4],
        kv_cache_block_copies=["a copy"],
    )


def _order(part: Any) -> list[str]:
    return [*part.scheduled_cached_reqs.req_ids, *(new.req_id for new in part.scheduled_new_reqs)]


def _computed(part: Any) -> dict[str, int]:
    cached = part.scheduled_cached_reqs
    known = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return known | {new.req_id: new.num_computed_tokens for new in part.scheduled_new_reqs}


def _blocks(part: Any) -> dict[str, Any]:
    cached = part.scheduled_cached_reqs
    blocks = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
    blocks |= {new.req_id: new.block_ids for new in part.scheduled_new_reqs}
    return {req_id: ids for req_id, ids in blocks.items() if ids is not None}


def _positions(parts: list[Any]) -> dict[str, list[int]]:
    """Return the positions that each request runs, in the order in which it runs them."""
    positions: dict[str, list[int]] = {}
    for part in parts:
        for req_id, first in _computed(part).items():
            end = first + part.num_scheduled_tokens[req_id]
            positions.setdefault(req_id, []).extend(range(first, end))
    return positions


STEPS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "everything": (CACHED, NEW),
    "decodes": ({"d1": 1, "d2": 1, "d3": 1}, {}),
    "arrivals": ({}, NEW),
    "one of each": ({"d1": 1}, {"n1": 7}),
    "one decode": ({"d1": 1}, {}),
    "one prompt": ({}, {"n1": 7}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMES + VARIED)
def test_the_parts_ask_for_the_work_of_the_step(name: str, step: str) -> None:
    whole = _step(*STEPS[step])
    parts = _schedule(name)(_step(*STEPS[step]))
    assert _positions(parts) == _positions([whole])
    assert sum(part.total_num_scheduled_tokens for part in parts) == (
        whole.total_num_scheduled_tokens
    )
    for part in parts:
        assert sorted(part.num_scheduled_tokens) == sorted(_order(part))
        assert part.total_num_scheduled_tokens == sum(part.num_scheduled_tokens.values())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMES + VARIED)
def test_what_happens_once_happens_in_the_first_part(name: str, step: str) -> None:
    first, *later = _schedule(name)(_step(*STEPS[step]))
    assert first.finished_req_ids == {"gone"}
    assert first.preempted_req_ids == {"y1"}
    assert first.new_block_ids_to_zero == [3, 4]
    assert first.kv_cache_block_copies == ["a copy"]
    for part in later:
        assert not part.finished_req_ids
        assert not part.preempted_req_ids
        assert not part.new_block_ids_to_zero
        assert not part.kv_cache_block_copies


@pytest.mark.parametrize("name", NAMES + VARIED)
def test_a_request_gets_its_blocks_once_and_arrives_or_resumes_once(name: str) -> None:
    parts = _schedule(name)(_step())
    given: dict[str, Any] = {}
    for part in parts:
        assert not given.keys() & _blocks(part).keys()
        given |= _blocks(part)
    assert given == BLOCKS
    arrived = [new.req_id for part in parts for new in part.scheduled_new_reqs]
    assert sorted(arrived) == sorted(NEW)
    resumed = [part for part in parts if part.scheduled_cached_reqs.resumed_req_ids]
    assert len(resumed) == 1
    assert resumed[0].scheduled_cached_reqs.resumed_req_ids == {"r1"}
    assert resumed[0].scheduled_cached_reqs.all_token_ids == {"r1": [1, 2, 3, 4]}


def test_a_seed_gives_the_same_forms_and_another_seed_others() -> None:
    from mrv2_diff.lockstep.schedules import Varied

    def forms(seed: int) -> list[list[str]]:
        varied = Varied(seed)
        return [_order(part) for _ in range(5) for part in varied(_step(new=UNCACHED))]

    assert forms(1) == forms(1)
    assert len({str(forms(seed)) for seed in range(20)}) == 20


def test_what_was_changed_is_counted() -> None:
    from mrv2_diff.lockstep.schedules import Varied

    alone, crowd = Varied(0), Varied(0)
    for _ in range(40):
        assert alone(_step({"d1": 1}, {})) == [_step({"d1": 1}, {})]
        crowd(_step(new=UNCACHED))
    assert alone.changes.total() == 0
    assert min(crowd.changes[what] for what in ("order", "neighbours", "chunks")) > 10


@pytest.mark.parametrize("seed", range(8))
def test_a_step_with_a_cached_prefix_is_only_put_in_another_order(seed: int) -> None:
    from mrv2_diff.lockstep.schedules import Varied

    varied = Varied(seed)
    for _ in range(5):
        (part,) = varied(_step())
        assert part.num_scheduled_tokens == _step().num_scheduled_tokens
    assert varied.changes["order"] > 0
    assert (varied.changes["neighbours"], varied.changes["chunks"]) == (0, 0)


def test_reordered_turns_the_batch_round() -> None:
    (part,) = _schedule("reordered")(_step())
    assert part.scheduled_cached_reqs.req_ids == list(reversed(CACHED))
    assert [new.req_id for new in part.scheduled_new_reqs] == list(reversed(NEW))
    assert part.scheduled_cached_reqs.num_output_tokens == [1, 0, 1, 0, 1]


def test_other_neighbours_separates_neighbours() -> None:
    parts = _schedule("other neighbours")(_step())
    assert [_order(part) for part in parts] == [["c1", "r1", "n1", "n3"], ["d1", "d2", "d3", "n2"]]
    together = [set(_order(part)) for part in parts]
    for batch in (list(CACHED), list(NEW)):
        for left, right in pairwise(batch):
            assert not any({left, right} <= part for part in together)


def test_other_chunks_halves_what_has_two_tokens() -> None:
    first, second = _schedule("other chunks")(_step())
    assert first.num_scheduled_tokens == {
        "d1": 1, "c1": 3, "d2": 1, "r1": 2, "d3": 1, "n1": 4, "n2": 1, "n3": 1,
    }  # fmt: skip
    assert second.num_scheduled_tokens == {"c1": 2, "r1": 2, "n1": 3, "n3": 1}
    assert _computed(second) == {"c1": 9, "r1": 2, "n1": 4, "n3": 33}
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.num_output_tokens == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["other neighbours", "other chunks"])
def test_a_step_that_cannot_be_divided_stays_whole(name: str) -> None:
    step = _step({"d1": 1}, {})
    assert _schedule(name)(step) == [step]
