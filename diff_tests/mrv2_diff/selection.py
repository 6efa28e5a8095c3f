"""From names that a user gave to cases and a pair; what is not known is refused with what is."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mrv2_diff import case_file
from mrv2_diff.case import Case
from mrv2_diff.case_file import CaseFile
from mrv2_diff.harness import PAIRS


class SelectionError(Exception):
    """A name is not known, or a file holds no case. The message says what there is instead."""


def selected(
    catalog: Mapping[str, Case], areas: Sequence[str], ids: Sequence[str], files: Sequence[Path]
) -> tuple[Case, ...]:
    """Return the cases of the areas, those named and those in files; all where nothing is named.

    Raises:
        SelectionError: Something is not known, or is named twice.
    """
    check_known("area", areas, dict.fromkeys(case.area for case in catalog.values()))
    check_known("case", ids, catalog)
    every = not areas and not ids and not files
    chosen = [case for case in catalog.values() if every or case.area in areas or case.id in ids]
    known = {case.id for case in chosen}
    for case in (case_in(file).case for file in files):
        if case.id in known:
            raise SelectionError(f"{case.file} is the case {case.id}, which is named twice")
        known.add(case.id)
        chosen.append(case)
    return tuple(chosen)


def check_known(kind: str, given: Sequence[str], known: Iterable[str]) -> None:
    """Refuse a name that is not among those that are known.

    Raises:
        SelectionError: Names the closest first.
    """
    names = list(known)
    for name in given:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        ordered = close + [other for other in names if other not in close]
        raise SelectionError(f"no {kind} is called {name!r}; choose from: {', '.join(ordered)}")


def pair_named(text: str) -> tuple[str, str]:
    """Return a pair of runners by its name.

    Raises:
        SelectionError: There is no such pair.
    """
    for pair in PAIRS:
        if text == ",".join(pair):
            return pair
    known = " or ".join(",".join(pair) for pair in PAIRS)
    raise SelectionError(f"no pair is called {text!r}; choose {known}")


def case_in(file: Path) -> CaseFile:
    """Return the case in a file.

    Raises:
        SelectionError: It cannot be read, or holds none.
    """
    remedy = "name a file that mrv2-diff shrink or run wrote"
    try:
        return case_file.read(file)
    except OSError as error:
        raise SelectionError(f"cannot read {file}: {error.strerror or error}; {remedy}") from error
    except ValueError as error:
        raise SelectionError(f"{error}; {remedy}") from error
