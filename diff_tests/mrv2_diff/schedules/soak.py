"""Random schedules until the time is over: what happened, and whether memory stayed flat."""

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from mrv2_diff.schedules.actions import Action, Drain, Schedule, Setup
from mrv2_diff.schedules.driver import Driver
from mrv2_diff.schedules.events import KINDS
from mrv2_diff.schedules.generator import SETUPS, actions
from mrv2_diff.schedules.shrinking import shrink

_ACTIONS_OF_A_RUNNER = 4000
"""Actions after which a runner is replaced by one of the next setup."""
_MOST_TRIES = 300
"""Schedules that are tried to make a failing one short."""

MAX_GROWTH_BYTES = 16 << 20
"""Resident memory that the last tenth of a soak may have above its first tenth."""
MAX_GROWTH_OBJECTS = 0.02
"""Share of Python objects that it may have more."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that a request noticed, or that a runner failed on."""

    schedule: Schedule
    error: str


@dataclass(slots=True)
class SoakResult:
    """What a soak did."""

    seconds: float = 0.0
    steps: int = 0
    runners: int = 0
    requests: int = 0
    events: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KINDS, 0)))
    failure: Failure | None = None
    resident_bytes: list[int] = field(default_factory=list)
    """Whenever every request had ended."""
    objects: list[int] = field(default_factory=list)
    """Python objects at the same times."""

    @property
    def is_flat(self) -> bool:
        """Whether memory in the last tenth is what it was in the first."""
        if len(self.objects) < 2:
            return True
        first_bytes, last_bytes = ends(self.resident_bytes)
        first_objects, last_objects = ends(self.objects)
        return last_bytes - first_bytes <= MAX_GROWTH_BYTES and last_objects <= first_objects * (
            1 + MAX_GROWTH_OBJECTS
        )

    @property
    def passes(self) -> bool:
        """Whether no request noticed anything and memory stayed flat."""
        return self.failure is None and self.is_flat


def ends(values: Sequence[int]) -> tuple[float, float]:
    """Return the medians of the first and of the last tenth of some values."""
    tenth = max(1, len(values) // 10)
    return statistics.median(values[:tenth]), statistics.median(values[-tenth:])


def soak(
    seconds: float, seed: int, on_progress: Callable[[SoakResult], None] = lambda result: None
) -> SoakResult:
    """Play random schedules until the time is over or one fails.

    Args:
        seconds: Time to spend; the requests that are live then still end.
        seed: Of the schedules.
        on_progress: Told now and then how far it got.
    """
    result, began = SoakResult(), time.monotonic()
    for number in count():
        setup = SETUPS[number % len(SETUPS)]
        if not _play_one(result, setup, seed + number, began + seconds, on_progress):
            break
    result.seconds = time.monotonic() - began
    return result


def find_failure(seed: int, num_actions: int) -> Failure | None:
    """Play so many actions on every setup; return the first failure, made short."""
    for setup in SETUPS:
        played = list(actions(seed, setup, num_actions))
        error = _play(Driver(setup), played)
        if error is not None:
            return _shortened(setup, played, error)
    return None


def replay(schedule: Schedule) -> str | None:
    """Play a schedule on a new runner; return how it fails, or None."""
    error = _play(Driver(schedule.setup), [*schedule.actions, Drain()])
    return None if error is None else _text(error)


def _play_one(
    result: SoakResult,
    setup: Setup,
    seed: int,
    until: float,
    on_progress: Callable[[SoakResult], None],
) -> bool:
    """Play one runner's schedule; return whether there is time for another."""
    driver, played = Driver(setup), []
    result.runners += 1
    steps_before = result.steps
    in_time = True
    for action in actions(seed, setup, _ACTIONS_OF_A_RUNNER):
        played.append(action)
        error = _play(driver, [action])
        if error is not None:
            result.failure = _shortened(setup, played, error)
            in_time = False
        if isinstance(action, Drain):
            result.steps = steps_before + driver.num_steps
            result.requests += len(driver.ended)
            driver.ended.clear()
            _measure(result)
            on_progress(result)
            in_time = in_time and time.monotonic() < until
        if not in_time:
            break
    result.steps = steps_before + driver.num_steps
    result.events.update(driver.events.counts)
    return in_time


def _play(driver: Driver, played: Sequence[Action]) -> Exception | None:
    try:
        driver.play(played)
    except Exception as error:  # noqa: BLE001 - a runner may fail in any way; it is the finding
        return error
    return None


def _shortened(setup: Setup, played: Sequence[Action], error: Exception) -> Failure:
    """Return the shortest part of a failing list of actions that fails alike on a new runner."""
    last = error

    def fails(part: Sequence[Action]) -> bool:
        nonlocal last
        found = _play(Driver(setup), [*part, Drain()])
        if type(found) is not type(error) or found is None:
            return False
        last = found
        return True

    drains = [index for index, action in enumerate(played[:-1]) if isinstance(action, Drain)]
    start = drains[-1] + 1 if drains else 0
    part = played[start:] if fails(played[start:]) else played
    kept = shrink(part, fails, _MOST_TRIES)
    text = _text(last)
    return Failure(Schedule(setup=setup, actions=tuple(kept), why=text), text)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _measure(result: SoakResult) -> None:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    result.resident_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    result.objects.append(len(gc.get_objects()))
