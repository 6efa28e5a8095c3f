"""Two dialects of the same steps have one hash; other steps have another."""

from types import SimpleNamespace
from typing import Any

from mrv2_diff.device_bench.streams import StreamHash


def new(req_id: str, computed: int = 0, blocks: int = 1) -> Any:
    return SimpleNamespace(
        req_id=req_id, num_computed_tokens=computed, block_ids=(list(range(blocks)),)
    )


def step(
    tokens: dict[str, int],
    fresh: tuple[Any, ...] = (),
    cached: dict[str, tuple[int, int]] | None = None,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput; of a cached request its computed tokens and number of new blocks."""
    cached = cached or {}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            new_block_ids=[(list(range(n)),) if n else None for _, n in cached.values()],
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
    )


def digest(*steps: Any) -> str:
    stream = StreamHash()
    for each in steps:
        stream.add(each)
    return stream.hexdigest()


BEGIN = step({"a": 4, "b": 4}, fresh=(new("a"), new("b")))


def test_a_resumed_request_is_the_same_in_both_dialects() -> None:
    gone = step({"a": 1}, cached={"a": (4, 0)}, preempted=("b",))
    in_v1 = step({"a": 1, "b": 5}, cached={"a": (5, 0), "b": (0, 2)}, resumed=("b",))
    in_v2 = step({"b": 5, "a": 1}, fresh=(new("b", 0, 2),), cached={"a": (5, 0)})
    assert digest(BEGIN, gone, in_v1) == digest(BEGIN, gone, in_v2)


def test_block_ids_do_not_count_and_their_number_does() -> None:
    other_ids = step({"a": 4, "b": 4}, fresh=(new("a"), new("b")))
    other_ids.scheduled_new_reqs[0].block_ids = ([99],)
    assert digest(BEGIN) == digest(other_ids)
    assert digest(BEGIN) != digest(step({"a": 4, "b": 4}, fresh=(new("a", 0, 2), new("b"))))


def test_order_tokens_and_departures_count() -> None:
    swapped = step({"a": 4, "b": 4}, fresh=(new("b"), new("a")))
    fewer = step({"a": 3, "b": 4}, fresh=(new("a"), new("b")))
    left = step({"b": 1}, cached={"b": (4, 0)}, finished=("a",))
    stays = step({"b": 1}, cached={"b": (4, 0)})
    assert len({digest(BEGIN), digest(swapped), digest(fewer)}) == 3
    assert digest(BEGIN, left) != digest(BEGIN, stays)


def test_an_id_used_again_is_new() -> None:
    over = step({"b": 1}, cached={"b": (4, 0)}, finished=("a",))
    again = step({"a": 4, "b": 1}, fresh=(new("a"),), cached={"b": (5, 0)})
    resumed = step({"b": 1, "a": 4}, cached={"b": (5, 0), "a": (0, 1)}, resumed=("a",))
    assert digest(BEGIN, over, again) != digest(BEGIN, over, resumed)
