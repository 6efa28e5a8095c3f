"""Test the harness: plant every fault, and run cases in which nothing is wrong."""

import time
from collections.abc import Callable

from mrv2.errors import ConfigError
from mrv2_diff.environment import collect
from mrv2_diff.lockstep import device
from mrv2_diff.mutants import Mutant
from mrv2_diff.schedule_faults import ScheduleFault
from mrv2_diff.selftest.jobs import SCHEDULES, Job
from mrv2_diff.selftest.pool import answers
from mrv2_diff.selftest.request import SelfTestRequest
from mrv2_diff.selftest.result import (
    AlikeRun,
    Control,
    Finding,
    SelfTest,
    finding_text,
    shown,
)
from mrv2_diff.selftest.todo import chosen, jobs

Say = Callable[[str], None]

_SAY_EVERY = 200
"""Cases in which nothing is wrong."""


def selftest(request: SelfTestRequest, say: Say) -> SelfTest:
    """Run it all, and say of each fault how it was found.

    Raises:
        ConfigError: vLLM's device is no CPU.
    """
    if device.kind() != "cpu":
        raise ConfigError(
            "faults are put into what a CPU runs in place of kernels, and vLLM's device here is "
            f"{device.kind()!r}: test the harness where vLLM is built for a CPU"
        )
    started = time.perf_counter()
    mutants, faults = chosen(request.only, request.kinds) if request.plants else ([], [])
    todo = jobs(mutants, faults, request.num_alike, request.seed)
    controls: list[Control] = []
    findings: list[Finding] = []
    alike: list[AlikeRun] = []
    said = 0
    for job, found in answers(todo, num_workers=request.num_workers):
        told = _failed(job, found, mutants, faults) if isinstance(found, str) else found
        for each in told:
            if isinstance(each, Control):
                controls.append(each)
            elif isinstance(each, Finding):
                findings.append(each)
                say(finding_text(each))
            elif isinstance(each, AlikeRun):
                alike.append(each)
                if not each.passes:
                    say(f"ALARM {each.name} ({each.engine}), {each.runner}: {each.summary}")
        done = len({run.name for run in alike}) // _SAY_EVERY
        if done > said:
            said = done
            say(f"{done * _SAY_EVERY:,} cases in which nothing is wrong")
    names = [*(mutant.id for mutant in mutants), *(fault.id for fault in faults)]
    return SelfTest(
        controls=tuple(controls),
        findings=tuple(sorted(findings, key=lambda finding: names.index(finding.id))),
        alike=tuple(sorted(alike, key=lambda run: (int(run.name.split(".")[-1]), run.runner))),
        num_asked=request.num_alike,
        seed=request.seed,
        seconds=time.perf_counter() - started,
        environment=collect("cpu") | {"workers": str(request.num_workers)},
    )


def _failed(
    job: Job, why: str, mutants: list[Mutant], faults: list[ScheduleFault]
) -> list[Control | Finding | AlikeRun]:
    """Return what is noted of a job that its process did not answer."""
    if job.what in ("control", "schedules"):
        return [Control(name=job.name, verdict="CRASHED", passes=False, summary=why, seconds=0.0)]
    if job.what == "alike":
        return [
            AlikeRun(
                name=case.case().id,
                engine=case.engine,
                runner="any",
                verdict="CRASHED",
                passes=False,
                summary=why,
                steps=0,
                changes={},
                events={},
                seconds=0.0,
            )
            for case in job.cases
        ]
    return [_unanswered(job, why, mutants, faults)]


def _unanswered(job: Job, why: str, mutants: list[Mutant], faults: list[ScheduleFault]) -> Finding:
    """A fault that takes the whole process with it is seen, but not as it was to be."""
    mutant = next((each for each in mutants if each.id == job.name), None)
    if mutant is not None:
        kind, title, case = mutant.kind, mutant.title, mutant.case
        expected = shown(mutant.verdict, mutant.first)
    else:
        fault = next(each for each in faults if each.id == job.name)
        kind, title, case, expected = fault.kind, fault.title, SCHEDULES, fault.found_by
    return Finding(
        id=job.name,
        kind=kind,
        title=title,
        case=case,
        expected=expected,
        found="the process",
        outcome="otherwise",
        step=None,
        seconds=0.0,
        summary=why,
    )
