"""Run cases: passes of two runners over the same batches, then one record for each case.

A case is run in passes, because what is needed to observe a value spoils what is measured:
*forced* (the reference's tokens are committed in both runners, so that every position is compared),
*free* (the candidate commits its own, so that a faulty commit shows), a pass for latency without
observers, and one for memory under its instruments.
"""

import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mrv2.errors import ConfigError, UnsupportedByRunner
from mrv2_diff import floors, interpreter, known_upstream, noise
from mrv2_diff.apart import MODE, run_apart
from mrv2_diff.case import Add, Case, EngineSpec, Event
from mrv2_diff.compare import right
from mrv2_diff.compare.right import RightRows
from mrv2_diff.compare.steps import OF_PROMPTS, compare_step
from mrv2_diff.compare.tally import HIDDEN, Place, Tally
from mrv2_diff.environment import collect
from mrv2_diff.harness import UPSTREAM
from mrv2_diff.judge import (
    Outcome,
    add_ledgers,
    add_step,
    expectations,
    floor_fault,
    judge,
    right_values_of,
)
from mrv2_diff.lockstep import device
from mrv2_diff.lockstep.engine import LockstepEngine
from mrv2_diff.lockstep.schedules import Schedule
from mrv2_diff.lockstep.subjects import Subject
from mrv2_diff.lockstep.worker import AGAIN, HarnessError, Pass, StepReport
from mrv2_diff.measuring import MemoryPasses, measure_latency, sides
from mrv2_diff.models.checkpoint import cached_model
from mrv2_diff.record import Record
from mrv2_diff.reduction_noise import ReductionNoise
from mrv2_diff.referee import ABOVE, Disputes, Referee, rule
from mrv2_diff.small import small_form
from mrv2_diff.verdict import Verdict

OnStep = Callable[[str, int], None]

_NAMES = {"v1": "V1"}
"""What sentences call a reference, where it is not by the name of its pair."""
_NO_NOISE = frozenset({"date", "commit", "mrv2", "seed", "platform", "cores", "noise floor"})
"""Of an environment: what the reference's noise does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Which cases to run, on which pair of runners."""

    cases: tuple[Case, ...]
    pair: tuple[str, str]
    """Reference and candidate. V1 drives the engine; another reference runs beside it."""
    further: tuple[tuple[str, str], ...] = ()
    """Pairs that are compared as well, on the same engines."""
    model: Path | None
    """Checkpoint to run in place of the tiny ones; None: what each case names."""
    graphs: str = "none"
    """One of `GRAPHS` of a case: how steps may reach the device."""
    measures: bool = True
    """Whether passes for latency and memory follow those that compare."""
    small: bool = False
    """Whether cases run in their small form, without measures."""
    referee: bool = False
    """Whether a referee rules on rows of logits on which two runners disagree."""
    layers: bool = False
    """Whether hidden states are compared layer by layer, too; not with graphs."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs."""
        return (self.pair, *self.further)


def run_cases(request: RunRequest, on_step: OnStep | None = None) -> Iterator[Record]:
    """Run each case and yield its record as soon as it is known.

    Args:
        request: What to run. Cases that share an engine run together, otherwise in the given order.
        on_step: Told the case and the number of steps so far, for a progress bar.

    Raises:
        ConfigError: An engine does not start, or there are no such graphs on this device.
    """
    with CaseRunner(request, on_step) as runner:
        for case in runner.ordered(request.cases):
            for pair in request.pairs:
                yield runner.record(case, pair)


