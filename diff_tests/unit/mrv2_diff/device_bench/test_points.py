"""Requests of a point arrive and leave so that each step has the batch that the point says."""

from collections import Counter

import pytest

from mrv2_diff.device_bench.points import Point, Workload, arrivals


def running(point: Point, steps: int) -> list[int]:
    """Requests in each step, where every one runs from its arrival until its tokens are out."""
    counts = [0] * steps
    for arrival in arrivals(point, steps):
        for step in range(arrival.step, min(steps, arrival.step + arrival.max_tokens)):
            counts[step] += 1
    return counts


@pytest.mark.parametrize("batch", [1, 3, 32, 256])
@pytest.mark.parametrize("churn", [0.0, 0.05, 0.1, 0.3, 0.5])
def test_the_batch_stays_as_large(batch: int, churn: float) -> None:
    assert set(running(Point(batch=batch, churn=churn), 80)) == {batch}


@pytest.mark.parametrize(("batch", "churn"), [(256, 0.1), (32, 0.5), (10, 0.1), (7, 0.25)])
def test_churn_replaces_its_part_of_the_batch(batch: int, churn: float) -> None:
    steps = 100
    come = Counter(arrival.step for arrival in arrivals(Point(batch=batch, churn=churn), steps))
    assert come[0] == batch
    later = [come[step] for step in range(1, steps)]
    assert sum(later) == pytest.approx(batch * churn * len(later), abs=1)
    assert max(later) - min(later) <= 1


def test_nobody_leaves_without_churn() -> None:
    found = list(arrivals(Point(batch=4), 30))
    assert [(arrival.step, arrival.max_tokens > 30) for arrival in found] == [(0, True)] * 4


def test_prompts_differ_and_are_as_long_as_the_context() -> None:
    prompts = [arrival.prompt for arrival in arrivals(Point(batch=16, context=20), 5)]
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt) for prompt in prompts}) == 16


def test_names_tell_points_apart() -> None:
    points = [Point(batch=1), Point(batch=1, temperature=1.0), Point(batch=1, churn=0.1)]
    assert len({point.name for point in points}) == 3


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"batch": 1, "churn": 0.6}, {"batch": 1, "temperature": -1.0}]
)
def test_what_cannot_run_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="choose"):
        Point(**wrong)  # type: ignore[arg-type]


def test_the_workload_is_the_same_each_time_and_in_its_bounds() -> None:
    lengths = Workload().lengths()
    assert lengths == Workload().lengths()
    assert len(lengths) == 256
    assert all(100 <= length <= 1024 for pair in lengths for length in pair)
    assert lengths != Workload(seed=1).lengths()
