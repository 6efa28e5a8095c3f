"""Run each tier of tests in a process of its own, and count what ran.

A tier proves something that the others cannot, so one that ran nothing is a failure, and so is a
test that was skipped anywhere but in the `gpu` tier. Each tier has its own process because
`TRITON_INTERPRET` is read when a kernel is decorated, and because vLLM holds state per process.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TIME_LIMIT_S = 900
"""Per tier. On two cores the slowest takes a third of it; a hung engine ends here."""

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


TIERS = (
    Tier("reference", ignored=("diff_tests/test_compile.py",)),
    Tier("interpret", paths=("diff_tests/test_ops.py",), environment={"TRITON_INTERPRET": "1"}),
    Tier("compile", paths=("diff_tests/test_compile.py",)),
    Tier("vllm", marks="vllm and not gpu"),
    Tier("gpu", marks="gpu", may_skip=True),
)
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
    outcomes = [_run_checks() if name == "checks" else _run_tier(name) for name in names]
    print()
    for outcome in outcomes:
        print(outcome)
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(any(outcome.failed or outcome.faults for outcome in outcomes))


def _run_checks() -> Outcome:
    """Format, lint, types and import contracts; each tool counts as one."""
    _announce("checks")
    tools = Path(sys.executable).parent
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "compat", "diff_tests"))
    environment = {**os.environ, "PYTHONPATH": path}
    failed = []
    for tool, *rest in CHECKS:
        print(f"$ {tool} {' '.join(rest)}", flush=True)
        if _wait([str(tools / tool), *rest], environment) != 0:
            failed.append(tool)
    return Outcome("checks", len(CHECKS) - len(failed), len(failed), 0)


def _run_tier(name: str) -> Outcome:
    """Run pytest on one tier and read its counts back from the JUnit file that it writes."""
    tier = next(tier for tier in TIERS if tier.name == name)
    _announce(name)
    missing = [path for path in tier.paths if not (ROOT / path).exists()]
    if missing:
        return Outcome(name, 0, 0, 0, (f"no such file: {', '.join(missing)}",))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.update(tier.environment)
    with tempfile.TemporaryDirectory(prefix="mrv2-tier-") as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", tier.marks, *tier.paths]
        command += [f"--ignore={path}" for path in tier.ignored]
        command += [f"--junit-xml={report}"]
        status = _wait(command, environment)
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


def _announce(name: str) -> None:
    print(f"\n== {name} " + "=" * (70 - len(name)), flush=True)


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Run a command with its output shown; end it, and what it started, at the time limit."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"stopped: longer than {TIME_LIMIT_S} s", flush=True)
        status = 124
    finally:
        _end_group(process)
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
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