class CaseRunner:
    """Runs cases one at a time; those of one engine that follow each other share it.

    Args:
        request: On what to run. Its cases are not looked at.
        on_step: As for `run_cases`.

    Raises:
        ConfigError: There are no such graphs on this device.
    """

    def __init__(self, request: RunRequest, on_step: OnStep | None = None) -> None:
        device.check_graphs(request.graphs)
        if request.layers and request.graphs != "none":
            raise ConfigError(
                "--layers looks into each forward, which a graph replays as a whole; leave out "
                "--graphs, or --layers"
            )
        if interpreter.is_prepared():
            device.settle_interpreter()
        compiled = "off" if os.environ.get("TORCH_COMPILE_DISABLE") == "1" else "on"
        self.kind = device.kind()
        """`cpu` or `cuda`."""
        self._request = request
        self._on_step = on_step or _ignore_step
        self._environment = collect(self.kind, seed=0) | {
            "torch compile": compiled,
            "graphs": request.graphs,
        }
        if interpreter.is_prepared():
            self._environment["triton"] += ", interpreted"
        if request.small:
            self._environment["form"] = "small"
        if request.layers:
            self._environment["layers"] = "compared"
        self._bench: _Bench | None = None
        self._closed_starts = 0

    def __enter__(self) -> "CaseRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine, if there is one; the next case starts another."""
        if self._bench is not None:
            self._closed_starts += self._bench.num_started
            self._bench.close()
            self._bench = None

    @property
    def num_started(self) -> int:
        """Engines started so far."""
        return self._closed_starts + (self._bench.num_started if self._bench is not None else 0)

    def ordered(self, cases: Iterable[Case]) -> list[Case]:
        """Return the cases as they run here: those that run apart, the others by engine."""
        here = [self._here(case) for case in cases]
        together = [case for case in here if case.apart is None]
        specs = dict.fromkeys(case.engine for case in together)
        return [case for case in here if case.apart is not None] + [
            case for spec in specs for case in together if case.engine == spec
        ]

    def record(self, case: Case, pair: tuple[str, str] | None = None) -> Record:
        """Run one case, with the fault that it names put into the candidate, and judge it.

        Args:
            case: The case.
            pair: Reference and candidate; None is the request's first pair.

        Raises:
            ConfigError: An engine does not start.
        """
        case = self._here(case)
        with planted(case.fault):
            if case.apart is not None:
                return _record_apart(case, self._request, self._environment)
            return self._bench_of(case.engine).record(case, pair or self._request.pair)

    def against_itself(self, case: Case, runner: str, schedule: Schedule) -> Record:
        """Compare a runner with itself, one of the two under another schedule, and judge it.

        Args:
            case: A case that runs in lockstep. Its tokens are V1's in both.
            runner: `v1` or `mrv2`.
            schedule: In which form the other one is given each step.

        Raises:
            ConfigError: An engine does not start.
        """
        case = case.on(self.kind)
        with planted(case.fault):
            return self._bench_of(case.engine).against_itself(case, runner, schedule)

    def start(self, case: Case) -> None:
        """Start a case's engine and measure its noise, unless both are there.

        Raises:
            ConfigError: The engine does not start.
        """
        if case.apart is None:
            self._bench_of(case.engine).start()

    def takes(self, case: Case) -> bool:
        """Say whether vLLM takes the requests of a case, which one that was cut may not be."""
        return self._bench_of(case.engine).takes(case)

    def forget_candidates(self) -> None:
        """Let the next case build its candidate anew, on the engine that is there."""
        if self._bench is not None:
            self._bench.forget_candidates()

    def _here(self, case: Case) -> Case:
        """Return a case as it is run on this device, in its small form where that is asked for."""
        case = case.on(self.kind)
        return small_form(case) if self._request.small else case

    def _bench_of(self, spec: EngineSpec) -> "_Bench":
        if self._bench is None or self._bench.spec != spec:
            self.close()
            self._bench = _Bench(spec, self._request, self._on_step, self._environment)
        return self._bench


def planted(fault: str | None) -> AbstractContextManager[object]:
    """Return a context in which the candidate has a fault, by a mutant's name; None has none.

    Raises:
        ConfigError: There is no such mutant.
    """
    if fault is None:
        return nullcontext()
    from mrv2_diff.mutants import MUTANTS  # tests that plant no fault do not import them

    for mutant in MUTANTS:
        if mutant.id == fault:
            return mutant.apply()
    names = ", ".join(mutant.id for mutant in MUTANTS)
    raise ConfigError(f"there is no planted fault {fault!r}; choose from: {names}")


