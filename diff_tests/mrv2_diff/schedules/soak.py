"""Random schedules until the time is over: what happened, and whether memory stayed flat."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Protocol

from mrv2_diff.schedules import generator
from mrv2_diff.schedules.actions import Action, Drain, Model, Schedule, Setup
from mrv2_diff.schedules.driver import Driver
from mrv2_diff.schedules.generator import SETUPS
from mrv2_diff.schedules.result import Failure, SoakResult
from mrv2_diff.schedules.shrinking import shrink

_ACTIONS_OF_A_RUNNER = 2000
"""Actions after which a runner is replaced by one of the next setup."""
_MOST_TRIES = 300
"""Schedules that are tried to make a failing one short."""


class Bench(Protocol):
    """What schedules are played on."""

    model: Model
    setups: tuple[Setup, ...]

    def driver(self, setup: Setup) -> Driver:
        """Return a driver of a runner that has no request."""

    def actions(self, seed: int, setup: Setup, count: int) -> Iterator[Action]:
        """Return so many random actions."""


class HashBench:
    """Runners of HashLM."""

    model: Model = "hash"
    setups = SETUPS

    def driver(self, setup: Setup) -> Driver:
        """Return a driver of a new runner."""
        return Driver(setup)

    def actions(self, seed: int, setup: Setup, count: int) -> Iterator[Action]:
        """Return so many random actions."""
        return generator.actions(seed, setup, count)


def _tell_nobody(_: SoakResult) -> None:
    """Drop how far it got."""


def soak(
    bench: Bench,
    seconds: float,
    seed: int,
    on_progress: Callable[[SoakResult], None] = _tell_nobody,
) -> SoakResult:
    """Play random schedules until the time is over or one fails.

    Args:
        bench: What to play on.
        seconds: Time to spend; the requests that are live then still end.
        seed: Of the schedules.
        on_progress: Told now and then how far it got.
    """
    result, began = SoakResult(model=bench.model), time.monotonic()
    for setup in bench.setups:
        bench.driver(setup)  # what is made once a process or a setup
    gc.collect()
    gc.freeze()  # vLLM's and torch's own objects; else every look at ours costs a step's time
    try:
        for number in count():
            setup = bench.setups[number % len(bench.setups)]
            if not _play_one(bench, result, setup, seed + number, began + seconds, on_progress):
                break
    finally:
        gc.unfreeze()
    result.seconds = time.monotonic() - began
    return result


def find_failure(seed: int, num_actions: int, bench: Bench | None = None) -> Failure | None:
    """Play so many actions on every setup; return the first failure, made short."""
    bench = bench or HashBench()
    for setup in bench.setups:
        played = list(bench.actions(seed, setup, num_actions))
        error = _play(bench.driver(setup), played)
        if error is not None:
            return _shortened(bench, setup, played, error)
    return None


def replay(schedule: Schedule, bench: Bench | None = None) -> str | None:
    """Play a schedule on a new runner; return how it fails, or None."""
    bench = bench or HashBench()
    error = _play(bench.driver(schedule.setup), [*schedule.actions, Drain()])
    return None if error is None else _text(error)


def _play_one(
    bench: Bench,
    result: SoakResult,
    setup: Setup,
    seed: int,
    until: float,
    on_progress: Callable[[SoakResult], None],
) -> bool:
    """Play one runner's schedule; return whether there is time for another."""
    driver, played = bench.driver(setup), []
    result.runners += 1
    steps_before = result.steps
    in_time = True
    for action in bench.actions(seed, setup, _ACTIONS_OF_A_RUNNER):
        played.append(action)
        error = _play(driver, [action])
        if error is not None:
            result.failure = _shortened(bench, setup, played, error)
            in_time = False
        result.steps = steps_before + driver.num_steps
        if isinstance(action, Drain):
            result.requests += len(driver.ended)
            driver.ended.clear()
            if result.runners > len(bench.setups):  # each has what it makes once
                result.measure()
            on_progress(result)
            in_time = in_time and time.monotonic() < until
        if not in_time:
            break
    result.events.update(driver.events.counts)
    return in_time


def _play(driver: Driver, played: Sequence[Action]) -> Exception | None:
    try:
        driver.play(played)
    except Exception as error:  # noqa: BLE001 - a runner may fail in any way; it is the finding
        return error
    return None


def _shortened(bench: Bench, setup: Setup, played: Sequence[Action], error: Exception) -> Failure:
    """Return the shortest part of a failing list of actions that fails alike on a new runner."""
    last = error

    def fails(part: Sequence[Action]) -> bool:
        nonlocal last
        found = _play(bench.driver(setup), [*part, Drain()])
        if type(found) is not type(error) or found is None:
            return False
        last = found
        return True

    drains = [index for index, action in enumerate(played[:-1]) if isinstance(action, Drain)]
    start = drains[-1] + 1 if drains else 0
    part = played[start:] if fails(played[start:]) else played
    kept = shrink(part, fails, _MOST_TRIES)
    text = _text(last)
    return Failure(Schedule(model=bench.model, setup=setup, actions=tuple(kept), why=text), text)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
