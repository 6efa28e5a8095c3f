"""Orders are balanced, and an interval is as wide as the rounds scatter."""

import itertools
import json
import random
import statistics
from collections import Counter

import pytest

from mrv2_diff.device_bench.ratios import (
    INCONCLUSIVE,
    MIN_ROUNDS,
    NARROW,
    balanced_orders,
    pairs,
    ratio_of_medians,
    ratios,
    settled,
)


def test_two_runners_go_abba() -> None:
    assert balanced_orders(["a", "b"]) == [("a", "b"), ("b", "a")]


def test_every_order_of_three_is_there_once_and_reverses_are_neighbours() -> None:
    orders = balanced_orders(["a", "b", "c"])
    assert sorted(orders) == sorted(itertools.permutations("abc"))
    assert all(orders[place] == orders[place + 1][::-1] for place in range(0, 6, 2))


def test_each_runner_stands_in_each_place_equally_often() -> None:
    orders = balanced_orders(["a", "b", "c"])
    assert len(orders) == MIN_ROUNDS
    assert set(Counter(p for order in orders for p in enumerate(order)).values()) == {2}


def test_a_drift_cancels_over_a_pair_of_rounds() -> None:
    clock = itertools.count(100)
    times: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for order in balanced_orders(list(times))[:2]:
        for runner in order:
            times[runner].append(next(clock))
    assert len({sum(values) for values in times.values()}) == 1


def test_one_runner_has_one_order() -> None:
    assert balanced_orders(["a"]) == [("a",)]


def scattered(middle: float, spread: float, rounds: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [middle * (1 + rng.uniform(-spread, spread)) for _ in range(rounds)]


def test_quiet_rounds_give_a_narrow_interval_around_the_ratio() -> None:
    ratio = ratio_of_medians(scattered(50, 0.005, 12, 1), scattered(200, 0.005, 12, 2))
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value == pytest.approx(0.25, rel=0.01)
    assert ratio.verdict == NARROW


def test_noisy_rounds_are_inconclusive() -> None:
    ratio = ratio_of_medians(scattered(50, 0.3, 12, 1), scattered(200, 0.3, 12, 2))
    assert ratio.width > 0.03
    assert ratio.verdict == INCONCLUSIVE


def test_drift_that_both_share_does_not_widen_the_interval() -> None:
    clock = scattered(1.0, 0.4, 21, 5)
    ratio = ratio_of_medians([10 * speed for speed in clock], [20 * speed for speed in clock])
    assert ratio.verdict == NARROW


def test_few_rounds_are_inconclusive_however_quiet() -> None:
    few = [1.0] * (MIN_ROUNDS - 1)
    assert ratio_of_medians(few, few).verdict == INCONCLUSIVE
    assert ratio_of_medians([*few, 1.0], [*few, 1.0]).verdict == NARROW


def test_one_round_has_no_interval_and_a_record_that_json_can_hold() -> None:
    values = ratio_of_medians([1.0], [2.0]).values()
    assert (values["ratio"], values["low"], values["verdict"]) == (0.5, None, INCONCLUSIVE)
    json.dumps(values, allow_nan=False)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(60):
        ratio = ratio_of_medians(scattered(30, 0.2, 24, seed), scattered(60, 0.2, 24, 1000 + seed))
        covered += ratio.low <= 0.5 <= ratio.high
    assert covered >= 50


@pytest.mark.parametrize(("left", "right"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_has_no_ratio_is_refused(left: list[float], right: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rounds|ratio"):
        ratio_of_medians(left, right)


def test_ours_is_compared_with_every_other() -> None:
    assert pairs(["v1", "mrv2", "vllm-v2"]) == [("mrv2", "v1"), ("mrv2", "vllm-v2")]
    assert pairs(["v1", "vllm-v2"]) == [("vllm-v2", "v1")]
    assert pairs(["mrv2"]) == []


def test_ratios_take_the_rounds_that_both_have() -> None:
    found = ratios({"v1": [2.0, 2.0, 8.0], "mrv2": [1.0, 1.0]})
    assert found["mrv2/v1"].value == pytest.approx(statistics.median([1.0, 1.0]) / 2.0)
    assert found["mrv2/v1"].rounds == 2
    assert not settled(found)
