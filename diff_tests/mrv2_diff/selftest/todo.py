"""What there is to do: the faults that are asked for, and the jobs that they make."""

from collections.abc import Iterable, Sequence

from mrv2_diff.catalog import CASES
from mrv2_diff.mutants import MUTANTS, Mutant
from mrv2_diff.schedule_faults import SCHEDULE_FAULTS, ScheduleFault
from mrv2_diff.selftest.alike import ENGINES, alike
from mrv2_diff.selftest.jobs import SCHEDULES, Job

ALIKE_AT_ONCE = 10
"""Cases of one job, so that the two processes can share an engine's work."""


def jobs(
    mutants: Sequence[Mutant], faults: Sequence[ScheduleFault], num_alike: int, seed: int
) -> list[Job]:
    """Return the work of a run, each case's control before its faults."""
    made = []
    for case in dict.fromkeys(mutant.case for mutant in mutants):
        group = str(CASES[case].engine)
        made.append(Job(what="control", name=case, group=group, cost=2.0))
        made += [
            Job(what="mutant", name=mutant.id, group=group, cost=1.0)
            for mutant in mutants
            if mutant.case == case
        ]
    if faults:
        made.append(Job(what="schedules", name=SCHEDULES, group=SCHEDULES, cost=5.0))
        made += [
            Job(what="schedule fault", name=fault.id, group=SCHEDULES, cost=1.0) for fault in faults
        ]
    for name, engine in ENGINES.items():
        here = [case for case in alike(num_alike, seed) if case.engine == name]
        made += [
            Job(
                what="alike",
                name=f"alike.{seed}.{here[first].number}",
                group=str(engine),
                cost=0.5 * ALIKE_AT_ONCE,
                cases=tuple(here[first : first + ALIKE_AT_ONCE]),
            )
            for first in range(0, len(here), ALIKE_AT_ONCE)
        ]
    return made


def kinds() -> dict[str, list[str]]:
    """Return the faults that can be planted, by kind."""
    found: dict[str, list[str]] = {}
    for name, kind in _kind_of():
        found.setdefault(kind, []).append(name)
    return found


def chosen(
    only: Iterable[str], of_kinds: Iterable[str]
) -> tuple[list[Mutant], list[ScheduleFault]]:
    """Return the faults that are named, and those of the kinds; all where nothing is named."""
    names, wanted = set(only), set(of_kinds)
    every = not names and not wanted
    names |= {name for name, kind in _kind_of() if every or kind in wanted}
    return (
        [mutant for mutant in MUTANTS if mutant.id in names],
        [fault for fault in SCHEDULE_FAULTS if fault.id in names],
    )


def _kind_of() -> list[tuple[str, str]]:
    return [
        *((mutant.id, mutant.kind) for mutant in MUTANTS),
        *((fault.id, fault.kind) for fault in SCHEDULE_FAULTS),
    ]
