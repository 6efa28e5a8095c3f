"""Passes of both runners that measure: time by turns, memory under its instruments.

Nothing is observed in them, since what is needed to observe a value spoils what is measured.
"""

import gc
from dataclasses import dataclass, field, replace
from functools import partial

from mrv2_diff import instruments
from mrv2_diff.allocations import AllocationWatch
from mrv2_diff.budgets import StepTimes, Times, judge_memory, judge_time
from mrv2_diff.case import Case, Event
from mrv2_diff.judge import Outcome, expectations
from mrv2_diff.lockstep.engine import LockstepEngine
from mrv2_diff.lockstep.worker import Pass, StepReport
from mrv2_diff.record import Cost, PhasePeak
from mrv2_diff.verdict import Verdict

_WARMUP_STEPS = 3
"""Steps of a latency pass that do not count."""
_ROUNDS = 16
"""Rounds of steps after which a latency pass is not repeated."""
_MAX_LATENCY_PASSES = 12
_MEASURED_WINDOWS = 6
"""Most windows of steps in a memory pass that carry instruments, spread over the pass."""


def measure_latency(engine: LockstepEngine, case: Case, candidate: str, outcome: Outcome) -> None:
    """Time steps of both runners by turns, over as many passes as a verdict needs.

    With a grammar, whose mask comes with a step's second half, the reference goes first throughout.
    """
    times, named = StepTimes(), sides(candidate)
    on_cuda = engine.worker.device.type == "cuda"
    events = case.workload()
    by_turns = not expectations(events).structured
    while True:
        meter = instruments.DeviceMeter(instruments.CudaTimer()) if on_cuda else None
        times.passes.append(_timed_pass(engine, events, candidate, meter, by_turns=by_turns))
        if engine.worker.crash is not None:
            return
        done = len(times.rounds("host"))
        if done >= _ROUNDS or len(times.passes) >= _MAX_LATENCY_PASSES:
            break
    rows = [by for steps in times.passes for by in steps.values()]
    if not rows:
        return
    for place, side in enumerate(named):
        device_seconds = [sum(by["device"][place]) for by in rows if "device" in by]
        outcome.latency[named[side]] = instruments.latency(
            [by["host"][place][0] for by in rows],
            [by["host"][place][1] for by in rows],
            device_seconds,
        )
    for kind in ("host", "device") if on_cuda else ("host",):
        outcome.costs.append(
            judge_time(f"{kind} time", times, kind, case.budget, by_turns=by_turns)
        )


def _timed_pass(
    engine: LockstepEngine,
    events: tuple[Event, ...],
    candidate: str,
    meter: instruments.DeviceMeter | None,
    *,
    by_turns: bool,
) -> Times:
    """Return what both runners took for each step that both ran in two parts."""
    found: Times = {}

    def listen(report: StepReport) -> None:
        host = [report.seconds.get(side, []) for side in ("reference", "candidate")]
        if report.number >= _WARMUP_STEPS and all(len(parts) == 2 for parts in host):
            found[report.number] = {"host": (host[0], host[1])}

    settings = Pass(
        candidate=candidate,
        forced=False,
        observe=False,
        alternate=by_turns,
        wrap=meter,
        listener=listen,
    )
    engine.run(events, settings)
    if meter is not None and engine.worker.crash is None:
        for step, by in found.items():
            by["device"] = meter.seconds("reference", step), meter.seconds("candidate", step)
    return found


Peaks = dict[str, dict[str, PhasePeak]]
"""By side and phase."""


@dataclass(slots=True)
class MemoryPasses:
    """Takes both runners' peaks: once for each engine as they start, and in each case's steps."""

    engine: LockstepEngine
    candidate: str
    _starts: dict[bool, Peaks] = field(default_factory=dict)
    """With and without stacks."""
    _no_start: str | None = None
    """Why there are no peaks of it."""

    def measure(self, case: Case, outcome: Outcome) -> None:
        """Set peaks in windows of steps beside each other, with those of the start.

        Where the candidate is over its budget, that is done again with the functions told.

        Args:
            case: What is run.
            outcome: Receives the figures and the verdict.
        """
        cost = self._measured(case, outcome, stacks=False)
        if cost is not None and cost.verdict is Verdict.OVER_BUDGET:
            cost = self._measured(case, outcome, stacks=True)
        if cost is not None:
            outcome.costs.append(cost)

    def _measured(self, case: Case, outcome: Outcome, *, stacks: bool) -> Cost | None:
        engine, worker = self.engine, self.engine.worker
        start = self._start_peaks(stacks)
        steps_a_pass = outcome.steps // max(len(outcome.modes), 1)
        windows = -(-steps_a_pass // instruments.WINDOW_STEPS)
        every = max(1, -(-windows // _MEASURED_WINDOWS))
        meter = instruments.MemoryMeter(every=every, device=worker.device, stacks=stacks)
        settings = Pass(
            candidate=self.candidate,
            forced=False,
            observe=False,
            wrap=meter,
            listener=lambda report: None,
        )
        with meter:
            engine.run(case.workload(), settings)
        if worker.crash is not None:
            return None
        subjects = {"reference": worker.reference, "candidate": worker.candidate(self.candidate)}
        named = sides(self.candidate)
        for side, name in named.items():
            held = instruments.held_bytes(subjects[side].runner, subjects[side].kv_tensors())
            outcome.memory[name] = meter.memory(side, held, start.get(side))
        theirs, ours = (outcome.memory[named[side]] for side in ("reference", "candidate"))
        cost = judge_memory(theirs, ours, case.budget)
        if self._no_start is not None:
            cost = replace(cost, summary=f"{cost.summary}; {self._no_start}")
        return cost

    def _start_peaks(self, stacks: bool) -> Peaks:
        if stacks not in self._starts:
            try:
                self._starts[stacks] = measure_start(self.engine, self.candidate, stacks=stacks)
            except Exception as error:  # noqa: BLE001 - both have started: they may lack the room
                self._starts[stacks] = {}
                kind = type(error).__name__
                self._no_start = f"the start was not measured ({kind}: {str(error)[:200]})"
        return self._starts[stacks]


def measure_start(engine: LockstepEngine, candidate: str, *, stacks: bool) -> Peaks:
    """Return the peaks of each phase of starting: of two runners that are started for it alone.

    Whatever they raise, such as that there is no room for them beside those that run, is raised.
    """
    watch = AllocationWatch(engine.worker.device, stacks)
    engine.worker.end()
    _start(engine, watch, "reference", "v1")
    _start(engine, watch, "candidate", candidate)
    found: Peaks = {}
    for (side, phase), peak in watch.peaks.items():
        found.setdefault(side, {})[phase] = peak
    return found


def _start(engine: LockstepEngine, watch: AllocationWatch, side: str, name: str) -> None:
    watch.open()
    try:
        engine.worker.start_another(name, partial(watch.call, side))
    finally:
        watch.close()
        gc.collect()


def sides(candidate: str, reference: str = "v1") -> dict[str, str]:
    """Return the names of both runners in a record, by side."""
    name = candidate if candidate != reference else f"{reference} again"
    return {"reference": reference, "candidate": name}
