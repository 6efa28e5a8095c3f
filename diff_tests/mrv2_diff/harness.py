"""What the command line asks of the harness, as values that a test can replace.

The installed harness imports torch and vLLM when it runs cases, and not before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mrv2_diff import process
from mrv2_diff.case import Case
from mrv2_diff.record import Record
from mrv2_diff.schedules.actions import Model, Schedule
from mrv2_diff.schedules.result import InvarianceResult, SoakResult

if TYPE_CHECKING:
    from mrv2_diff.device_bench.bench import Outcome
    from mrv2_diff.device_bench.options import Options
    from mrv2_diff.schedules.soak import Bench
    from mrv2_diff.selftest.request import SelfTestRequest
    from mrv2_diff.selftest.result import SelfTest
    from mrv2_diff.shrinking.request import Result, Say, ShrinkRequest

OnStep = Callable[[str, int], None]

PAIRS: tuple[tuple[str, str], ...] = (
    ("v1", "mrv2"),
    ("v1", "v1"),
    ("v1", "vllm-v2"),
    ("mrv2", "vllm-v2"),
)
"""Reference and candidate of every pair that can be run."""

RUNNERS = ("v1", "mrv2", "vllm-v2")
"""Every runner, by the name of a pair."""
UPSTREAM = "vllm-v2"
"""vLLM's own second runner, which needs small cases and a process of its own."""
TRACED_RUNNERS = ("mrv2", "v1")
"""In which a trace can be recorded and replayed."""

OnProgress = Callable[[SoakResult], None]

MAX_BENCH_REQUESTS = 1024
"""More would measure the tiny model's memory, not a runner."""
MAX_BENCH_STEPS = 200
"""A request's prompt, its first steps (not measured) and these fit into the model's length."""
MAX_HOST_COST_STEPS = 1000
"""A request of the host-cost measurement is as long as its prompt and these."""
MAX_GROWTH = 1.3
"""Bound on a steady step's bookkeeping at 1,024 requests over that at 64."""
MAX_TRANSLATED_GROWTH = 2.0
"""The same with the translation, which goes through five of the scheduler's lists in each step, to
see that nothing else changed: 20 us of 60 at 1,024 requests on an AMD EPYC core."""
MAX_INVARIANCE_REQUESTS = 1000
MAX_RATIO = 0.6
"""Bound on our bookkeeping over V1's, at 64 decoding requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cases to run, against which pair, on which model."""

    cases: tuple[Case, ...]
    pair: tuple[str, str]
    model: Path | None
    """None: the model that each case names, made from its seed."""
    graphs: str = "none"
    """One of `GRAPHS` of a case: how steps may reach the device."""
    further: tuple[tuple[str, str], ...] = ()
    """Pairs that are compared as well."""
    small: bool = False
    """Whether cases run in their small form."""
    referee: bool = False
    """Whether a referee rules on rows of logits on which two runners disagree."""
    layers: bool = False
    """Whether hidden states are compared layer by layer, too."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs, in their order."""
        return (self.pair, *self.further)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Host times of both runners in one run."""

    table: str
    """For people."""
    ratio: float
    """Bookkeeping of ours over that of V1."""
    figures: Mapping[str, object]
    """What a file keeps: medians by runner and phase, and what they were measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCostResult:
    """Host times of the core and its adapter by batch size."""

    table: str
    """For people."""
    growth: float
    """Bookkeeping of a steady step of the largest batch over that of 64 requests."""
    translated_growth: float
    """The same with the translation of what vLLM's scheduler says."""
    picture: str
    """The curves, as SVG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """How long to play random schedules, and on what."""

    seconds: float
    model: Model
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A program whose engine is recorded."""

    out: Path
    program: tuple[str, ...]
    runner: str | None
    """MRV2_RUNNER of the program; None leaves it as it is."""
    private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOutcome:
    """What a recorded program left."""

    text: str
    is_whole: bool
    exit_code: int
    """Of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """A trace to play in one runner."""

    trace: Path
    runner: str = "mrv2"
    forced: bool = True
    """Commit the recorded tokens, so that each step is as it was, whatever came before."""
    against: str | None = None
    """Another runner to compare with, in place of the recorded tokens."""
    model: Path | None = None
    """None: the tiny checkpoint whose spec was recorded."""
    salvage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """How a replay of a trace came out."""

    text: str
    """For people; the last line has the verdict."""
    passes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """The collaborators of the command line."""

    cases: Callable[[], Mapping[str, Case]]
    run: Callable[[Selection, OnStep], Iterator[Record]]
    environment: Callable[[], Mapping[str, str]]
    """Returns what a record made now would be measured on."""
    device: Callable[[], str]
    """Returns `cpu` or `cuda`, where cases would run now."""
    bench: Callable[[int, int], BenchResult]
    """Measures so many decoding requests, over so many steps."""
    bench_apart: "Callable[[Options, Callable[[str], None]], Outcome]"
    """Measures engines side by side, each runner in its own process, and says how it goes."""
    surface: Callable[[], Mapping[str, Sequence[str]]]
    """Returns each name that vLLM touches on a runner and we do not know, with the places.

    Raises ModuleNotFoundError where vLLM is not installed.
    """
    soak: Callable[[Soak, OnProgress], SoakResult]
    """Plays random schedules, and tells now and then how far it got."""
    replay: Callable[[Schedule], str | None]
    """Plays one schedule; returns how it fails, or None."""
    record: Callable[[Recording], RecordingOutcome]
    """Runs a program with its engine recorded. Raises ValueError where recording cannot act."""
    replay_trace: Callable[[TraceReplay], ReplayOutcome]
    """Plays a trace. Raises ValueError where the file or the machine does not allow it."""
    invariance: Callable[[int], InvarianceResult]
    """Schedules so many requests in many ways."""
    host_cost: Callable[[int], HostCostResult]
    """Measures the core by batch size, over so many steps of each."""
    faults: Callable[[], Mapping[str, str]]
    """Returns the case of each fault that can be planted, by the fault's name."""
    shrink: "Callable[[ShrinkRequest, Say], Iterator[Result]]"
    """Makes failing cases short, and says how it goes."""
    fault_kinds: Callable[[], Mapping[str, Sequence[str]]]
    """Returns the faults that `selftest` can plant, by kind."""
    selftest: "Callable[[SelfTestRequest, Callable[[str], None]], SelfTest]"
    """Plants faults and runs cases in which nothing is wrong, and says how it goes."""


