"""Pieces of work that a process can do alone, and who does which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mrv2_diff.selftest.alike import Alike

What = Literal["control", "mutant", "schedules", "schedule fault", "alike"]

SCHEDULES = "schedules"
"""What findings by a check over the toy model have for a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A piece of work."""

    what: What
    name: str
    """Of a case, a fault, or of the first of some cases in which nothing is wrong."""
    group: str
    """Jobs of one group need one engine."""
    cost: float
    """Roughly, in seconds; for the order alone."""
    cases: tuple[Alike, ...] = ()


class Dealer:
    """Deals jobs to workers such that each stays with an engine, and none is idle.

    Args:
        todo: The jobs.
    """

    def __init__(self, todo: Sequence[Job]) -> None:
        self._left: dict[str, list[Job]] = {}
        for job in todo:
            self._left.setdefault(job.group, []).append(job)
        self._groups: dict[int, str] = {}

    def next(self, worker: int) -> Job | None:
        """Return a worker's next job; None if there is none.

        It goes on with its engine. Then it takes the one with most work that no other has, and
        last it helps another one.
        """
        group = self._groups.get(worker)
        if group is None or not self._left.get(group):
            open_groups = [name for name, left in self._left.items() if left]
            if not open_groups:
                return None
            taken = {name for other, name in self._groups.items() if other != worker}
            group = max(open_groups, key=lambda name: (name not in taken, self._cost(name)))
            self._groups[worker] = group
        return self._left[group].pop(0)

    def leave(self, worker: int) -> None:
        """Note that a worker's engine is gone."""
        self._groups.pop(worker, None)

    def _cost(self, group: str) -> float:
        return sum(job.cost for job in self._left[group])
