"""The command line: exit codes, last lines, and what happens to records when things go wrong."""

import itertools
import json
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import pytest

from mrv2.errors import ConfigError, UnsupportedByRunner
from mrv2_diff import case_file, help_texts
from mrv2_diff import record as records_file
from mrv2_diff.case import Add, Case, EngineSpec, Event
from mrv2_diff.case_file import CaseFile
from mrv2_diff.cli import TRACEBACK_VAR, main
from mrv2_diff.device_bench.bench import Outcome
from mrv2_diff.device_bench.options import Options
from mrv2_diff.harness import (
    MAX_BENCH_REQUESTS,
    MAX_BENCH_STEPS,
    BenchResult,
    Harness,
    HostCostResult,
    OnProgress,
    OnStep,
    Recording,
    RecordingOutcome,
    ReplayOutcome,
    Selection,
    Soak,
    TraceReplay,
    installed_harness,
)
from mrv2_diff.models import ModelSpec, make_model
from mrv2_diff.progress import BarProgress, CaseLines, LineProgress
from mrv2_diff.record import Agreement, Cost, Record
from mrv2_diff.schedules import actions as act
from mrv2_diff.schedules.result import Failure, InvarianceResult, Row, SoakResult, summary
from mrv2_diff.selftest import result as tested
from mrv2_diff.selftest.request import SelfTestRequest
from mrv2_diff.selftest.result import AlikeRun, Finding, SelfTest
from mrv2_diff.shrinking.request import Result, ShrinkRequest
from mrv2_diff.shrinking.search import Shrunk
from mrv2_diff.shrinking.signature import Signature, Vote
from mrv2_diff.small import small_form
from mrv2_diff.verdict import Divergence, Neighbour, Verdict

MakeRecord = Callable[..., Record]
MakeCosts = Callable[..., tuple[Cost, ...]]
Capture = pytest.CaptureFixture[str]


def _case(case_id: str, area: str) -> Case:
    return Case(
        id=case_id,
        area=area,
        feature=f"feature of {case_id}",
        title=f"what {case_id} is about",
        engine=EngineSpec(model=ModelSpec()),
        workload=tuple,
    )


FOUND = SelfTest(
    controls=(),
    findings=(
        Finding(
            id="stale",
            kind="slots",
            title="a slot is stale",
            case="greedy",
            expected="slots",
            found="slots",
            outcome="caught",
            step=3,
            seconds=0.5,
            summary="slots differ",
        ),
    ),
    alike=(
        AlikeRun(
            name="alike.0.0",
            engine="roomy",
            runner="v1",
            verdict="MATCH",
            passes=True,
            summary="all agree",
            steps=9,
            changes={"order": 4},
            events={"preemptions": 0, "cache_hits": 0},
            seconds=0.1,
        ),
    ),
    num_asked=1,
    seed=0,
    seconds=60.0,
    environment={"device": "a processor"},
)
SHORT = replace(
    _case("greedy.short", "sampling"),
    workload=lambda: (Add(step=0, req_id="a", prompt=(1, 2), max_tokens=1),),
)
CATALOG = {
    case.id: case
    for case in (_case("greedy", "sampling"), _case("seeded", "sampling"), _case("churn", "rows"))
}


INVARIANCE = InvarianceResult(
    num_requests=3,
    refused=["a grammar"],
    rows=[
        Row(way="in one batch", happens="arrivals", times=3, num_same=3, differing=[]),
        Row(
            way="in chunks",
            happens="chunks",
            times=9,
            num_same=2,
            differing=["a: [1], alone [2]"],
            logprob_difference=0.5,
        ),
    ],
)

