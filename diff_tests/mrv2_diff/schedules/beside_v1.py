"""The same random schedules with a tiny checkpoint, V1's runner and ours side by side.

Only arrivals, aborts and steps have a meaning for a whole engine. Another action gives up the
request that arrived last, so that many are.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from msgspec.structs import replace

from mrv2_diff.case import Abort, Add, Case, EngineSpec, Event
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.record import Record
from mrv2_diff.report.summary import verdict_text
from mrv2_diff.run import RunRequest, run_cases
from mrv2_diff.schedules import actions as act
from mrv2_diff.schedules.generator import actions
from mrv2_diff.schedules.result import Failure, SoakResult
from mrv2_diff.schedules.shrinking import shrink
from mrv2_diff.verdict import Verdict

SETUP = act.Setup(
    num_blocks=8,
    block_size=32,
    max_num_reqs=6,
    max_num_tokens=24,
    max_model_len=128,
    vocab_size=250,
)
"""Few blocks: a request takes two or three, so some are preempted."""

_OUTPUTS = 2
"""Tokens that a request draws for each that the action says: blocks are larger here."""
_ACTIONS_OF_A_WORKLOAD = 100
_MOST_WORKLOADS = 100_000
_MOST_TRIES = 60


class Bench:
    """An engine with both runners, that takes one workload after the other.

    Args:
        setup: Of the engine.
    """

    def __init__(self, setup: act.Setup) -> None:
        self._events: tuple[Event, ...] = ()
        case = Case(
            id="soak.random",
            area="soak",
            feature="random schedules",
            title="a random schedule",
            engine=_spec(setup),
            workload=lambda: self._events,
        )
        request = RunRequest(cases=(case,) * _MOST_WORKLOADS, pair=("v1", "mrv2"), model=None,
                             measures=False)  # fmt: skip
        self._records: Iterator[Record] = run_cases(request)

    def run(self, events: tuple[Event, ...]) -> Record:
        """Run a workload in both runners and judge it."""
        self._events = events
        return next(self._records)


def soak(
    seconds: float, seed: int, on_progress: Callable[[SoakResult], None] = lambda result: None
) -> SoakResult:
    """Compare random workloads until the time is over or one is not alike in both runners.

    Args:
        seconds: Time to spend; the workload that is compared then still ends.
        seed: Of the schedules.
        on_progress: Told after each workload how far it got.
    """
    bench = Bench(SETUP)
    result, began = SoakResult(model="lockstep", runners=1), time.monotonic()
    gc.collect()
    gc.freeze()  # vLLM's and torch's own objects; else every look at ours costs a workload's time
    for number in count():
        played = list(actions(seed + number, SETUP, _ACTIONS_OF_A_WORKLOAD))
        events = workload(played)
        record = bench.run(events)
        result.requests += sum(isinstance(event, Add) for event in events)
        result.steps += record.steps
        result.events.update(record.events)
        result.measure()
        on_progress(result)
        if not record.verdict.passes:
            result.failure = _shortened(bench, played, record.verdict)
        if result.failure is not None or time.monotonic() - began >= seconds:
            break
    gc.unfreeze()
    result.seconds = time.monotonic() - began
    return result


def replay(schedule: act.Schedule) -> str | None:
    """Compare a schedule on a new engine; return what is not alike, or None."""
    record = Bench(schedule.setup).run(workload(schedule.actions))
    return None if record.verdict.passes else _text(record)


def workload(actions: Iterable[act.Action]) -> tuple[Event, ...]:
    """Return the events of a schedule: every arrival is a request with an id of its own."""
    events: list[Event] = []
    newest: dict[str, str] = {}
    step = 0
    for number, action in enumerate(actions):
        if isinstance(action, act.Step):
            step += 1
        elif isinstance(action, act.Arrive):
            # A prefix must fill a block to be cached.
            whole = replace(action, prefix_len=act.PREFIX_LEN) if action.prefix_len else action
            newest.pop(action.name, None)
            newest[action.name] = f"{action.name}.{number}"
            events.append(
                Add(
                    step=step,
                    req_id=newest[action.name],
                    prompt=tuple(whole.prompt(SETUP.vocab_size)),
                    max_tokens=_OUTPUTS * action.max_tokens,
                    logprobs=action.priority or None,
                )
            )
        elif isinstance(action, act.Abort) and action.name in newest:
            events.append(Abort(step=step, req_id=newest.pop(action.name)))
        elif isinstance(action, act.Reset | act.FailLoad) and newest:
            events.append(Abort(step=step, req_id=newest.popitem()[1]))
    return tuple(events)


def _shortened(bench: Bench, played: Sequence[act.Action], verdict: Verdict) -> Failure:
    """Return the shortest part of a failing list of actions that gets the same verdict."""

    def fails(part: Sequence[act.Action]) -> bool:
        events = workload(part)
        return bool(events) and bench.run(events).verdict == verdict

    kept = shrink(played, fails, _MOST_TRIES)
    text = _text(bench.run(workload(kept)))
    return Failure(act.Schedule(model="lockstep", setup=SETUP, actions=tuple(kept), why=text), text)


def _text(record: Record) -> str:
    return f"{verdict_text(record.verdict)}: {record.summary}"


def _spec(setup: act.Setup) -> EngineSpec:
    return EngineSpec(
        model=ModelSpec(),
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_reqs,
        max_num_batched_tokens=setup.max_num_tokens,
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        prefix_caching=setup.prefix_caching,
    )