@dataclass(frozen=True, slots=True)
class _Played:
    """How a comparing pass is played."""

    mode: str
    """`forced` or `free`."""
    schedule: str | Schedule
    candidate: str
    reference: str = "v1"
    beside: str | None = None
    """A runner that the candidate is compared with in place of the reference."""

    @property
    def name(self) -> str:
        """What records call it."""
        if self.schedule == "same":
            return self.mode
        varied = "varied" if callable(self.schedule) else self.schedule
        return f"{self.mode}, {varied}"


class _Bench:
    """An engine with its noise floor; made when it is first needed, and again after a crash."""

    def __init__(
        self, spec: EngineSpec, request: RunRequest, on_step: OnStep, environment: dict[str, str]
    ) -> None:
        self.spec = spec
        self._request = request
        self._on_step = on_step
        self._environment = environment
        self._engine: LockstepEngine | None = None
        self._floor: dict[str, float] | None = None
        self._memory: MemoryPasses | None = None
        self._stack = ExitStack()
        self._engine_facts: dict[str, str] = {}
        """What only an engine on this device knows, for the records."""
        self._referee: Referee | None = None
        self.num_started = 0

    def close(self) -> None:
        """Close the engine, if there is one."""
        self._stack.close()
        self._engine = self._memory = None

    def start(self) -> None:
        """Start the engine and measure its noise, unless both are there."""
        self._outcome(self._ready(), "v1")

    def takes(self, case: Case) -> bool:
        """Say whether vLLM takes the requests of a case."""
        return self._ready().takes(case.workload())

    def forget_candidates(self) -> None:
        """Let the next case build its candidate anew."""
        if self._engine is not None:
            self._engine.worker.forget_candidates()

    def record(self, case: Case, pair: tuple[str, str]) -> Record:
        """Run one case on a pair and judge it."""
        if pair[0] != "v1":  # where V1 departs says nothing of this reference
            case = replace(case, departure=None)
        return self._judged(case, pair, partial(self._passes, pair=pair))

    def against_itself(self, case: Case, runner: str, schedule: Schedule) -> Record:
        """Compare a runner with itself over one case, and judge it."""

        def passes(engine: LockstepEngine, case: Case) -> Outcome:
            outcome = self._outcome(engine, runner)
            self._compare(
                engine,
                case,
                outcome,
                case.workload(),
                _Played(
                    "forced", schedule, runner, beside=None if runner == "v1" else runner + AGAIN
                ),
            )
            return outcome

        return self._judged(case, (runner, runner), passes)

    def _judged(
        self,
        case: Case,
        pair: tuple[str, str],
        passes: Callable[[LockstepEngine, Case], Outcome],
    ) -> Record:
        engine = self._ready()
        try:
            outcome = passes(engine, case)
        except HarnessError:
            raise
        except UnsupportedByRunner as refusal:
            outcome = Outcome(Tally(None))
            return self._record(case, pair, outcome, Verdict.REFUSED, "; ".join(refusal.reasons))
        except Exception:  # noqa: BLE001 - a runner may fail in any way; the failure is the result
            self.close()
            outcome = Outcome(Tally(None), crash=traceback.format_exc(limit=-6))
            summary = "the reference or its engine failed, where no case expects it"
            return self._record(case, pair, outcome, Verdict.INCONCLUSIVE, summary)
        verdict, summary = judge(case, outcome)
        if pair[1] == UPSTREAM:
            verdict, summary = known_upstream.judged(case.id, outcome, verdict, summary)
        return self._record(case, pair, outcome, verdict, summary)

    def _ready(self) -> LockstepEngine:
        if self._engine is None:
            model = self._request.model or cached_model(self.spec.model)
            try:
                self.num_started += 1
                self._engine = LockstepEngine(self.spec, model, self._request.graphs)
            except Exception as error:
                raise ConfigError(
                    f"vLLM does not start on {model.name}: {error}; "
                    "the folder must hold a model that V1 serves on this machine"
                ) from error
            self._stack.callback(self._engine.close)
            if device.kind() == "cuda":
                attention = self._engine.worker.reference.attention()
                self._engine_facts |= {
                    "attention": ", ".join(attention),
                    "arithmetic": self._engine.arithmetic,
                }
        return self._engine

    def _outcome(self, engine: LockstepEngine, reference: str) -> Outcome:
        """Return an empty outcome, with the bounds that this engine's noise sets."""
        if self._floor is None:
            self._floor = self._known_floor(engine)
        bounds = {value: noise.MARGIN * floor for value, floor in self._floor.items()}
        bounds[right.VALUE] = right.BOUND
        return Outcome(
            Tally(bounds),
            inconclusive=floor_fault(self._floor, engine.arithmetic),
            graphs=self._request.graphs,
            reference=_NAMES.get(reference, reference),
        )

    def _passes(self, engine: LockstepEngine, case: Case, pair: tuple[str, str]) -> Outcome:
        outcome = self._outcome(engine, pair[0])
        events, (reference, candidate) = case.workload(), pair
        logits = outcome.tally.bounds["logits"] if outcome.tally.bounds else 0.0
        disputes = Disputes(logits) if self._request.referee else None
        for mode, schedule in _modes(case, pair):
            played = _Played(mode, schedule, candidate, reference)
            self._compare(engine, case, outcome, events, played, disputes)
            if outcome.crash is not None or outcome.tally.first is not None:
                self._ask_referee(engine, outcome, disputes)
                return outcome
        if self._request.measures and not self._request.small and pair[0] == "v1":
            self._measure(engine, case, candidate, outcome)
        return outcome

    def _known_floor(self, engine: LockstepEngine) -> dict[str, float]:
        """Return the floor of this engine, kept from another run or measured now."""
        few = noise.FEW_REQUESTS if self._request.small else noise.NUM_REQUESTS
        model = self._request.model or cached_model(self.spec.model)
        known = floors.floor_of(
            {name: value for name, value in self._environment.items() if name not in _NO_NOISE}
            | {name: value for name, value in self._engine_facts.items() if name not in _NO_NOISE}
            | {
                "arithmetic": engine.arithmetic,
                "dtype": engine.dtype,
                "engine": repr(self.spec),
                "measured by": floors.measuring_hash(),
                "model hash": floors.model_hash(model),
                "probe": repr(noise.probe(few)),
                "threads": str(torch.get_num_threads()),
            },
            lambda: measure_floor(engine, few, layers=self._request.layers),
            floors.floors_folder(),
        )
        self._engine_facts["noise floor"] = known.origin
        return known.spacings

    def _ask_referee(
        self, engine: LockstepEngine, outcome: Outcome, disputes: Disputes | None
    ) -> None:
        """Let the referee rule on the rows in dispute, if there are any."""
        if disputes is None or not disputes.rows or engine.dtype not in ABOVE:
            return
        assert self._floor is not None
        if self._referee is None:
            model = self._request.model or cached_model(self.spec.model)
            self._referee = Referee(model, engine.dtype)
        referee = self._referee
        outcome.ruling = rule(
            disputes, referee.logits, referee.rounded, referee.dtype, self._floor["logits"]
        )

    def _measure(
        self, engine: LockstepEngine, case: Case, candidate: str, outcome: Outcome
    ) -> None:
        """Take time, then memory; both end where the candidate fails."""
        measure_latency(engine, case, candidate, outcome)
        outcome.crash = engine.worker.crash
        if outcome.crash is not None:
            return
        if self._memory is None or self._memory.engine is not engine:
            self._memory = MemoryPasses(engine, candidate)
        self._memory.measure(case, outcome)
        outcome.crash = engine.worker.crash

    def _compare(
        self,
        engine: LockstepEngine,
        case: Case,
        outcome: Outcome,
        events: tuple[Event, ...],
        played: "_Played",
        disputes: Disputes | None = None,
    ) -> None:
        place = Place(played.name, 0)
        candidate = played.candidate
        expected = expectations(events, case.engine.logprobs_mode)
        outcome.modes.append(place.mode)
        outcome.tally.stopped = False
        first = len(outcome.modes) == 1
        values = right_values_of(case, outcome.effects)
        if values is not None:
            values.markers = engine.markers
            values.spares_weightless = candidate == "mrv2"

        def listen(report: StepReport) -> None:
            place.step = report.number
            self._on_step(case.id, outcome.steps)
            outcome.steps += 1
            if first:
                _count_events(outcome.events, report)
            if values is not None:
                _announce(values, report)
            if disputes is not None:
                _dispute(disputes, place, report)
            if report.candidate_ran:
                reference = report.reference if played.beside is None else report.beside
                add_step(outcome, place, expected, reference, report.candidate, values)
                add_ledgers(outcome, place, report.ledgers)
            if values is not None and report.driver is not None:
                values.commit(report.driver)

        settings = Pass(
            candidate=candidate,
            reference=played.reference,
            forced=played.mode == "forced",
            schedule=played.schedule,
            beside=played.beside,
            listener=listen,
            layers=self._request.layers,
        )
        engine.run(events, settings)
        _count_modes(outcome, engine, played)
        if first:
            outcome.events["aborts"] = engine.num_aborted
        if engine.worker.refusal is not None:
            raise engine.worker.refusal
        outcome.crash = engine.worker.crash

    def _record(
        self,
        case: Case,
        pair: tuple[str, str],
        outcome: Outcome,
        verdict: Verdict,
        summary: str,
    ) -> Record:
        return Record(
            id=case.id,
            area=case.area,
            feature=case.feature,
            pair=pair,
            verdict=verdict,
            summary=_with_remark(summary, case),
            modes=tuple(outcome.modes),
            steps=outcome.steps,
            request_steps=outcome.request_steps,
            events=outcome.events,
            agreements={value: total.agreement() for value, total in outcome.tally.totals.items()},
            noise_floor=self._floor or {},
            memory=outcome.memory,
            latency=outcome.latency,
            costs=tuple(outcome.costs),
            steps_by_mode=outcome.steps_by_mode,
            logit_diffs=outcome.logit_diffs,
            first_divergence=outcome.tally.first,
            error=outcome.crash,
            command=_command(case, pair, self._request),
            environment=self._environment | self._engine_facts,
        )


