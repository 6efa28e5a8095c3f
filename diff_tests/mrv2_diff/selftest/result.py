"""What testing the harness found, as a file and as text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from mrv2_diff.verdict import Verdict

FORMAT = 1
"""Version of the file's layout; a reader refuses others."""
FILE = "mutants.json"
"""Its name in the folder of a run."""
ALARMS_PER_CASE = 1 / 2000
"""Largest share of cases in which nothing is wrong that may end in an alarm."""

Outcome = Literal["caught", "otherwise", "survived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A case, or all checks of schedules, without a fault."""

    name: str
    verdict: str
    passes: bool
    summary: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one planted fault."""

    id: str
    kind: str
    title: str
    case: str
    """Case in lockstep with V1, or `schedules` for a check over the toy model."""
    expected: str
    """What had to show it, as it was written down beforehand: a value of the chain, a verdict or a
    check."""
    found: str
    """What showed it; empty if nothing did."""
    outcome: Outcome
    """`caught` as expected, `otherwise` than expected, or `survived`."""
    step: int | None
    """Step of the first divergence, where there is one."""
    seconds: float
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeRun:
    """A case in which nothing is wrong, of one runner beside itself."""

    name: str
    engine: str
    runner: str
    verdict: str
    passes: bool
    summary: str
    steps: int
    changes: dict[str, int]
    """Steps that got another order, other neighbours or other chunks."""
    events: dict[str, int]
    seconds: float

    @property
    def differs(self) -> bool:
        """Whether any step of it was given in another form at all."""
        return sum(self.changes.values()) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """All of one run."""

    controls: tuple[Control, ...]
    findings: tuple[Finding, ...]
    alike: tuple[AlikeRun, ...]
    num_asked: int
    """Cases of `alike` that were asked for."""
    seed: int
    seconds: float
    environment: dict[str, str]
    format: int = FORMAT

    def ended(self, outcome: Outcome) -> list[Finding]:
        """Return the faults with this outcome."""
        return [finding for finding in self.findings if finding.outcome == outcome]

    @property
    def alarms(self) -> list[AlikeRun]:
        """Runs in which nothing is wrong and that do not pass."""
        return [run for run in self.alike if not run.passes]

    @property
    def num_alike(self) -> int:
        """Cases that were run, each in every runner, and not in the identical form."""
        return len({run.name for run in self.alike if run.differs})

    @property
    def num_alarmed(self) -> int:
        """Cases with an alarm in any runner."""
        return len({run.name for run in self.alarms})

    @property
    def faults(self) -> list[str]:
        """Why the harness is not to be trusted; nothing if it is."""
        said = [
            f"{control.name}, without a fault: {control.verdict}: {control.summary}"
            for control in self.controls
            if not control.passes
        ]
        said += [
            f"{finding.id} survived: {finding.title}; {finding.case} says: {finding.summary}"
            for finding in self.ended("survived")
        ]
        said += [
            f"{finding.id} was to be shown by {finding.expected}, and {finding.found} did: "
            f"{finding.summary}"
            for finding in self.ended("otherwise")
        ]
        if self.num_alarmed > ALARMS_PER_CASE * self.num_alike:
            said += [f"{run.name} ({run.engine}), {run.runner} beside itself: {run.verdict}: "
                     f"{run.summary}" for run in self.alarms]  # fmt: skip
        if self.num_alike < self.num_asked:
            said.append(f"{self.num_alike} of {self.num_asked} cases ran in another form")
        if not self.findings and not self.alike:
            said.append("nothing was run")
        return said

    @property
    def passes(self) -> bool:
        """Whether every fault was caught as expected, every control passes, and alarms are few."""
        return not self.faults


def write(result: SelfTest, path: Path) -> None:
    """Write a result, whole or not at all.

    Raises:
        OSError: The disk is full or the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(asdict(result)), indent=1) + b"\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> SelfTest:
    """Return the result in a file.

    Raises:
        ValueError: The file holds none of this format.
        OSError: It cannot be read.
    """
    try:
        raw: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if raw.get("format") != FORMAT:
            raise ValueError(f"format is {raw.get('format')}, this reader knows {FORMAT}")
        return msgspec.convert(raw, SelfTest)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{path} is not a result of mrv2-diff mutants: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The figures that a report begins with."""

    planted: int
    caught: int
    otherwise: int
    survived: int
    alike: int
    alarmed: int
    median_seconds: float | None
    """Of a fault that was found, from the start of its case to its verdict."""
    seconds: float
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Both figures in one sentence."""
        return f"{self.mutants_text}; {self.alarms_text}"

    @property
    def mutants_text(self) -> str:
        """How many faults were found."""
        also = f", {self.otherwise} by another value than expected" if self.otherwise else ""
        left = f", {self.survived} not found" if self.survived else ""
        fast = (
            ""
            if self.median_seconds is None
            else f", half of them within {self.median_seconds:.1f} s"
        )
        found = self.caught + self.otherwise
        return f"{found} of {self.planted} planted faults found{fast}{also}{left}"

    @property
    def alarms_text(self) -> str:
        """How often nothing was wrong and something was found."""
        plural = "alarm" if self.alarmed == 1 else "alarms"
        return f"{self.alarmed} false {plural} in {self.alike:,} cases"


