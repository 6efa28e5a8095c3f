"""What a soak found. Nothing heavy here: the command line reads it."""

import ctypes
import gc
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrv2_diff.schedules.actions import Model, Schedule

LEAST_EVENTS = 100
"""Of each kind that can happen, or a soak proves less than it says."""
LONG_SECONDS = 1800.0
"""A soak that was given so long fails if a kind of event happened less often than that, or memory
was looked at too seldom."""
WHY_NEVER: Mapping[Model, Mapping[str, str]] = {
    "hash": {},
    "tiny": {},
    "lockstep": {
        "steps queued ahead of an output": "vLLM keeps its CPU worker synchronous",
        "next turns of a session": "a case's requests arrive whole",
        "progress taken back": "no KV connector is there to fail",
        "ids that end and arrive in one step": "a case names each request once",
    },
}
"""Kinds of event that cannot happen, and why."""
MAX_GROWTH_BYTES = 16 << 20
"""Resident memory that the last tenth of a soak may have above its first tenth."""
LEAST_MEASURES = 10
"""Looks at memory without which a long soak says nothing of its tenths."""
MAX_GROWTH_OBJECTS = 1000
"""Python objects that it may have more. Runners of different setups differ by tens."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that a request noticed, or that a runner failed on."""

    schedule: Schedule
    error: str


@dataclass(slots=True)
class SoakResult:
    """What a soak did."""

    model: Model = "hash"
    seconds: float = 0.0
    steps: int = 0
    runners: int = 0
    requests: int = 0
    events: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None
    resident_bytes: list[int] = field(default_factory=list)
    """Whenever every request had ended."""
    objects: list[int] = field(default_factory=list)
    """Python objects at the same times."""

    def measure(self) -> None:
        """Note what memory holds now, without what the allocator keeps of what was freed."""
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.objects.append(len(gc.get_objects()))

    @property
    def is_flat(self) -> bool:
        """Whether memory in the last tenth is what it was in the first."""
        if len(self.objects) < 2:
            return True
        first_bytes, last_bytes = ends(self.resident_bytes)
        first_objects, last_objects = ends(self.objects)
        return (
            last_bytes - first_bytes <= MAX_GROWTH_BYTES
            and last_objects - first_objects <= MAX_GROWTH_OBJECTS
        )

    @property
    def rare(self) -> list[str]:
        """Kinds of event that happened too seldom for a long soak."""
        return sorted(kind for kind, times in self.events.items() if times < LEAST_EVENTS)

    @property
    def is_measured(self) -> bool:
        """Whether memory was looked at often enough to say of a long soak that it is flat."""
        return len(self.objects) >= LEAST_MEASURES

    @property
    def passes(self) -> bool:
        """Whether no request noticed anything and memory stayed flat."""
        return self.failure is None and self.is_flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one way of scheduling came out."""

    way: str
    happens: str
    """Kind of event that it is about."""
    times: int
    """How often that happened."""
    num_same: int
    """Requests that returned what they return alone."""
    differing: list[str]
    logprob_difference: float = 0.0
    """The largest between a logprob and that of the request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceResult:
    """Whether requests return the same tokens and logprobs however they are scheduled."""

    num_requests: int
    refused: list[str]
    """Parameters that the runner does not serve, left out."""
    rows: list[Row]
    parameters: Counter[str] = field(default_factory=Counter)
    """How many requests have each parameter."""

    @property
    def passes(self) -> bool:
        """Whether nothing differed, and everything happened that was to.

        The model's logits are exact and a row of its own each, so logprobs may not differ either.
        """
        return all(
            row.times > 0 and not row.differing and row.logprob_difference == 0.0
            for row in self.rows
        )


def invariance_table(result: InvarianceResult) -> str:
    """Return a line for each way of scheduling, for people."""
    lines = [f"{'scheduled':<30} {'as alone':<11} {'logprobs off by':<16} what it is about"]
    for row in result.rows:
        same = f"{row.num_same} of {result.num_requests}"
        lines.append(
            f"{row.way:<30} {same:<11} {row.logprob_difference:<16g} {row.times} {row.happens}"
        )
        lines += [f"  {text}" for text in row.differing]
    if result.parameters:
        drawn = ", ".join(f"{name} {count}" for name, count in sorted(result.parameters.items()))
        lines.append(f"requests with each parameter: {drawn}")
    if result.refused:
        lines.append(f"not served, left out: {', '.join(result.refused)}")
    return "\n".join(lines)


MEANINGS: Mapping[Model, str] = {
    "hash": "HashLM, against its outputs alone",
    "tiny": "a tiny checkpoint in both orders, against V1's tokens",
    "lockstep": "a tiny checkpoint in V1's runner and in ours, step by step",
}
"""What the parts of a soak compare."""


def ends(values: Sequence[int]) -> tuple[float, float]:
    """Return the medians of the first and of the last tenth of some values."""
    tenth = max(1, len(values) // 10)
    return statistics.median(values[:tenth]), statistics.median(values[-tenth:])


def summary(result: SoakResult) -> str:
    """Return what a soak did, for people."""
    lines = [f"{MEANINGS[result.model]}:"]
    lines += [f"{kind:<45} {times:>10,}" for kind, times in sorted(result.events.items())]
    lines += [f"{kind:<45} {'cannot':>10}: {why}"
              for kind, why in WHY_NEVER[result.model].items()]  # fmt: skip
    if result.rare:
        lines.append(f"fewer than {LEAST_EVENTS} times: {', '.join(result.rare)}")
    if result.objects:
        (bytes_1, bytes_2), (objects_1, objects_2) = (
            ends(result.resident_bytes),
            ends(result.objects),
        )
        lines.append(
            f"memory, first tenth and last: {bytes_1 / 2**20:.0f} and {bytes_2 / 2**20:.0f} MiB "
            f"resident, {objects_1:,.0f} and {objects_2:,.0f} Python objects: "
            f"{'flat' if result.is_flat else 'it grows'}"
        )
    if not result.is_measured:
        lines.append(
            f"memory was looked at {len(result.objects)} times; {LEAST_MEASURES} tell whether it "
            "is flat"
        )
    lines.append(
        f"soak of {result.model}: {result.seconds:.0f} s, {result.runners:,} runners, "
        f"{result.requests:,} requests, {result.steps:,} steps, "
        f"{int(result.failure is not None)} divergences"
    )
    return "\n".join(lines)