def installed_harness() -> Harness:
    """Return the harness of this installation."""
    return Harness(
        cases=_cases,
        run=_run,
        environment=_environment,
        device=_device,
        bench=_bench,
        bench_apart=_bench_apart,
        surface=_surface,
        soak=_soak,
        replay=_replay,
        record=_record,
        replay_trace=_replay_trace,
        invariance=_invariance,
        host_cost=_host_cost,
        faults=_faults,
        shrink=_shrink,
        fault_kinds=_fault_kinds,
        selftest=_selftest,
    )


def _cases() -> Mapping[str, Case]:
    from mrv2_diff.catalog import CASES  # --help needs no catalog

    return CASES


def _run(selection: Selection, on_step: OnStep) -> Iterator[Record]:
    prepare_for(selection.pairs)
    from mrv2_diff.run import RunRequest, run_cases  # imports torch and vLLM: seconds

    request = RunRequest(
        cases=selection.cases,
        pair=selection.pair,
        model=selection.model,
        graphs=selection.graphs,
        further=selection.further,
        small=selection.small,
        referee=selection.referee,
        layers=selection.layers,
    )
    return run_cases(request, on_step)


def prepare_for(pairs: Iterable[tuple[str, str]]) -> None:
    """Prepare this process to run pairs; with vLLM's second runner it interprets Triton."""
    process.prepare()
    if any(UPSTREAM in pair for pair in pairs):
        from mrv2_diff import interpreter

        interpreter.prepare()


def _environment() -> Mapping[str, str]:
    process.prepare()  # a run may follow in this process
    from mrv2_diff.environment import collect

    return collect("cpu")