def head(result: SelfTest) -> Head:
    """Return the figures of a result."""
    times = sorted(finding.seconds for finding in result.findings if finding.found)
    return Head(
        planted=len(result.findings),
        caught=len(result.ended("caught")),
        otherwise=len(result.ended("otherwise")),
        survived=len(result.ended("survived")),
        alike=result.num_alike,
        alarmed=result.num_alarmed,
        median_seconds=times[len(times) // 2] if times else None,
        seconds=result.seconds,
        facts=result.environment | {"seed": str(result.seed)},
    )


def shown(verdict: Verdict, first: str | None) -> str:
    """Return in one word what shows a fault: a value of the chain, with any verdict but the usual.

    Args:
        verdict: On its case.
        first: Value that differs first; None where none does.
    """
    if verdict is Verdict.WRONG_VALUE:
        return first or "near_ties"  # the one wrong value that no step has alone
    named = verdict.value.lower()
    return named if first is None else f"{named} {first}"


def finding_text(finding: Finding) -> str:
    """Return one line about a fault."""
    where = "" if finding.step is None else f" in step {finding.step}"
    by = {
        "caught": f"caught by {finding.found}{where}",
        "otherwise": f"caught by {finding.found}{where}, not by {finding.expected}",
        "survived": f"SURVIVED, {finding.expected} was to show it",
    }[finding.outcome]
    return f"{finding.id}: {by} of {finding.case}, {finding.seconds:.1f} s"


def table(result: SelfTest) -> str:
    """Return what was found by kind of fault, and in which forms the cases without one ran."""
    lines = []
    for kind in dict.fromkeys(finding.kind for finding in result.findings):
        here = [finding for finding in result.findings if finding.kind == kind]
        shown = Counter(finding.found for finding in here if finding.found)
        by = ", ".join(f"{name} {count}" for name, count in shown.most_common())
        found = sum(finding.outcome != "survived" for finding in here)
        lines.append(f"  {kind:<20} {found} of {len(here)}   {by}")
    if result.alike:
        lines += _alike_lines(result.alike)
    return "\n".join(lines)


def _alike_lines(runs: Sequence[AlikeRun]) -> list[str]:
    lines = []
    for runner in dict.fromkeys(run.runner for run in runs):
        here = [run for run in runs if run.runner == runner]
        changes: Counter[str] = Counter()
        events: Counter[str] = Counter()
        for run in here:
            changes.update(run.changes)
            events.update(run.events)
        verdicts = Counter(run.verdict for run in here)
        lines.append(
            f"  {runner} beside itself: {len(here):,} cases, "
            f"{sum(run.steps for run in here):,} steps, of which "
            + ", ".join(f"{count:,} in other {what}" for what, count in changes.items())
            + f"; {events['preemptions']:,} preemptions, {events['cache_hits']:,} cached prefixes; "
            + ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.items())
        )
    return lines


def conclusion(result: SelfTest) -> str:
    """Return the last line of a run."""
    return f"mutants: {head(result).text}; {result.seconds / 60:.1f} minutes"
