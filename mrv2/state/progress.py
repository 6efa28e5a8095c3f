"""How many tokens of each row are computed: counted on the device, bounded on the host.

Without drafts the host knows what the device will count: every token that is run stays. With drafts
some may be rejected, and until the host has seen a step's output it knows two bounds only. The
upper one is the scheduler's, who takes drafts for accepted until told. The lower one takes those
for rejected whose step's output nobody has waited for.

The scheduler's word about a row is compared with these. Between the bounds it says nothing new, and
the device's own count stands. Below them progress was taken back, and the device is told.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
_NONE = np.zeros(0, dtype=np.intp)


class Outcome(Protocol):
    """What became of a step's drafts; a `PendingOutput` knows."""

    def counts(self) -> Int32 | None:
        """Return how many tokens each request was given, [num_reqs].

        None where nobody has waited for the step yet.
        """

    def committed(self) -> list[list[int]]:
        """Wait, and return the tokens that each request was given."""


@dataclass(slots=True, kw_only=True)
class _DraftedStep:
    """A step with drafts whose outcome is not counted in yet."""

    rows: Int32
    lives: Int32
    """[num_reqs]. Which life of each row it was."""
    outcome: Outcome


class Progress:
    """Bounds of each row's progress, as it will be once everything queued has run.

    Args:
        num_rows: Rows, the idle one among them.
        may_draft: Whether steps may have drafts. Without, the bounds are one and cost nothing.
    """

    def __init__(self, num_rows: int, *, may_draft: bool) -> None:
        self._upper = np.zeros(num_rows, dtype=np.int32)
        self._slack = np.zeros(num_rows, dtype=np.int32)
        """Upper bound less the lower one."""
        self._lives = np.zeros(num_rows, dtype=np.int32)
        self._may_draft = may_draft
        self._drafted: deque[_DraftedStep] = deque()
        self._advance: tuple[int, Int32, Int32] | None = None
        self._num_advances = 0
        """How often the last advance is to be added to `_upper`: a batch that only goes on advances
        by the same arrays in each step, and nobody asks in between."""

    @property
    def upper(self) -> Int32:
        """[num_rows]. At most so many tokens of each row will have been computed."""
        self._apply_advances()
        return self._upper

    def set(self, row: int, num_computed_tokens: int) -> None:
        """Take what the device is told of a row."""
        self._apply_advances()
        self._upper[row] = num_computed_tokens
        if self._may_draft:
            self._slack[row] = 0
            self._lives[row] += 1

    def advance(self, batch_id: int, rows: Int32, num_tokens: Int32) -> None:
        """Note that a queued step runs more tokens of each row.

        The arrays are kept: they must not change.

        Args:
            batch_id: Names the two arrays: they are the same in all steps that name it. 0 names
                none.
            rows: [num_reqs].
            num_tokens: [num_reqs].
        """
        last = self._advance
        if last is None or not batch_id or last[0] != batch_id:
            self._apply_advances()
            self._advance = batch_id, rows, num_tokens
        self._num_advances += 1

    def retreat(self, rows: Int32, num_tokens: Int32) -> None:
        """Take back an `advance`: its step did not run."""
        self._apply_advances()
        self._upper[rows] -= num_tokens

    def expect_drafts(self, rows: Int32, num_drafts: Int32, outcome: Outcome) -> None:
        """Note that a step that was advanced by may reject drafts.

        Args:
            rows: [num_reqs].
            num_drafts: [num_reqs]. Drafts that each request runs.
            outcome: Says how many tokens each was given, once somebody has waited for the step.
        """
        self._slack[rows] += num_drafts
        self._drafted.append(_DraftedStep(rows=rows, lives=self._lives[rows], outcome=outcome))

    def differing(self, rows: Int32, num_computed_tokens: Int32) -> npt.NDArray[np.intp]:
        """Return which of the scheduler's counts the device does not have, and take the others.

        Args:
            rows: [num_reqs].
            num_computed_tokens: [num_reqs], the scheduler's.

        Returns:
            Places in `rows`, ascending.
        """
        upper = self.upper[rows]
        if not self._may_draft:
            differs = upper != num_computed_tokens
            return np.flatnonzero(differs) if differs.any() else _NONE
        self._count_seen()
        lower = upper - self._slack[rows]
        agrees = (lower <= num_computed_tokens) & (num_computed_tokens <= upper)
        taken = rows[agrees]
        self._slack[taken] -= (upper - num_computed_tokens)[agrees]
        self._upper[taken] = num_computed_tokens[agrees]
        return np.flatnonzero(~agrees)

    def is_exact(self, rows: Int32) -> bool:
        """Say whether the bounds of each of these rows are one."""
        return not (self._may_draft and self._slack[rows].any())

    def exact(self, rows: Int32) -> Int32:
        """Wait for every step with drafts, and return the counts of rows.

        Args:
            rows: [num_reqs].
        """
        for step in self._drafted:
            step.outcome.committed()
        self._count_seen()
        lower: Int32 = self.upper[rows] - self._slack[rows]
        return lower

    def _count_seen(self) -> None:
        """Raise the lower bounds by what is known of steps with drafts, oldest first."""
        while self._drafted:
            step = self._drafted[0]
            counts = step.outcome.counts()
            if counts is None:
                return
            self._drafted.popleft()
            lives = self._lives[step.rows] == step.lives
            accepted = np.maximum(counts - 1, 0)
            self._slack[step.rows[lives]] -= accepted[lives]

    def _apply_advances(self) -> None:
        if self._advance is not None:
            _, rows, num_tokens = self._advance
            self._upper[rows] += self._num_advances * num_tokens
            self._advance = None
            self._num_advances = 0