ENVIRONMENT = {"commit": "0123456789ab", "mrv2": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"}


@dataclass
class FakeHarness:
    """Gives a record for each case; raises what it is told to at the case it is told."""

    make_record: MakeRecord
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    costs: dict[str, tuple[Cost, ...]] = field(default_factory=dict)
    fails_at: dict[str, BaseException] = field(default_factory=dict)
    padding: int = 0
    ran: list[str] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    device: str = "cpu"
    ratio: float | BaseException = 0.5
    growths: tuple[float, float] = (1.0, 1.0)
    benched: list[tuple[int, int]] = field(default_factory=list)
    benched_apart: list[Options] = field(default_factory=list)
    apart_passes: bool = True
    soaked: list[Soak] = field(default_factory=list)
    soak_result: SoakResult = field(default_factory=lambda: SoakResult(steps=2000))
    unknown: dict[str, list[str]] = field(default_factory=dict)
    shrunk: list[ShrinkRequest] = field(default_factory=list)
    tested: list[SelfTestRequest] = field(default_factory=list)
    found: SelfTest = FOUND
    unshrinkable: set[str] = field(default_factory=set)
    recorded: list[Recording] = field(default_factory=list)
    program_exit: int = 0
    replayed: list[TraceReplay] = field(default_factory=list)
    trace_fault: Exception | None = None
    trace_passes: bool = True

    def run(self, selection: Selection, on_step: OnStep) -> Iterator[Record]:
        self.selections.append(selection)
        form = {"form": "small"} if selection.small else {}
        form |= {"layers": "compared"} if selection.layers else {}
        for case, pair in itertools.product(selection.cases, selection.pairs):
            on_step(case.id, 0)
            if case.id in self.fails_at:
                raise self.fails_at[case.id]
            self.ran.append(case.id)
            yield self.make_record(
                id=case.id,
                area=case.area,
                pair=pair,
                verdict=self.verdicts.get(case.id, Verdict.MATCH),
                summary="what happened" + "." * self.padding,
                environment={**self.environment, **form},
                costs=self.costs.get(case.id, ()),
            )

    def soak(self, request: Soak, on_progress: OnProgress) -> SoakResult:
        self.soaked.append(request)
        on_progress(self.soak_result)
        return self.soak_result

    def replay(self, schedule: act.Schedule) -> str | None:
        return "a.step: wrong" if schedule.actions else None

    def record(self, asked: Recording) -> RecordingOutcome:
        self.recorded.append(asked)
        if asked.program[0] == "no-such":
            raise ValueError("cannot run 'no-such'")
        return RecordingOutcome(text="wrote it", is_whole=True, exit_code=self.program_exit)

    def replay_trace(self, asked: TraceReplay) -> ReplayOutcome:
        self.replayed.append(asked)
        if self.trace_fault is not None:
            raise self.trace_fault
        return ReplayOutcome(text="replay in mrv2", passes=self.trace_passes)

    def bench(self, num_requests: int, num_steps: int) -> BenchResult:
        self.benched.append((num_requests, num_steps))
        if isinstance(self.ratio, BaseException):
            raise self.ratio
        return BenchResult(table="a table", ratio=self.ratio, figures={"ratio": self.ratio})

    def bench_apart(self, options: Options, say: Callable[[str], None]) -> Outcome:
        self.benched_apart.append(options)
        say("a line")
        return Outcome(record={}, table="tables", passes=self.apart_passes)

    def harness(self) -> Harness:
        return Harness(
            cases=lambda: CATALOG,
            run=self.run,
            environment=lambda: self.environment,
            device=lambda: self.device,
            bench=self.bench,
            bench_apart=self.bench_apart,
            surface=lambda: self.unknown,
            soak=self.soak,
            replay=self.replay,
            record=self.record,
            replay_trace=self.replay_trace,
            invariance=lambda num_requests: INVARIANCE,
            host_cost=lambda num_steps: HostCostResult(
                table=f"{num_steps} steps",
                growth=self.growths[0],
                translated_growth=self.growths[1],
                picture="<svg/>",
            ),
            faults=lambda: {"first": "greedy", "second": "greedy", "third": "churn"},
            shrink=self.shrink,
            fault_kinds=lambda: {"slots": ["stale", "shifted"], "ranks": ["wrong"]},
            selftest=self.selftest,
        )

    def selftest(self, request: SelfTestRequest, say: Callable[[str], None]) -> SelfTest:
        self.tested.append(request)
        say("stale: caught by slots")
        return self.found

    def shrink(self, request: ShrinkRequest, say: Callable[[str], None]) -> Iterator[Result]:
        self.shrunk.append(request)
        for case in request.cases:
            if case.id in self.unshrinkable:
                yield Result(whole=case, why_not="the case does not fail")
                continue
            signature = Signature(verdict=Verdict.WRONG_VALUE, value="slots", mode="forced")
            vote = Vote(seen=3, runs=3)
            yield Result(
                whole=case,
                kept=CaseFile(case=replace(SHORT, fault=case.fault), pair=request.pair),
                shrunk=Shrunk(
                    events=SHORT.workload(), signature=signature, before=vote, after=vote,
                    num_steps=2, first_steps=30, tries=9, out_of_time=False,
                ),
                outcome="WRONG_VALUE: slots differ",
            )  # fmt: skip

    def __call__(self, *arguments: object) -> int:
        return main([str(argument) for argument in arguments], harness=self.harness())


@pytest.fixture
def fake(make_record: MakeRecord) -> FakeHarness:
    return FakeHarness(make_record)


def _last_line(text: str) -> str:
    return text.rstrip("\n").splitlines()[-1]


def _ids(folder: Path, name: str = "records.jsonl") -> list[str]:
    return [record.id for record in records_file.read(folder / name)]


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------- run


def test_a_run_writes_a_record_a_case_and_ends_with_the_parity_line(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    assert fake("run", "--out", tmp_path) == 0
    assert _ids(tmp_path) == list(CATALOG)
    out = capsys.readouterr().out
    assert _last_line(out) == "parity: 3 cases, 3 match"
    assert "[2/3] match       seeded: 128,000 values compared, 0.0 s" in out
    assert fake.selections[0].pair == ("v1", "mrv2")
    assert fake.selections[0].model is None


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_exit_code_is_0_only_where_nothing_failed(
    fake: FakeHarness, tmp_path: Path, verdict: Verdict, capsys: Capture
) -> None:
    fake.verdicts["seeded"] = verdict
    agreed = (Verdict.MATCH, Verdict.NEAR_TIE)
    shown = (Verdict.KNOWN_DIFFERENCE, Verdict.REFERENCE_WRONG, Verdict.REFERENCE_CRASHED)
    passes = verdict in (*agreed, *shown)
    assert fake("run", "--out", tmp_path) == (0 if passes else 1)
    assert ("what happened" in capsys.readouterr().out) == (not passes)


@pytest.mark.parametrize("memory", [Verdict.MATCH, Verdict.OVER_BUDGET, Verdict.INCONCLUSIVE])
def test_budgets_fail_a_run_only_where_that_is_asked_for(
    fake: FakeHarness, tmp_path: Path, make_costs: MakeCosts, memory: Verdict, capsys: Capture
) -> None:
    is_over = memory is Verdict.OVER_BUDGET
    fake.costs["seeded"] = make_costs(memory)
    assert fake("run", "--out", tmp_path) == 0
    told = capsys.readouterr().out.splitlines()
    words = {Verdict.MATCH: "1 within", Verdict.OVER_BUDGET: "0 within, 1 over",
             Verdict.INCONCLUSIVE: "0 within, 1 open"}  # fmt: skip
    assert told[-2:] == [
        f"budgets: memory {words[memory]}; host time 1 within", "parity: 3 cases, 3 match"
    ]  # fmt: skip
    assert ("      over budget: memory: 1.250 times V1's" in told) == is_over
    assert fake("run", "--out", tmp_path, "--budgets") == int(is_over)


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        (["--area", "sampling"], ["greedy", "seeded"]),
        (["--case", "churn"], ["churn"]),
        (["--area", "rows", "--case", "greedy"], ["greedy", "churn"]),
    ],
)
def test_areas_and_cases_select(
    fake: FakeHarness, tmp_path: Path, options: list[str], ran: list[str]
) -> None:
    assert fake("run", "--out", tmp_path, *options) == 0
    assert fake.ran == ran