def _command(case: Case, pair: tuple[str, str], request: RunRequest) -> str:
    which = ["--case", case.id] if case.file is None else ["--case-file", case.file]
    parts = ["mrv2-diff", "run", *which, "--pair", ",".join(pair)]
    if request.small and "vllm-v2" not in pair:
        parts.append("--small")
    if request.referee:
        parts.append("--referee")
    if request.layers:
        parts.append("--layers")
    if request.model is not None:
        parts += ["--model", request.model.name]
    if request.graphs != "none":
        parts += ["--graphs", request.graphs]
    return shlex.join(parts)


def _with_remark(summary: str, case: Case) -> str:
    remarks = [case.remark] if case.remark else []
    if case.fault is not None:
        remarks.append(f"with the planted fault {case.fault}")
    return "; ".join([summary, *remarks])


def _record_apart(case: Case, request: RunRequest, environment: dict[str, str]) -> Record:
    model = request.model or cached_model(case.engine.model)
    referee = Referee(model, case.engine.dtype) if request.referee else None
    found = run_apart(case, model, device.kind(), request.graphs, referee)
    return Record(
        id=case.id,
        area=case.area,
        feature=case.feature,
        pair=request.pair,
        verdict=found.verdict,
        summary=_with_remark(found.summary, case),
        modes=(MODE,),
        steps=found.steps,
        request_steps=found.tokens.compared,
        events=found.events,
        agreements={"tokens": found.tokens},
        noise_floor={},
        memory={},
        latency={},
        first_divergence=found.first,
        error=found.error,
        command=_command(case, request.pair, request),
        environment=environment,
    )