def _device() -> str:
    process.prepare()
    from mrv2_diff.lockstep import device  # imports torch and vLLM: seconds

    return device.kind()


def _bench(num_requests: int, num_steps: int) -> BenchResult:
    process.prepare()
    from mrv2_diff.bench import bench  # imports torch and vLLM: seconds

    return bench(num_requests, num_steps)


def _bench_apart(options: "Options", say: Callable[[str], None]) -> "Outcome":
    from mrv2_diff.device_bench.bench import Bench  # --help needs none of it

    return Bench(options, say).run()


def _surface() -> Mapping[str, Sequence[str]]:
    from importlib.util import find_spec  # finds vLLM without importing it

    from mrv2_compat.vllm_v1 import surface, surface_scan  # imports the runner, and with it torch

    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("vLLM is not installed; run make setup", name="vllm")
    touched = surface_scan.scan_vllm(Path(found.submodule_search_locations[0]))
    return {
        name: [str(place) for place in touched[name]] for name in surface.unknown_names(touched)
    }


def _soak(request: Soak, on_progress: OnProgress) -> SoakResult:
    process.prepare()
    if request.model == "lockstep":
        from mrv2_diff.schedules import beside_v1  # imports torch and vLLM: seconds

        return beside_v1.soak(request.seconds, request.seed, on_progress)
    from mrv2_diff.schedules.soak import soak

    with _bench_of(request.model) as bench:
        return soak(bench, request.seconds, request.seed, on_progress)


def _replay(schedule: Schedule) -> str | None:
    process.prepare()
    if schedule.model == "lockstep":
        from mrv2_diff.schedules import beside_v1  # imports torch and vLLM: seconds

        return beside_v1.replay(schedule)
    from mrv2_diff.schedules.soak import replay

    with _bench_of(schedule.model) as bench:
        return replay(schedule, bench)


def _record(asked: Recording) -> RecordingOutcome:
    from mrv2_diff.traces.record import record  # --help needs none of it

    return record(asked)


def _replay_trace(asked: TraceReplay) -> ReplayOutcome:
    from mrv2_diff.traces.replay import outcome, replay  # --help needs none of it

    return outcome(replay(asked), asked)


@contextmanager
def _bench_of(model: Model) -> "Iterator[Bench]":
    if model == "hash":
        from mrv2_diff.schedules.soak import HashBench

        yield HashBench()
        return
    from mrv2_diff.schedules.tiny import TinyBench

    with closing(TinyBench()) as bench:
        yield bench


def _invariance(num_requests: int) -> InvarianceResult:
    process.prepare()
    from mrv2_diff.schedules.invariance import invariance  # imports torch and vLLM: seconds

    return invariance(num_requests)


def _host_cost(num_steps: int) -> HostCostResult:
    process.prepare()
    from mrv2_diff.host_cost import growth, host_costs, picture, table  # imports torch and vLLM

    costs = host_costs(num_steps)
    bookkeeping, translated = growth(costs)
    return HostCostResult(
        table=table(costs),
        growth=bookkeeping,
        translated_growth=translated,
        picture=picture(costs),
    )


def _faults() -> Mapping[str, str]:
    process.prepare()
    from mrv2_diff.mutants import MUTANTS  # imports torch

    return {mutant.id: mutant.case for mutant in MUTANTS}


def _shrink(request: "ShrinkRequest", say: "Say") -> "Iterator[Result]":
    prepare_for([request.pair])
    from mrv2_diff.shrinking.session import shrink_cases  # imports torch and vLLM: seconds

    return shrink_cases(request, say)


def _fault_kinds() -> Mapping[str, Sequence[str]]:
    process.prepare()
    from mrv2_diff.selftest.todo import kinds  # imports torch and vLLM: seconds

    return kinds()


def _selftest(request: "SelfTestRequest", say: Callable[[str], None]) -> "SelfTest":
    process.prepare()
    from mrv2_diff.selftest.run import selftest  # imports torch and vLLM: seconds

    return selftest(request, say)
