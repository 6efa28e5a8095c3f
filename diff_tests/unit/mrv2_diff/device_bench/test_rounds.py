"""Rounds go on until the ratios are known or the time is over, with whoever is left."""

import itertools
import random
from collections.abc import Callable

from mrv2_diff.device_bench.channel import RunnerFailed
from mrv2_diff.device_bench.ratios import MIN_ROUNDS, balanced_orders
from mrv2_diff.device_bench.rounds import Figures, describe, interleave

RUNNERS = ("v1", "mrv2", "vllm-v2")


class Clock:
    """Time that passes only in blocks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def blocks(clock: Clock, spread: float, asked: list[str]) -> Callable[[str], Figures]:
    rng = random.Random(0)

    def block(runner: str) -> Figures:
        asked.append(runner)
        clock.now += 1
        return {"host_us": 100 * (1 + rng.uniform(-spread, spread))}

    return block


def test_quiet_runners_are_done_after_every_order_once() -> None:
    clock, asked = Clock(), list[str]()
    done = interleave(RUNNERS, blocks(clock, 0.001, asked), ["host_us"], deadline=1e9, clock=clock)
    assert done.rounds == MIN_ROUNDS
    assert done.conclusive
    assert asked == list(itertools.chain(*balanced_orders(RUNNERS)))
    assert set(done.ratios["host_us"]) == {"mrv2/v1", "mrv2/vllm-v2"}


def test_noisy_runners_end_inconclusive_at_the_deadline() -> None:
    clock = Clock()
    done = interleave(RUNNERS, blocks(clock, 0.5, []), ["host_us"], deadline=60, clock=clock)
    assert done.out_of_time
    assert not done.conclusive
    assert clock.now <= 60
    assert done.rounds == 20


def test_a_round_that_cannot_end_in_time_is_not_begun() -> None:
    clock, asked = Clock(), list[str]()
    done = interleave(RUNNERS, blocks(clock, 0, asked), ["host_us"], deadline=30, clock=clock,
                      expected_s=31)  # fmt: skip
    assert not asked
    assert done.out_of_time
    assert not done.conclusive
    assert describe(done)["rounds"] == 0


def test_a_runner_that_fails_leaves_the_others() -> None:
    clock = Clock()
    inner = blocks(clock, 0.001, [])

    def block(runner: str) -> Figures:
        if runner == "v1" and clock.now >= 6:
            raise RunnerFailed(runner, "out of memory")
        return inner(runner)

    done = interleave(RUNNERS, block, ["host_us"], deadline=1e9, clock=clock)
    assert [str(failure) for failure in done.failures] == ["v1: out of memory"]
    assert set(done.ratios["host_us"]) == {"mrv2/vllm-v2"}
    assert len(done.blocks["v1"]) == 2
    assert len(done.blocks["mrv2"]) == MIN_ROUNDS
    assert not done.conclusive


def test_a_number_of_rounds_is_kept() -> None:
    done = interleave(
        RUNNERS, blocks(Clock(), 0.5, []), ["host_us"], deadline=1e9, fixed_rounds=2, clock=Clock()
    )
    assert done.rounds == 2


def test_all_gone_ends() -> None:
    def block(runner: str) -> Figures:
        raise RunnerFailed(runner, "gone")

    done = interleave(RUNNERS, block, ["host_us"], deadline=1e9, clock=Clock())
    assert len(done.failures) == 3
    assert describe(done)["conclusive"] is False