def measure_floor(
    engine: LockstepEngine, num_requests: int = noise.NUM_REQUESTS, *, layers: bool = False
) -> dict[str, float]:
    """Return the reference's largest difference from itself, in spacings, by kind of value.

    Where runners have kernels of their own on this device, that of V1's normalizer over the
    vocabulary counts, too.

    Raises:
        RuntimeError: The reference fails beside itself, or is given other inputs.
    """
    events = noise.probe(num_requests)
    expected = expectations(events, engine.logprobs_mode)
    tally = Tally(None)
    sums = ReductionNoise(engine.worker.reference.logprobs_of, engine.vocab_size)
    with_sums = interpreter.is_prepared() and not engine.logprobs_mode.endswith("logits")

    def listen(report: StepReport) -> None:
        if report.reference is not None and report.candidate is not None:
            place = Place("forced", report.number)
            compare_step(tally, place, expected, report.reference, report.candidate)
            if with_sums:
                sums.add(report.reference.logits)

    for schedule in noise.FLOOR_SCHEDULES:
        settings = Pass(
            candidate="v1", forced=True, schedule=schedule, listener=listen, layers=layers
        )
        engine.run(events, settings)
        if engine.worker.crash is not None:
            raise RuntimeError(f"the reference failed beside itself:\n{engine.worker.crash}")
    if tally.first is not None:
        raise RuntimeError(f"the reference differs from itself beyond rounding: {tally.first}")
    floats = [value for value in tally.totals if value.startswith(f"{HIDDEN}.")]
    floats += ["logits", "processed_logits", "logprobs"]
    floor = {value: tally.totals[value].required for value in floats}
    floor[OF_PROMPTS] = floor["logprobs"]
    for value, spacings in sums.spacings.items():
        floor[value] = max(floor[value], spacings)
    return floor