def test_a_case_without_a_record_fails_the_run(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    lazy = Harness(
        cases=lambda: CATALOG,
        run=lambda selection, on_step: iter(()),
        environment=dict,
        device=lambda: "cpu",
        bench=fake.bench,
        bench_apart=fake.bench_apart,
        surface=dict,
        soak=fake.soak,
        replay=fake.replay,
        record=fake.record,
        replay_trace=fake.replay_trace,
        invariance=lambda num_requests: INVARIANCE,
        host_cost=lambda num_steps: HostCostResult(
            table=f"{num_steps} steps", growth=1.5, translated_growth=1.4, picture="<svg/>"
        ),
        faults=dict,
        shrink=fake.shrink,
        fault_kinds=dict,
        selftest=fake.selftest,
    )
    assert main(["run", "--out", str(tmp_path)], harness=lazy) == 1
    captured = capsys.readouterr()
    assert "3 of 3 cases gave no record" in captured.err
    assert _last_line(captured.out) == "parity: 0 cases, 0 match"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "gredy"], "no case is called 'gredy'; choose from: greedy, seeded, churn"),
        (["--area", "row"], "no area is called 'row'; choose from: rows, sampling"),
        (
            ["--pair", "v1,v3"],
            "no pair is called 'v1,v3'; choose v1,mrv2 or v1,v1 or v1,vllm-v2 or mrv2,vllm-v2",
        ),
        (["--runners", "v1,v3"], "no runner is called 'v3'; choose from: v1, mrv2, vllm-v2"),
        (["--runners", "v1"], "--runners v1 makes no pair; name two or three of v1, mrv2, vllm-v2"),
        (["--runners", "v1,v1"], "--runners v1,v1 makes no pair"),
        (["--runners", "v1,vllm-v2"], "nothing is left of these cases in a small form"),
        (
            ["--pair", "v1,vllm-v2", "--case", "greedy"],
            "nothing is left of greedy in a small form: each needs a greedy request",
        ),
        (["--layers", "--graphs", "FULL_DECODE_ONLY"], "--layers looks into each forward"),
        (["--model", "nowhere"], "model folder nowhere does not exist or is a file; name a folder"),
    ],
)
def test_bad_input_is_one_message_and_nothing_runs(
    fake: FakeHarness, tmp_path: Path, options: list[str], message: str, capsys: Capture
) -> None:
    assert fake("run", "--out", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mrv2-diff run: {message}")
    assert error.count("\n") == 1
    assert fake.selections == []


def test_an_unknown_option_exits_2(fake: FakeHarness, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        fake("run", "--cases", "greedy")
    assert caught.value.code == 2
    assert "unrecognized arguments: --cases" in capsys.readouterr().err


def test_a_configuration_that_a_runner_refuses_exits_2(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.fails_at["greedy"] = UnsupportedByRunner(["lora: leave --enable-lora out"])
    assert fake("run", "--out", tmp_path) == 2
    assert "leave --enable-lora out" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [False, True])
def test_what_led_to_a_message_is_told_where_it_is_asked_for(
    fake: FakeHarness,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    asked: bool,
) -> None:
    if asked:
        monkeypatch.setenv(TRACEBACK_VAR, "1")
    fake.fails_at["greedy"] = ConfigError("vLLM does not start")
    fake.fails_at["greedy"].__cause__ = ValueError("out of memory")
    assert fake("run", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.endswith("mrv2-diff run: vLLM does not start\n")
    assert ("ValueError: out of memory" in error) == asked


def test_a_folder_that_cannot_be_written_is_named_before_anything_runs(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    assert fake("run", "--out", tmp_path / "file" / "out") == 2
    error = capsys.readouterr().err
    assert f"cannot write to the report folder {tmp_path / 'file' / 'out'}" in error
    assert "Not a directory; make room or mend its permissions" in error
    assert fake.selections == []


def test_a_full_disk_is_told_before_anything_runs(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    with _largest_file(1000):
        assert fake("run", "--out", tmp_path) == 2
    assert "File too large; make room" in capsys.readouterr().err
    assert fake.selections == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_during_the_run_keeps_the_whole_records(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.padding = 60_000
    with _largest_file(100_000):
        assert fake("run", "--out", tmp_path) == 2
    assert "cannot write to the report folder" in capsys.readouterr().err
    assert _ids(tmp_path) == ["greedy"]
    assert (tmp_path / "records.jsonl").read_bytes().endswith(b"}\n")
    assert fake("run", "--out", tmp_path, "--resume") == 0
    assert _ids(tmp_path) == list(CATALOG)


def test_an_interrupted_run_says_how_to_go_on_and_does(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.fails_at["seeded"] = KeyboardInterrupt()
    assert fake("run", "--out", tmp_path) == 130
    error = capsys.readouterr().err
    assert "1 of 3 cases have whole records" in error
    assert "--resume" in error
    fake.fails_at.clear()
    fake.ran.clear()
    assert fake("run", "--out", tmp_path, "--resume") == 0
    assert fake.ran == ["seeded", "churn"]
    assert _ids(tmp_path) == list(CATALOG)
    out = capsys.readouterr().out
    assert "resuming: 1 of 3 cases have records" in out
    assert _last_line(out) == "parity: 3 cases, 3 match"


def test_resume_cuts_off_a_torn_record(fake: FakeHarness, tmp_path: Path) -> None:
    assert fake("run", "--out", tmp_path, "--case", "greedy") == 0
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "seeded", "ar')
    assert fake("run", "--out", tmp_path, "--resume") == 0
    assert _ids(tmp_path) == list(CATALOG)


def test_resume_counts_an_earlier_failure(fake: FakeHarness, tmp_path: Path) -> None:
    fake.verdicts["greedy"] = Verdict.WRONG_VALUE
    assert fake("run", "--out", tmp_path, "--case", "greedy") == 1
    assert fake("run", "--out", tmp_path, "--resume") == 1
    assert fake.ran == ["greedy", "seeded", "churn"]


def test_resume_takes_only_records_of_the_same_pair_and_model(
    fake: FakeHarness, tmp_path: Path
) -> None:
    out, model = tmp_path / "out", tmp_path / "model"
    make_model(model, ModelSpec())
    options = ("--out", out, "--case", "greedy", "--resume")
    assert fake("run", *options) == 0
    assert fake("run", *options, "--pair", "v1,v1") == 0
    assert fake("run", *options, "--model", model) == 0
    assert fake.ran == ["greedy"] * 3
    make_model(model, ModelSpec(layers=3))
    assert fake("run", *options, "--model", model) == 0
    assert fake.ran == ["greedy"] * 4
    assert fake("run", *options, "--model", model) == 0
    assert fake.ran == ["greedy"] * 4
    labels = [record.environment["model"] for record in records_file.read(out / "records.jsonl")]
    assert len(set(labels)) == 3
    assert str(tmp_path) not in " ".join(labels)


def _one_greedy() -> tuple[Event, ...]:
    return (Add(step=0, req_id="a", prompt=(1, 2), max_tokens=3),)


@pytest.fixture
def greedy_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two cases of the catalog have a greedy request, and with it a small form."""
    for name in ("greedy", "churn"):
        monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], workload=_one_greedy))


@pytest.mark.usefixtures("greedy_catalog")
def test_three_runners_are_compared_pair_by_pair_on_small_cases(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.verdicts["churn"] = Verdict.NEAR_TIE
    assert fake("run", "--runners", "vllm-v2,v1,mrv2", "--out", tmp_path) == 0
    (selection,) = fake.selections
    assert selection.pairs == (("v1", "mrv2"), ("v1", "vllm-v2"), ("mrv2", "vllm-v2"))
    assert selection.small
    assert fake.ran == ["greedy"] * 3 + ["churn"] * 3
    printed = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line) for line in printed[-4:-1]] == [
        ["case", "v1,mrv2", "v1,vllm-v2", "mrv2,vllm-v2"],
        ["greedy", "match", "match", "match"],
        ["churn", "near tie", "near tie", "near tie"],
    ]
    assert printed[-1] == "parity: 6 cases, 3 match, 3 near tie"
    assert len(list(records_file.read(tmp_path / "records.jsonl"))) == 6


@pytest.mark.usefixtures("greedy_catalog")
def test_small_and_whole_records_of_a_case_stand_beside_each_other(
    fake: FakeHarness, tmp_path: Path
) -> None:
    options = ("--out", tmp_path, "--case", "greedy", "--resume")
    for _ in range(2):
        assert fake("run", *options) == 0
        assert fake("run", *options, "--small") == 0
    assert fake.ran == ["greedy"] * 2
    assert [selection.small for selection in fake.selections] == [False, True]
    assert len(list(records_file.read(tmp_path / "records.jsonl"))) == 2


@pytest.mark.usefixtures("greedy_catalog")
def test_a_case_is_resumed_with_all_its_pairs(fake: FakeHarness, tmp_path: Path) -> None:
    options = ("--out", tmp_path, "--case", "greedy", "--resume")
    assert fake("run", *options, "--pair", "v1,vllm-v2") == 0
    assert fake("run", *options, "--runners", "v1,mrv2,vllm-v2") == 0
    assert fake.ran == ["greedy"] * 4
    assert fake("run", *options, "--runners", "v1,mrv2,vllm-v2") == 0
    assert fake.ran == ["greedy"] * 4


def test_the_referee_is_asked_on_request(fake: FakeHarness, tmp_path: Path) -> None:
    fake("run", "--out", tmp_path)
    fake("run", "--out", tmp_path, "--referee")
    assert [selection.referee for selection in fake.selections] == [False, True]


def test_layers_are_compared_on_request_and_resumed_apart(
    fake: FakeHarness, tmp_path: Path
) -> None:
    options = ("--out", tmp_path, "--case", "greedy", "--resume")
    for layers in ((), ("--layers",), ("--layers",)):
        assert fake("run", *options, *layers) == 0
    assert [selection.layers for selection in fake.selections] == [False, True]


@pytest.mark.usefixtures("greedy_catalog")
def test_a_small_case_that_fails_on_several_pairs_is_kept_for_each(
    fake: FakeHarness, tmp_path: Path
) -> None:
    fake.verdicts["greedy"] = Verdict.WRONG_VALUE
    options = ("--out", tmp_path, "--case", "greedy")
    assert fake("run", *options, "--runners", "v1,mrv2,vllm-v2") == 1
    kept = {file.name: case_file.read(file) for file in (tmp_path / "failing").iterdir()}
    assert {name: one.pair for name, one in kept.items()} == {
        "greedy.json": ("v1", "mrv2"),
        "greedy.v1-vllm-v2.json": ("v1", "vllm-v2"),
        "greedy.mrv2-vllm-v2.json": ("mrv2", "vllm-v2"),
    }
    assert all(
        one.case.workload() == small_form(CATALOG["greedy"]).workload() for one in kept.values()
    )


def test_a_cases_line_says_what_its_floats_required(make_record: MakeRecord) -> None:
    agreements = {
        "tokens": Agreement(compared=9, differing=0, max_abs_diff=0, required_tolerance=0,
                            policy="exact"),
        "logprobs": Agreement(compared=9, differing=0, max_abs_diff=1e-7, required_tolerance=0.5,
                              policy="at most 4"),
    }  # fmt: skip
    near = tuple(Neighbour(index=n, reference=str(n), candidate=str(n * n)) for n in range(3))
    first = Divergence(mode="forced", step=0, value="logprobs", req_id="a", index=2,
                       reference="2", candidate="4", policy="at most 4", around=near)  # fmt: skip
    record = make_record(agreements=agreements, noise_floor={"logprobs": 2.0})
    line = CaseLines(1).next(record)
    assert line.endswith("required spacings: logprobs 0.5 (floor 2)")
    failing = replace(record, verdict=Verdict.WRONG_VALUE, first_divergence=first)
    lines = CaseLines(1).next(failing).splitlines()
    assert len(lines) == 5
    assert lines[-1].split() == ["2", "2", "4", "<"]


def test_resume_takes_only_records_of_the_same_graphs(fake: FakeHarness, tmp_path: Path) -> None:
    options = ("--out", tmp_path, "--case", "greedy", "--resume")
    graphs = ("--graphs", "FULL_DECODE_ONLY")
    assert fake("run", *options) == 0
    assert fake("run", *options) == 0
    assert fake.ran == ["greedy"]
    fake.environment["graphs"] = graphs[1]
    assert fake("run", *options, *graphs) == 0
    assert fake("run", *options, *graphs) == 0
    assert fake.ran == ["greedy"] * 2
    assert [selection.graphs for selection in fake.selections] == ["none", graphs[1]]


def test_graphs_of_another_name_are_refused(fake: FakeHarness, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        fake("run", "--graphs", "FULL")
    assert stop.value.code == 2
    assert "FULL_DECODE_ONLY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("commit", "ba9876543210"),
        ("commit", "0123456789ab+dirty.00000001"),
        ("mrv2", "0.2.0"),
        ("vllm", "0.33.0"),
        ("torch", "2.14.0"),
    ],
)
def test_resume_repeats_what_was_made_from_another_source(
    fake: FakeHarness, tmp_path: Path, name: str, now: str, capsys: Capture
) -> None:
    fake.verdicts["greedy"] = Verdict.CRASHED
    assert fake("run", "--out", tmp_path, "--area", "sampling") == 1
    fake.verdicts.clear()
    former, fake.environment = fake.environment[name], {**fake.environment, name: now}
    fake.fails_at["seeded"] = KeyboardInterrupt()
    capsys.readouterr()
    assert fake("run", "--out", tmp_path, "--resume") == 130
    captured = capsys.readouterr()
    reason = f"since their records are of {name} {former}, now {now}: greedy, seeded\n"
    assert captured.out.startswith(f"running again, {reason}")
    assert "1 of 3 cases have whole records" in captured.err
    assert _ids(tmp_path) == ["seeded", "greedy"], "an old record stays until its case ran again"
    fake.fails_at.clear()
    fake.ran.clear()
    assert fake("run", "--out", tmp_path, "--resume") == 0
    assert fake.ran == ["seeded", "churn"]
    records = list(records_file.read(tmp_path / "records.jsonl"))
    assert [record.id for record in records] == ["greedy", "seeded", "churn"]
    assert {record.environment[name] for record in records} == {now}


def test_resume_repeats_what_does_not_tell_its_source(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    del fake.environment["torch"]
    assert fake("run", "--out", tmp_path, "--case", "greedy") == 0
    fake.environment = dict(ENVIRONMENT)
    assert fake("run", "--out", tmp_path, "--case", "greedy", "--resume") == 0
    assert fake.ran == ["greedy", "greedy"]
    assert "of torch unknown, now 2.13.0: greedy\n" in capsys.readouterr().out


def test_a_disk_that_fills_while_a_record_is_replaced_keeps_the_file(
    fake: FakeHarness, tmp_path: Path
) -> None:
    assert fake("run", "--out", tmp_path) == 0
    before = (tmp_path / "records.jsonl").read_bytes()
    fake.environment["commit"] = "ba9876543210"
    fake.padding = 60_000
    with _largest_file(66_000):
        assert fake("run", "--out", tmp_path, "--resume") == 2
    assert fake.ran == [*CATALOG, "greedy"]
    assert (tmp_path / "records.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_resume_refuses_what_is_no_record(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "records.jsonl").write_text("not a record\n{}\n")
    assert fake("run", "--out", tmp_path, "--resume") == 2
    assert "run without --resume to begin anew" in capsys.readouterr().err


def test_the_former_records_are_kept_until_and_after_a_new_one_is_written(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    assert fake("run", "--out", tmp_path, "--case", "churn") == 0
    fake.fails_at["greedy"] = KeyboardInterrupt()
    assert fake("run", "--out", tmp_path) == 130
    assert "no record was written; run the same command again" in capsys.readouterr().err
    assert _ids(tmp_path) == ["churn"]
    fake.fails_at.clear()
    assert fake("run", "--out", tmp_path, "--case", "seeded") == 0
    assert _ids(tmp_path) == ["seeded"]
    assert _ids(tmp_path, "records.previous.jsonl") == ["churn"]


# ---------------------------------------------------------------- report


def test_a_report_is_written_beside_its_records(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake("run", "--out", tmp_path)
    assert fake("report", tmp_path) == 0
    assert _last_line(capsys.readouterr().out) == "parity: 3 cases, 3 match"
    assert {"index.html", "PARITY.md", "summary.json"} < {p.name for p in tmp_path.iterdir()}


def test_records_of_several_files_make_one_report(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.verdicts["churn"] = Verdict.CRASHED
    fake("run", "--out", tmp_path / "a", "--area", "sampling")
    fake("run", "--out", tmp_path / "b", "--area", "rows")
    files = [option for name in "ab" for option in ("--records", tmp_path / name / "records.jsonl")]
    assert fake("report", *files, "--out", tmp_path / "both") == 1
    assert _last_line(capsys.readouterr().out) == "parity: 3 cases, 2 match, 1 crashed"
    assert (tmp_path / "both" / "index.html").is_file()


def test_a_report_of_nothing_is_refused(fake: FakeHarness, tmp_path: Path, capsys: Capture) -> None:
    assert fake("report", tmp_path) == 2
    assert "No such file or directory; make some: mrv2-diff run" in capsys.readouterr().err
    (tmp_path / "records.jsonl").touch()
    assert fake("report", tmp_path) == 2
    assert "holds no records; make some" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text("not a record\n{}\n")
    assert fake("report", tmp_path) == 2
    assert "records.jsonl:1 is not a record of format 1" in capsys.readouterr().err


def test_a_report_into_a_folder_that_cannot_be_written_is_refused(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake("run", "--out", tmp_path)
    capsys.readouterr()
    assert fake("report", tmp_path, "--out", tmp_path / "records.jsonl" / "out") == 2
    assert "Not a directory; make room" in capsys.readouterr().err
    with _largest_file(1000):
        assert fake("report", tmp_path) == 2
    assert "File too large; make room" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_the_committed_page_is_written(fake: FakeHarness, tmp_path: Path) -> None:
    kept = tmp_path / "parity" / "0.32.0"
    fake("run", "--out", kept)
    (kept / "records.jsonl").rename(kept / "cpu.jsonl")
    assert fake("report", "--committed", tmp_path) == 0
    assert "## vLLM 0.32.0, cpu" in (tmp_path / "PARITY.md").read_text()


# ---------------------------------------------------------------- the others


def test_make_model_makes_one_that_run_takes(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    options = ("--seed", 3, "--layers", 2, "--sliding-window", 8, "--sliding-layers", "alternate")
    assert fake("make-model", tmp_path / "model", *options) == 0
    assert fake("run", "--model", tmp_path / "model", "--out", tmp_path / "out") == 0
    assert fake.selections[0].model == tmp_path / "model"
    assert fake("make-model", tmp_path / "out") == 2
    assert "name a new or empty folder" in capsys.readouterr().err
    assert fake("make-model", tmp_path / "other", "--layers", 0) == 2
    assert "layers is 0; choose a whole number from 1 to 64" in capsys.readouterr().err
    with _largest_file(1000):
        assert fake("make-model", tmp_path / "third") == 2
    assert not (tmp_path / "third").exists()


def test_cases_lists_the_catalog(fake: FakeHarness, capsys: Capture) -> None:
    assert fake("cases") == 0
    assert capsys.readouterr().out.splitlines() == [
        "sampling",
        "  greedy  what greedy is about",
        "  seeded  what seeded is about",
        "rows",
        "  churn   what churn is about",
    ]
    assert fake("cases", "--area", "rows") == 0
    assert "greedy" not in capsys.readouterr().out
    assert fake("cases", "--area", "raws") == 2


def test_check_surface_lists_what_is_unknown(fake: FakeHarness, capsys: Capture) -> None:
    assert fake("check-surface") == 0
    fake.unknown = {"new_name": ["v1/worker/gpu_worker.py:7 (call)"]}
    assert fake("check-surface") == 1
    assert "new_name\n  v1/worker/gpu_worker.py:7 (call)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratio", "options", "status"),
    [(0.6, [], 0), (0.61, [], 1), (0.61, ["--max-ratio", 0.7], 0), (float("nan"), [], 1)],
)
def test_bench_passes_up_to_its_bound(
    fake: FakeHarness, ratio: float, options: list[object], status: int, capsys: Capture
) -> None:
    fake.ratio = ratio
    assert fake("bench", "--requests", 3, "--steps", 5, *options) == status
    assert fake.benched == [(3, 5)]
    assert capsys.readouterr().out.startswith(f"a table\nbookkeeping: mrv2 / v1 = {ratio:.2f}")


def test_bench_keeps_its_figures(fake: FakeHarness, tmp_path: Path) -> None:
    out = tmp_path / "made" / "bench.json"
    assert fake("bench", "--out", out) == 0
    assert json.loads(out.read_text()) == {"ratio": 0.5}


def test_bench_names_a_file_that_cannot_be_written_before_it_starts(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    for out, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "bench.json", "Not a directory"),
    ):
        assert fake("bench", "--out", out) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"mrv2-diff bench: cannot write {out}: {reason}; make room")
        assert error.count("\n") == 1
    assert fake.benched == []


def test_bench_prints_its_figures_even_if_the_disk_fills(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    with _largest_file(3):
        assert fake("bench", "--out", tmp_path / "bench.json") == 2
    captured = capsys.readouterr()
    assert "bookkeeping: mrv2 / v1 = 0.50" in captured.out
    assert "File too large; make room" in captured.err


def test_an_interrupted_bench_leaves_its_file_as_it_was(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.ratio = KeyboardInterrupt()
    kept = tmp_path / "kept.json"
    kept.write_text("former figures")
    for out in (kept, tmp_path / "new.json"):
        assert fake("bench", "--out", out) == 130
        assert capsys.readouterr().err == "mrv2-diff bench: interrupted\n"
    assert kept.read_text() == "former figures"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


@pytest.mark.parametrize(
    ("option", "high"), [("--requests", MAX_BENCH_REQUESTS), ("--steps", MAX_BENCH_STEPS)]
)
def test_bench_says_which_numbers_it_takes(
    fake: FakeHarness, option: str, high: int, capsys: Capture
) -> None:
    for text in ("x", "0", "-1", "1.5", str(high + 1)):
        with pytest.raises(SystemExit) as caught:
            fake("bench", f"{option}={text}")
        assert caught.value.code == 2
        message = f"argument {option}: {text!r} is no whole number from 1 to {high}\n"
        assert capsys.readouterr().err.endswith(message)
    assert fake("bench", option, high) == 0


def test_bench_of_runners_asks_for_what_is_named(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "made" / "device.json"
    status = fake(
        "bench", "--runners", "v1,mrv2", "--parts", "steady,profile", "--batches", "1,256",
        "--temperatures", "0", "--steps", 20, "--limit", 90, "--cudagraph-mode", "NONE",
        "--engine", '{"seed": 3}', "--engine-of", "mrv2", '{"enforce_eager": true}', "--out", out,
    )  # fmt: skip
    assert status == 0
    assert capsys.readouterr().out == "a line\ntables\n"
    assert fake.benched == []
    assert fake.benched_apart == [
        Options(
            runners=("v1", "mrv2"), parts=("steady", "profile"), batches=(1, 256),
            temperatures=(0.0,), steps=20, limit_s=90.0, cudagraph_mode="NONE",
            engine={"seed": 3}, engine_of={"mrv2": {"enforce_eager": True}}, out=out,
        )
    ]  # fmt: skip
    fake.apart_passes = False
    assert fake("bench", "--runners", "v1") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "steady"), "--parts needs --runners"),
        (("--engine-of", "v1", "{}"), "--engine-of needs --runners"),
        (("--runners", "v1", "--requests", "3"), "--requests does not go with --runners"),
        (("--runners", "v1", "--max-ratio", "1"), "--max-ratio does not go with --runners"),
        (("--runners", "v7"), "there is no runner 'v7'; choose from v1, mrv2, vllm-v2"),
        (("--runners", "v1", "--engine-of", "v1", "no"), "'no' is not JSON"),
        (("--runners", "v1", "--engine-of", "v1", "[]"), "'[]' is no JSON object"),
    ],
)
def test_bench_says_what_does_not_go_together(
    fake: FakeHarness, options: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert fake("bench", *options) == 2
    assert capsys.readouterr().err.startswith(f"mrv2-diff bench: {message}")
    assert fake.benched == []
    assert fake.benched_apart == []


# ---------------------------------------------------------------- help and progress


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "report",
        "make-model",
        "cases",
        "bench",
        "soak",
        "record",
        "replay",
        "shrink",
        "invariance",
        "host-cost",
        "check-surface",
    ],
)
def test_help_teaches(fake: FakeHarness, command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        fake(command, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"mrv2-diff {command}" in text
    assert "exit codes" in text
    assert "example" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_examples_name_cases_and_areas_that_exist() -> None:
    catalog = installed_harness().cases()
    areas = {case.area for case in catalog.values()}
    text = help_texts.RUN.epilog + help_texts.CASES.epilog
    assert set(re.findall(r"--case (\S+)", text)) <= set(catalog)
    assert set(re.findall(r"--area (\S+)", text)) <= areas


def failure(*played: act.Action) -> Failure:
    schedule = act.Schedule(setup=act.Setup(), actions=played, why="x")
    return Failure(schedule, "Divergence: step 3: a returned [1]")


def test_a_soak_that_finds_nothing_passes(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "failing.json"
    assert fake("soak", "--minutes", 0.5, "--model", "tiny", "--seed", 7, "--out", out) == 0
    assert fake.soaked == [Soak(seconds=30.0, model="tiny", seed=7)]
    assert fake("soak", "--minutes", 1.5, "--out", out) == 0
    assert [(part.model, part.seconds) for part in fake.soaked[1:]] == [
        ("hash", 30.0), ("tiny", 30.0), ("lockstep", 30.0)
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "2,000 steps, 0 requests" in printed
    assert _last_line(printed).endswith("2,000 steps, 0 divergences")
    assert not out.exists()


def test_a_long_soak_in_which_a_kind_of_event_is_rare_fails(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.soak_result.resident_bytes = [2**30] * 10
    fake.soak_result.objects = [1000] * 10
    fake.soak_result.events.update({"ends": 100, "resumes": 99})
    assert fake("soak", "--minutes", 29, "--out", tmp_path / "x.json") == 0
    assert fake("soak", "--minutes", 30, "--out", tmp_path / "x.json") == 1
    assert "fewer than 100 times: resumes\n" in capsys.readouterr().out
    fake.soak_result.events["resumes"] = 100
    assert fake("soak", "--minutes", 30, "--out", tmp_path / "x.json") == 0
    assert "fewer than" not in capsys.readouterr().out


def test_a_long_soak_that_looked_at_memory_too_seldom_fails(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.soak_result.resident_bytes = [2**30] * 9
    fake.soak_result.objects = [1000] * 9
    assert fake("soak", "--minutes", 29, "--out", tmp_path / "x.json") == 0
    assert fake("soak", "--minutes", 30, "--out", tmp_path / "x.json") == 1
    assert "memory was looked at 9 times; 10 tell" in capsys.readouterr().out


def test_a_soak_says_which_kinds_of_event_cannot_happen_and_why() -> None:
    text = summary(SoakResult(model="lockstep"))
    assert "cannot: vLLM keeps its CPU worker synchronous" in text
    assert "cannot" not in summary(SoakResult(model="tiny"))


def test_a_failing_schedule_is_written_and_played_again(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "failing.json"
    fake.soak_result.failure = failure(act.Step(lag=1), act.Abort(name="a"))
    assert fake("soak", "--out", out) == 1
    captured = capsys.readouterr()
    assert _last_line(captured.out).endswith("1 divergences")
    assert "step 3: a returned [1]" in captured.err
    assert f"mrv2-diff replay {out}" in captured.err
    assert act.read(out) == fake.soak_result.failure.schedule
    assert fake("replay", out) == 1
    assert _last_line(capsys.readouterr().out) == "replay: 2 actions: a.step: wrong"
    act.write(failure().schedule, out)
    assert fake("replay", out) == 0


def test_a_soak_whose_memory_grows_fails(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.soak_result.resident_bytes = [2**30] * 20
    fake.soak_result.objects = [1000] * 10 + [2001] * 10
    assert fake("soak", "--out", tmp_path / "x.json") == 1
    assert "1,000 and 2,001 Python objects: it grows" in capsys.readouterr().out
    fake.soak_result.objects = [1000] * 10 + [2000] * 10
    assert fake("soak", "--out", tmp_path / "x.json") == 0


def test_a_file_that_is_no_schedule_is_refused(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    for text, reason in (("{}", "holds no schedule"), (None, "cannot read")):
        path = tmp_path / "schedule.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        assert fake("replay", path) == 2
        assert reason in (error := capsys.readouterr().err)
        assert "name a file that mrv2-diff soak or mrv2-diff record wrote" in error


def test_a_trace_is_told_from_a_schedule_by_how_it_begins(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "t.trace"
    path.write_bytes(b"MRV2TRC\n and so on")
    assert fake("replay", path) == 0
    assert fake("replay", path, "--runner", "v1", "--free", "--salvage", "--model", tmp_path) == 0
    assert fake.replayed == [
        TraceReplay(trace=path),
        TraceReplay(trace=path, runner="v1", forced=False, salvage=True, model=tmp_path),
    ]
    fake.trace_passes = False
    assert fake("replay", path) == 1
    fake.trace_fault = ValueError("vLLM: recorded '0.31.0', here '0.32.0'")
    capsys.readouterr()
    assert fake("replay", path) == 2
    assert "recorded '0.31.0'" in capsys.readouterr().err
    path.write_text("{}")
    assert fake("replay", path, "--runner", "v1") == 2
    assert "--runner is for a trace" in capsys.readouterr().err


def test_record_runs_what_stands_behind_two_dashes(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "t.trace"
    assert fake("record", "--out", out, "--private", "--", "vllm", "serve", "--port", "1") == 0
    assert fake.recorded == [
        Recording(out=out, program=("vllm", "serve", "--port", "1"), runner=None, private=True)
    ]
    fake.program_exit = 3
    assert fake("record", "--out", out, "--runner", "v1", "--", "x") == 1
    assert "x ended with 3" in capsys.readouterr().err
    assert fake("record", "--out", out, "--", "no-such") == 2
    assert fake("record", "--out", out) == 2
    assert "behind --" in capsys.readouterr().err
    out.write_text("mine")
    assert fake("record", "--out", out, "--", "x") == 2
    assert "is there already" in capsys.readouterr().err


def test_invariance_prints_a_line_for_each_way_and_what_differs(
    fake: FakeHarness, capsys: Capture
) -> None:
    assert fake("invariance") == 1
    text = capsys.readouterr().out
    assert re.search(r"in one batch +3 of 3 +0 +3 arrivals\n", text)
    assert re.search(r"in chunks +2 of 3 +0.5 +9 chunks\n  a: \[1\], alone \[2\]\n", text)
    assert "left out: a grammar" in text
    assert _last_line(text) == "invariance: 5 of 6 outputs as alone"


def test_no_difference_of_a_logprob_passes() -> None:
    row = Row(way="w", happens="resumes", times=1, num_same=1, differing=[])
    for difference, passes in ((0.0, True), (1e-7, False)):
        rows = [replace(row, logprob_difference=difference)]
        assert InvarianceResult(num_requests=1, refused=[], rows=rows).passes is passes


@pytest.mark.parametrize(
    ("growth", "translated", "status"), [(1.3, 2.0, 0), (1.31, 1.2, 1), (1.2, 2.01, 1)]
)
def test_host_cost_passes_up_to_its_bound_and_draws_its_curves(
    fake: FakeHarness,
    growth: float,
    translated: float,
    status: int,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    fake.growths = growth, translated
    out = tmp_path / "made" / "curves.svg"
    assert fake("host-cost", "--steps", 7, "--out", out) == status
    text = capsys.readouterr().out
    assert text.startswith("7 steps\n")
    assert _last_line(text) == (
        f"1,024 / 64 requests: bookkeeping {growth:.2f}, with the translation {translated:.2f} "
        "(bounds 1.3 and 2)"
    )
    assert out.read_text() == "<svg/>"
    assert fake("host-cost", "--out", tmp_path) == 2
    assert "cannot write" in capsys.readouterr().err


def test_invariance_needs_what_each_way_is_about() -> None:
    same = Row(way="w", happens="resumes", times=1, num_same=1, differing=[])
    for times, passes in ((1, True), (0, False)):
        row = replace(same, times=times)
        assert InvarianceResult(num_requests=1, refused=[], rows=[row]).passes is passes


def test_a_soak_says_which_times_it_takes(fake: FakeHarness, capsys: Capture) -> None:
    for text in ("-1", "x", "nan", "1441"):
        with pytest.raises(SystemExit):
            fake("soak", f"--minutes={text}")
        assert "is no number of minutes from 0 to 1440" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from mrv2_diff.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'vllm', 'transformers', 'jinja2', 'rich'} & set(sys.modules)))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_rerun_command_is_one_that_the_command_line_takes(
    fake: FakeHarness, tmp_path: Path, make_record: MakeRecord
) -> None:
    program, *arguments = shlex.split(
        make_record(command="mrv2-diff run --case greedy --pair v1,mrv2").command
    )
    assert program == "mrv2-diff"
    assert fake(*arguments, "--out", tmp_path) == 0


def test_the_bar_prints_the_same_lines(make_record: MakeRecord) -> None:
    plain, terminal = StringIO(), StringIO()
    records = [make_record(), make_record(id="[bold]", verdict=Verdict.CRASHED)]
    for progress in (LineProgress(plain, 2), BarProgress(terminal, 2)):
        with progress:
            progress.step("sampling-greedy", 3)
            for record in records:
                progress.finished(record)
    lines = re.sub(r", [\d.]+ s", "", plain.getvalue()).splitlines()
    shown = re.sub(r", [\d.]+ s", "", terminal.getvalue())
    assert len(lines) == 2
    assert "[2/2] crashed     [bold]: " in lines[1]
    assert all(line in shown for line in lines)


# ---------------------------------------------------------------- shrink and case files


def test_a_failing_case_is_kept_as_a_file_until_it_passes(
    fake: FakeHarness, tmp_path: Path
) -> None:
    fake.verdicts["seeded"] = Verdict.WRONG_VALUE
    assert fake("run", "--out", tmp_path) == 1
    (file,) = (tmp_path / "failing").iterdir()
    assert file.name == "seeded.json"
    assert json.loads(file.read_text())["found"]["verdict"] == "WRONG_VALUE"
    fake.verdicts.clear()
    assert fake("run", "--out", tmp_path) == 0
    assert not list((tmp_path / "failing").iterdir())


def _short_file(folder: Path) -> Path:
    file = folder / "short.json"
    case_file.write(CaseFile(case=SHORT, pair=("v1", "v1")), file)
    return file


def test_run_takes_a_case_file(fake: FakeHarness, tmp_path: Path) -> None:
    assert fake("run", "--case-file", _short_file(tmp_path), "--out", tmp_path / "out") == 0
    (selection,) = fake.selections
    (case,) = selection.cases
    assert (case.id, case.file) == ("greedy.short", "short.json")
    assert case.workload() == SHORT.workload()


def test_run_refuses_a_case_file_given_twice(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    file = _short_file(tmp_path)
    given = ["--case-file", file, "--case-file", file]
    assert fake("run", *given, "--out", tmp_path / "out") == 2
    assert "named twice" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--case-file"], ["shrink"]])
@pytest.mark.parametrize("content", [None, "{}"])
def test_a_file_that_holds_no_case_is_refused(
    fake: FakeHarness, tmp_path: Path, capsys: Capture, command: list[str], content: str | None
) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    assert fake(*command, file, "--out", tmp_path / "out") == 2
    assert "name a file that mrv2-diff shrink or run wrote" in capsys.readouterr().err


def test_shrink_writes_the_case_and_a_test_and_prints_a_script(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    assert fake("shrink", "greedy", "--out", tmp_path) == 0
    assert case_file.read(tmp_path / "greedy.short.json").case.workload() == SHORT.workload()
    assert "def test_greedy_short()" in (tmp_path / "test_greedy_short.py").read_text()
    out = capsys.readouterr().out
    assert "step 0   add   a: prompt 1 2, max_tokens 1, greedy" in out
    assert "seen in 3 of 3 runs of the whole case" in out
    assert _last_line(out) == "shrink: 1 of 1 cases made short, to at most 1 requests and 2 steps"
    (request,) = fake.shrunk
    assert [case.fault for case in request.cases] == [None]


def test_shrink_takes_the_pair_of_its_file(fake: FakeHarness, tmp_path: Path) -> None:
    file = _short_file(tmp_path)
    assert fake("shrink", file, "--out", tmp_path) == 0
    assert fake("shrink", file, "--pair", "v1,mrv2", "--out", tmp_path) == 0
    assert [request.pair for request in fake.shrunk] == [("v1", "v1"), ("v1", "mrv2")]


def test_shrink_plants_faults_of_as_many_cases_as_there_are(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    assert fake("shrink", "--mutants", "2", "--out", tmp_path) == 0
    assert fake("shrink", "--mutant", "second", "--out", tmp_path) == 0
    assert fake("shrink", "churn", "--mutant", "first", "--out", tmp_path) == 0
    planted = [[(case.id, case.fault) for case in request.cases] for request in fake.shrunk]
    assert planted == [
        [("greedy", "first"), ("churn", "third")],
        [("greedy", "second")],
        [("churn", "first")],
    ]
    assert "first  WRONG_VALUE at slots  0 -> 1" in capsys.readouterr().out


def test_shrink_fails_where_a_case_does_not(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    fake.unshrinkable = {"greedy"}
    assert fake("shrink", "greedy", "--out", tmp_path) == 1
    out = capsys.readouterr().out
    assert "greedy: nothing to shrink: the case does not fail" in out
    assert _last_line(out) == "shrink: 0 of 1 cases fail"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a case, a case file, or a fault"),
        (["greeedy"], "no case is called 'greeedy'; choose from: greedy"),
        (["--mutant", "frist"], "no fault is called 'frist'; choose from: first"),
        (["greedy", "--pair", "a,b"], "no pair is called 'a,b'"),
    ],
)
def test_shrink_refuses_what_it_does_not_know(
    fake: FakeHarness, tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert fake("shrink", *arguments, "--out", tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not fake.shrunk


# ---------------------------------------------------------------- mutants


def test_mutants_writes_what_it_found_and_ends_with_both_figures(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    assert fake("mutants", "--out", tmp_path) == 0
    assert fake.tested == [SelfTestRequest(num_alike=2000, seed=0)]
    out = capsys.readouterr().out
    assert _last_line(out) == (
        "mutants: 1 of 1 planted faults found, half of them within 0.5 s; "
        "0 false alarms in 1 cases; 1.0 minutes"
    )
    assert tested.read(tmp_path / tested.FILE) == FOUND


def test_mutants_takes_names_kinds_and_numbers(fake: FakeHarness, tmp_path: Path) -> None:
    options = ("--only", "stale", "--kinds", "ranks", "--seed", "7", "--out", tmp_path)
    assert fake("mutants", *options) == 0
    assert fake("mutants", *options, "--aa", "50") == 0
    asked = SelfTestRequest(only=("stale",), kinds=("ranks",), num_alike=0, seed=7)
    assert fake.tested == [asked, replace(asked, num_alike=50)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"outcome": "survived", "found": ""}, "stale survived"),
        ({"outcome": "otherwise", "found": "ranks"}, "was to be shown by slots, and ranks did"),
    ],
)
def test_a_fault_that_is_not_found_as_expected_fails_the_command(
    fake: FakeHarness, tmp_path: Path, changed: dict[str, str], message: str, capsys: Capture
) -> None:
    finding = replace(FOUND.findings[0], **changed)  # type: ignore[arg-type]  # two text fields
    fake.found = replace(FOUND, findings=(finding,))
    assert fake("mutants", "--out", tmp_path) == 1
    assert message in capsys.readouterr().err


def test_an_alarm_fails_the_command(fake: FakeHarness, tmp_path: Path, capsys: Capture) -> None:
    run = replace(FOUND.alike[0], passes=False, verdict="WRONG_VALUE")
    fake.found = replace(FOUND, alike=(run,))
    assert fake("mutants", "--out", tmp_path) == 1
    captured = capsys.readouterr()
    assert "alike.0.0 (roomy), v1 beside itself: WRONG_VALUE" in captured.err
    assert "1 false alarm in 1 cases" in _last_line(captured.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "stal"], "no fault is called 'stal'; choose from: stale, shifted, wrong"),
        (["--kinds", "rank"], "no kind of fault is called 'rank'; choose from: ranks, slots"),
        (["--aa", "-1"], "--aa is '-1'; it must be a whole number from 0 to 100000"),
        (["--aa", "many"], "--aa is 'many'; it must be a whole number from 0 to 100000"),
        (["--seed", "1.5"], "--seed is '1.5'; it must be a whole number from 0 to 4294967295"),
    ],
)
def test_mutants_refuses_bad_input_in_one_line(
    fake: FakeHarness, tmp_path: Path, options: list[str], message: str, capsys: Capture
) -> None:
    assert fake("mutants", "--out", tmp_path, *options) == 2
    assert capsys.readouterr().err == f"mrv2-diff mutants: {message}\n"
    assert fake.tested == []


def test_the_report_begins_with_how_the_harness_was_tested(
    fake: FakeHarness, tmp_path: Path
) -> None:
    assert fake("run", "--out", tmp_path) == 0
    assert fake("mutants", "--out", tmp_path) == 0
    assert fake("report", tmp_path) == 0
    said = "1 of 1 planted faults found, half of them within 0.5 s; 0 false alarms in 1 cases"
    assert said in (tmp_path / "PARITY.md").read_text().splitlines()[2]
    assert said in (tmp_path / "index.html").read_text()
    harness = json.loads((tmp_path / "summary.json").read_text())["harness"]
    assert (harness["planted"], harness["caught"], harness["alike"], harness["alarmed"]) == (
        1, 1, 1, 0,
    )  # fmt: skip


def test_a_damaged_result_is_refused_by_the_report(
    fake: FakeHarness, tmp_path: Path, capsys: Capture
) -> None:
    assert fake("run", "--out", tmp_path) == 0
    (tmp_path / tested.FILE).write_text("{}")
    assert fake("report", tmp_path) == 2
    assert "is not a result of mrv2-diff mutants" in capsys.readouterr().err
