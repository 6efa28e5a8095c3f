"""One process's part of testing the harness: jobs in, findings out, one engine at a time."""

import time
from dataclasses import replace

from mrv2_diff import process

process.prepare()

# E402: vLLM reads the environment when it is imported.
from mrv2_diff import mutants, schedule_faults  # noqa: E402
from mrv2_diff.catalog import CASES  # noqa: E402
from mrv2_diff.lockstep.schedules import Varied  # noqa: E402
from mrv2_diff.mutants import Mutant  # noqa: E402
from mrv2_diff.record import Record  # noqa: E402
from mrv2_diff.run import CaseRunner, RunRequest  # noqa: E402
from mrv2_diff.schedules import fault_checks  # noqa: E402
from mrv2_diff.selftest.alike import Alike  # noqa: E402
from mrv2_diff.selftest.jobs import SCHEDULES, Job  # noqa: E402
from mrv2_diff.selftest.result import (  # noqa: E402
    AlikeRun,
    Control,
    Finding,
    Outcome,
    shown,
)
from mrv2_diff.verdict import Verdict  # noqa: E402

RUNNERS = ("v1", "mrv2")
"""Each is run beside itself."""
Found = Control | Finding | AlikeRun

_BLAME = frozenset(
    {
        Verdict.WRONG_SHAPE,
        Verdict.WRONG_VALUE,
        Verdict.MISSING,
        Verdict.OVER_BUDGET,
        Verdict.IGNORED,
        Verdict.REFUSED,
        Verdict.CRASHED,
        Verdict.TIMED_OUT,
    }
)
"""Verdicts that find a fault. One that cannot tell has not found it."""


class Worker:
    """Does jobs one after the other."""

    def __init__(self) -> None:
        self._runner = CaseRunner(
            RunRequest(cases=(), pair=("v1", "mrv2"), model=None, measures=False)
        )

    def close(self) -> None:
        """Close the engine, if there is one."""
        self._runner.close()

    def do(self, job: Job) -> list[Found]:
        """Do one job and return what was found.

        Raises:
            ConfigError: An engine does not start.
        """
        if job.what == "control":
            return [self._control(job.name)]
        if job.what == "mutant":
            return [self._mutant(next(each for each in mutants.MUTANTS if each.id == job.name))]
        if job.what == "schedules":
            return [_schedules()]
        if job.what == "schedule fault":
            return [_schedule_fault(job.name)]
        return [self._alike(case, runner) for case in job.cases for runner in RUNNERS]

    def _control(self, name: str) -> Control:
        self._runner.start(CASES[name])
        started = time.perf_counter()
        record = self._runner.record(CASES[name])
        return Control(
            name=name,
            verdict=record.verdict.value,
            passes=record.verdict.passes,
            summary=record.summary,
            seconds=time.perf_counter() - started,
        )

    def _mutant(self, mutant: Mutant) -> Finding:
        self._runner.start(CASES[mutant.case])
        started = time.perf_counter()
        record = self._runner.record(replace(CASES[mutant.case], fault=mutant.id))
        first = record.first_divergence
        expected = shown(mutant.verdict, mutant.first)
        found = shown_by(record)
        return Finding(
            id=mutant.id,
            kind=mutant.kind,
            title=mutant.title,
            case=mutant.case,
            expected=expected,
            found=found,
            outcome=_outcome(expected, found),
            step=None if first is None else first.step,
            seconds=time.perf_counter() - started,
            summary=record.summary,
        )

    def _alike(self, alike: Alike, runner: str) -> AlikeRun:
        case, varied = alike.case(), Varied(alike.schedule_seed)
        self._runner.start(case)
        started = time.perf_counter()
        record = self._runner.against_itself(case, runner, varied)
        return AlikeRun(
            name=case.id,
            engine=alike.engine,
            runner=runner,
            verdict=record.verdict.value,
            passes=record.verdict.passes,
            summary=record.summary if record.error is None else f"{record.summary}: {record.error}",
            steps=record.steps,
            changes=dict(varied.changes),
            events=record.events,
            seconds=time.perf_counter() - started,
        )


def shown_by(record: Record) -> str:
    """Return what shows a fault in a case's record, or nothing."""
    if record.verdict not in _BLAME:
        return ""
    first = record.first_divergence
    return shown(record.verdict, None if first is None else first.value)


def _outcome(expected: str, found: str) -> Outcome:
    if not found:
        return "survived"
    return "caught" if found == expected else "otherwise"


def _schedules() -> Control:
    started = time.perf_counter()
    fault_checks.prepare()
    found = fault_checks.false_finds()
    return Control(
        name=SCHEDULES,
        verdict="MATCH" if not found else "WRONG_VALUE",
        passes=not found,
        summary=f"found by {', '.join(found)}" if found else "no check finds anything",
        seconds=time.perf_counter() - started,
    )


def _schedule_fault(name: str) -> Finding:
    fault = next(each for each in schedule_faults.SCHEDULE_FAULTS if each.id == name)
    fault_checks.prepare()
    started = time.perf_counter()
    with fault.apply():
        found = fault_checks.found_by(fault) or ""
    return Finding(
        id=fault.id,
        kind=fault.kind,
        title=fault.title,
        case=SCHEDULES,
        expected=fault.found_by,
        found=found,
        outcome=_outcome(fault.found_by, found),
        step=None,
        seconds=time.perf_counter() - started,
        summary=f"found by {found}" if found else "no check finds anything",
    )
