"""What makes two failures the same, and how often one was seen."""

from dataclasses import dataclass

from mrv2_diff.record import Record
from mrv2_diff.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The way in which a case fails."""

    verdict: Verdict
    value: str | None = None
    """First value of the step chain that differs."""
    mode: str = ""
    """The pass in which it does. A fault of what a pass leaves behind is another one."""
    detail: str = ""
    """The exception's type of a crash; what was ignored or missing where no value says it."""

    def __str__(self) -> str:
        at = f" at {self.value} ({self.mode})" if self.value else ""
        return f"{self.verdict}{at}" + (f" ({self.detail})" if self.detail else "")


def signature_of(record: Record) -> Signature:
    """Return the way in which a record's case ended."""
    first = record.first_divergence
    detail = ""
    if record.verdict is Verdict.CRASHED:
        detail = _exception(record.error or "")
    elif record.verdict is Verdict.IGNORED or (record.verdict is Verdict.MISSING and not first):
        detail = record.summary.partition("; with the planted fault")[0]
    return Signature(
        verdict=record.verdict,
        value=first.value if first is not None else None,
        mode=first.mode if first is not None else "",
        detail=detail,
    )


def _exception(traceback: str) -> str:
    """Return the type that the last unindented line of a traceback names."""
    lines = [line for line in traceback.strip().splitlines() if line and not line[0].isspace()]
    named = [line for line in lines if not line.startswith(("Traceback", "The above", "During"))]
    return named[0].partition(":")[0] if named else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """How often a failure was seen in repeated runs of one case."""

    seen: int
    runs: int

    @property
    def steady(self) -> bool:
        """Whether it was seen each time."""
        return self.seen == self.runs

    def __str__(self) -> str:
        return f"{self.seen} of {self.runs} runs"


def needed(vote: Vote, repeat: int) -> int:
    """Return how many of `repeat` runs must show a failure for a shorter case to count.

    At least half as often as in the case that was given: one that fails once in a thousand would
    help nobody. A failure that was seen each time needs every run.
    """
    if vote.steady:
        return repeat
    return max(1, repeat * vote.seen // (2 * vote.runs))