def _modes(case: Case, pair: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the comparing passes of a case: mode and schedule.

    A runner is also compared with itself under other schedules.
    """
    modes = [("forced", "same")]
    if case.deterministic:
        modes.append(("free", "same"))
    if pair[0] == pair[1]:
        # V1 on a CPU fails on a seeded request whose prompt is cut into chunks.
        seeded = device.kind() == "cpu" and any(
            isinstance(event, Add) and event.seed is not None for event in case.workload()
        )
        modes.extend(
            ("forced", schedule)
            for schedule in noise.SCHEDULES
            if not (seeded and schedule == "other chunks")
        )
    return modes


def _announce(values: RightRows, report: StepReport) -> None:
    """Begin the requests that are new in a step; one that is resumed goes on."""
    for request in report.scheduler_output.scheduled_new_reqs:
        params = request.sampling_params
        values.arrive(request.req_id, request.prompt_token_ids, params.all_stop_token_ids)


def _dispute(disputes: Disputes, place: Place, report: StepReport) -> None:
    """Note what a step leaves in dispute, then go on with its tokens, which V1 drew."""
    for request in report.scheduler_output.scheduled_new_reqs:
        disputes.arrive(request.req_id, request.prompt_token_ids)
    if place.mode == "forced" and report.reference is not None and report.candidate is not None:
        disputes.note(place, report.reference, report.candidate)
    if report.driver is not None:
        disputes.commit(report.driver)


def _count_events(events: dict[str, int], report: StepReport) -> None:
    step = report.scheduler_output
    drawn = len(report.reference.draw_ids) if report.reference is not None else 0
    counts = {
        "arrivals": len(step.scheduled_new_reqs),
        "finishes": len(step.finished_req_ids),
        "preemptions": len(step.preempted_req_ids or ()),
        "resumes": len(step.scheduled_cached_reqs.resumed_req_ids),
        "chunks": len(step.num_scheduled_tokens) - drawn,
        "cache_hits": sum(request.num_computed_tokens > 0 for request in step.scheduled_new_reqs),
        "empty_steps": int(not step.num_scheduled_tokens),
    }
    for kind, count in counts.items():
        events[kind] = events.get(kind, 0) + count


def _count_modes(outcome: Outcome, engine: LockstepEngine, played: _Played) -> None:
    """Add how the steps of a pass that has just ended reached the device, on both sides of it."""
    worker, reference = engine.worker, played.beside or played.reference
    is_driver = reference == "v1"
    subjects: dict[str, Subject] = {"reference": worker.reference} if is_driver else {}
    if worker.crash is None:
        subjects["candidate"] = worker.candidate(played.candidate)
        if not is_driver:
            subjects["reference"] = worker.candidate(reference)
    names = sides(played.candidate, reference)
    for side, subject in subjects.items():
        modes = subject.steps_by_mode()
        if modes or outcome.graphs != "none":
            counted = outcome.steps_by_mode.setdefault(names[side], {})
            for mode, count in modes.items():
                counted[mode] = counted.get(mode, 0) + count


def _ignore_step(case_id: str, step: int) -> None:
    """Report progress to nobody."""
