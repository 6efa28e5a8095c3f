"""Run each tier of tests in a process of its own, and count what ran.

A tier proves something that the others cannot, so one that ran nothing is a failure, and so is a
test that was skipped anywhere but in the `gpu` tier. Each tier has its own process because
`TRITON_INTERPRET` is read when a kernel is decorated, and because vLLM holds state per process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent

TIME_LIMIT_S = 2400
"""Per tier. On two cores the slowest takes about a third of it; a hung engine ends here."""

CHECKS: tuple[tuple[str, ...], ...] = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("mypy",),
    ("lint-imports", "--no-cache", "--no-logo"),
)


@dataclass(frozen=True)
class Tier:
    """What to select, and the environment that makes it this tier."""

    name: str
    paths: tuple[str, ...] = ("diff_tests",)
    marks: str = "not vllm and not gpu"
    ignored: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    may_skip: bool = False
    beside: bool = False
    """Whether it runs beside the other tiers rather than after them."""


HARNESS = ("diff_tests/test_false_alarms.py", "diff_tests/test_mutants.py")
TIERS = (
    Tier("reference", ignored=("diff_tests/test_compile.py",)),
    Tier("interpret", paths=("diff_tests/test_ops.py",), environment={"TRITON_INTERPRET": "1"}),
    Tier("compile", paths=("diff_tests/test_compile.py",)),
    Tier("harness", paths=HARNESS, marks="vllm and not gpu"),
    Tier("vllm", marks="vllm and not gpu", ignored=HARNESS, beside=True),
    Tier("gpu", marks="gpu", may_skip=True),
)
_PRINTING = threading.Lock()
_STOPPED = threading.Event()
"""Set once no further tier is to start."""
_RUNNING: set[subprocess.Popen[bytes]] = set()
"""Processes that an interrupt has to end."""
NAMES = ("checks", *(tier.name for tier in TIERS))


@dataclass(frozen=True)
class Outcome:
    """The counts of one tier, and why it fails where it does."""

    tier: str
    passed: int
    failed: int
    skipped: int
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.tier}: {self.passed} passed, {self.failed} failed, {self.skipped} skipped"
            + "".join(f"\n  {fault}" for fault in self.faults)
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the named tiers, or all; print a table, then one line of totals."""
    parser = argparse.ArgumentParser(
        prog="run_tiers.py", description="Run tiers of tests, each in a process of its own."
    )
    parser.add_argument(
        "tiers", nargs="*", metavar="TIER", help=f"one of {', '.join(NAMES)}; all when none"
    )
    names = parser.parse_args(arguments).tiers or list(NAMES)
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"unknown tier {', '.join(unknown)}; choose from {', '.join(NAMES)}")
    outcomes = _run_lanes(names)
    print()
    for outcome in outcomes:
        print(outcome)
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(any(outcome.failed or outcome.faults for outcome in outcomes))


def _run_lanes(names: list[str]) -> list[Outcome]:
    """Run tiers one after the other, and beside them those that may; most of a tier is one thread.

    Where two run side by side, what each one prints is shown when it has ended.
    """
    beside = {tier.name for tier in TIERS if tier.beside}
    lanes = [[name for name in names if (name in beside) is aside] for aside in (False, True)]
    if not all(lanes):
        return [_run(name) for name in names]
    outcomes: dict[str, Outcome] = {}

    def run_lane(lane: list[str]) -> None:
        for name in lane:
            if _STOPPED.is_set():
                return
            with tempfile.TemporaryFile("w+b") as shown:
                outcomes[name] = _run(name, shown)
                with _PRINTING:
                    shown.seek(0)
                    shutil.copyfileobj(shown, sys.stdout.buffer)
                    sys.stdout.flush()

    with ThreadPoolExecutor(len(lanes)) as pool:
        running = [pool.submit(run_lane, lane) for lane in lanes]
        try:
            for lane in running:
                lane.result()
        except BaseException:
            _STOPPED.set()
            for process in list(_RUNNING):
                _end_group(process)
            raise
    return [outcomes[name] for name in names]


def _run(name: str, shown: IO[bytes] | None = None) -> Outcome:
    return _run_checks(shown) if name == "checks" else _run_tier(name, shown)


def _run_checks(shown: IO[bytes] | None) -> Outcome:
    """Format, lint, types and import contracts; each tool counts as one."""
    _announce("checks", shown)
    tools = Path(sys.executable).parent
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "compat", "diff_tests"))
    environment = {**os.environ, "PYTHONPATH": path}
    failed = []
    for tool, *rest in CHECKS:
        _say(f"$ {tool} {' '.join(rest)}", shown)
        if _wait([str(tools / tool), *rest], environment, shown) != 0:
            failed.append(tool)
    return Outcome("checks", len(CHECKS) - len(failed), len(failed), 0)


def _run_tier(name: str, shown: IO[bytes] | None) -> Outcome:
    """Run pytest on one tier and read its counts back from the JUnit file that it writes."""
    tier = next(tier for tier in TIERS if tier.name == name)
    _announce(name, shown)
    missing = [path for path in tier.paths if not (ROOT / path).exists()]
    if missing:
        return Outcome(name, 0, 0, 0, (f"no such file: {', '.join(missing)}",))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.update(tier.environment)
    if shown is not None:  # each of two tiers has one core; threads of OpenMP would fight for both
        environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="mrv2-tier-") as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", tier.marks, *tier.paths]
        command += [f"--ignore={path}" for path in tier.ignored]
        command += [f"--junit-xml={report}"]
        status = _wait(command, environment, shown)
        return read_outcome(tier, report, status)


def read_outcome(tier: Tier, report: Path, status: int) -> Outcome:
    """Turn pytest's report and exit status into counts and faults."""
    if not report.is_file():
        return Outcome(tier.name, 0, 0, 0, (f"pytest ended with status {status}, no report",))
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total = sum(int(suite.get("tests", 0)) for suite in suites)
    skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    failed = sum(int(suite.get(kind, 0)) for suite in suites for kind in ("failures", "errors"))
    passed = total - skipped - failed
    faults = []
    if passed + failed == 0 and not tier.may_skip:
        faults.append("no test ran: a tier that proves nothing is a failure")
    if skipped and not tier.may_skip:
        faults.append(f"{skipped} skipped: only tests marked gpu may be, see the reasons above")
    # 5 is pytest's "nothing was selected", which the lines above judge.
    if status not in (0, 5) and not failed:
        faults.append(f"pytest ended with status {status}")
    return Outcome(tier.name, passed, failed, skipped, tuple(faults))


def _announce(name: str, shown: IO[bytes] | None) -> None:
    _say(f"\n== {name} " + "=" * (70 - len(name)), shown)


def _say(text: str, shown: IO[bytes] | None) -> None:
    if shown is None:
        print(text, flush=True)
    else:
        shown.write(f"{text}\n".encode())
        shown.flush()


def _wait(command: list[str], environment: dict[str, str], shown: IO[bytes] | None) -> int:
    """Run a command with its output shown; end it, and what it started, at the time limit."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=shown,
        stderr=None if shown is None else subprocess.STDOUT,
    )
    _RUNNING.add(process)
    try:
        status = process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        _say(f"stopped: longer than {TIME_LIMIT_S} s", shown)
        status = 124
    finally:
        _RUNNING.discard(process)
        _end_group(process)
    if shown is not None:
        shown.seek(0, os.SEEK_END)
    _say(f"({time.monotonic() - began:.0f} s)", shown)
    return status


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the session that `process` leads: an engine may outlive its test."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
