"""What a comparison can conclude, and where two runners first differ."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of one case.

    A run passes with the first five. The last three of these are never a default: a case names what
    it expects, and an independent right value must show it.
    """

    MATCH = "MATCH"
    """Every compared value agrees within its floor."""
    NEAR_TIE = "NEAR_TIE"
    """Tokens differ only where their logits lie inside the measured floor, and not many."""
    KNOWN_DIFFERENCE = "KNOWN_DIFFERENCE"
    """Differs as a decision record says it does, and has the value that the record means."""
    REFERENCE_WRONG = "REFERENCE_WRONG"
    """V1 is off the right value, which is computed apart from both, and the candidate has it."""
    REFERENCE_CRASHED = "REFERENCE_CRASHED"
    """V1 raises, alone in its process, and the candidate does the same work right."""
    WRONG_SHAPE = "WRONG_SHAPE"
    WRONG_VALUE = "WRONG_VALUE"
    MISSING = "MISSING"
    """One side produced a value that the other did not, or nothing was compared."""
    OVER_BUDGET = "OVER_BUDGET"
    """Memory or latency above the case's budget."""
    IGNORED = "IGNORED"
    """A parameter was accepted and had no effect."""
    REFUSED = "REFUSED"
    CRASHED = "CRASHED"
    TIMED_OUT = "TIMED_OUT"
    INCONCLUSIVE = "INCONCLUSIVE"
    """Nothing can be said: the noise is larger than the bound, or the reference failed where no
    case expects it."""
    NOT_RUN = "NOT_RUN"

    @property
    def passes(self) -> bool:
        """Whether a run that ends so may exit 0."""
        return self in _PASSES


_PASSES = frozenset(
    {
        Verdict.MATCH,
        Verdict.NEAR_TIE,
        Verdict.KNOWN_DIFFERENCE,
        Verdict.REFERENCE_WRONG,
        Verdict.REFERENCE_CRASHED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One of the values around a divergence, on both sides."""

    index: int
    """As a divergence's."""
    reference: str
    candidate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first value of the step chain in which the candidate left the reference."""

    mode: str
    """`forced` (the reference's tokens are committed) or `free`."""
    step: int
    """Scheduled step of the case, counted from 0."""
    value: str
    """Name of the value in the step chain: `input_ids`, `positions`, `slots`, `logits`, ..."""
    req_id: str
    index: int
    """Flat index within that request's part of the value."""
    reference: str
    candidate: str
    policy: str
    """The rule that was broken, with its bound."""
    around: tuple[Neighbour, ...] = ()
    """The values around it in the request's part, itself included; none of a structure."""

    def around_lines(self, pair: tuple[str, str]) -> list[str]:
        """Return the values around it as a table for people, with a mark at the one that differs.

        Args:
            pair: Names of reference and candidate.
        """
        if not self.around:
            return []
        cells = [("at", *pair)] + [(str(n.index), n.reference, n.candidate) for n in self.around]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in cells
        ]
        marks = [""] + ["  <" if n.reference != n.candidate else "" for n in self.around]
        return [line + mark for line, mark in zip(lines, marks, strict=True)]
