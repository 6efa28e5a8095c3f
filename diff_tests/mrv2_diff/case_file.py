"""One case as a JSON file: its engine, its events, and what was found when it was kept.

`mrv2-diff run` writes one for each case that fails, `mrv2-diff shrink` one for what it leaves of a
case, and both read them. Nothing in a file is executed.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from mrv2_diff.case import Abort, Add, Budget, Case, Departure, EngineSpec, Event
from mrv2_diff.verdict import Verdict

FORMAT = 1
"""Version of the file's layout; a reader refuses others."""

MAX_BYTES = 16 * 1024 * 1024
"""A larger file is refused before it is read; the catalog's largest case takes 60 KB."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""What an id may be: files are named after it."""
_EVENTS: dict[str, type[Add] | type[Abort]] = {"add": Add, "abort": Abort}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a run found of the case, for people and for what shrinks it further."""

    verdict: Verdict
    value: str | None
    """First value of the step chain that differs."""
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """A case with the pair of runners that it was run on."""

    case: Case
    pair: tuple[str, str]
    found: Found | None = None


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: int
    pair: tuple[str, str]
    found: Found | None = None
    case: dict[str, Any]


def write(kept: CaseFile, path: Path) -> None:
    """Write a case as JSON; a parent folder that is missing is made.

    Raises:
        ValueError: The case runs apart, which no file describes.
        OSError: It cannot be written.
    """
    case = kept.case
    if case.apart is not None:
        raise ValueError(f"{case.id} runs in engines of its own; only lockstep cases have files")
    raw = {
        "format": FORMAT,
        "pair": kept.pair,
        "found": kept.found,
        "case": {
            "id": case.id,
            "area": case.area,
            "feature": case.feature,
            "title": case.title,
            "fault": case.fault,
            "engine": _changed(case.engine),
            "departure": case.departure,
            "budget": _changed(case.budget),
            "events": [_event(event) for event in case.workload()],
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(raw), indent=1) + b"\n")


def read(path: Path) -> CaseFile:
    """Read a case; its `file` is the path's name.

    Raises:
        ValueError: The file is no case, is too large, or is of another format.
        OSError: It cannot be read.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes, which no case takes")
    try:
        raw = msgspec.json.decode(path.read_bytes())
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format {raw['format']}; this version reads {FORMAT}")
        header = msgspec.convert(raw, _Header)
        return CaseFile(case=_case(header.case, path.name), pair=header.pair, found=header.found)
    except (ValueError, RecursionError, OverflowError) as error:  # DecodeError is a ValueError
        raise ValueError(f"{path} holds no case: {error}") from error


def _case(raw: dict[str, Any], file: str) -> Case:
    left = dict(raw)
    events = tuple(_read_event(item) for item in _taken(left, "events", list))
    _check(events)
    engine = _converted(_taken(left, "engine", dict), EngineSpec, "engine")
    departure = left.pop("departure", None)
    budget = _converted(left.pop("budget", {}), Budget, "budget")
    name, area, feature, title = (
        _taken(left, text, str) for text in ("id", "area", "feature", "title")
    )
    fault = left.pop("fault", None)
    if left:
        raise ValueError(f"unknown: {', '.join(sorted(left))}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"id {name!r} is not made of letters, digits and ._-")
    if not min(budget.memory, budget.latency) > 0:
        raise ValueError(f"a budget is not above 0: {budget}")
    if fault is not None and not isinstance(fault, str):
        raise ValueError(f"fault {fault!r} is no name")
    return Case(
        id=name,
        area=area,
        feature=feature,
        title=title,
        engine=engine,
        workload=lambda: events,
        departure=None if departure is None else _departure(departure),
        file=file,
        fault=fault,
        budget=budget,
    )


class _Departure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A `Departure` without its literal of verdicts, which msgspec does not know."""

    value: Literal["processed_logits", "logprobs"]
    verdict: Verdict
    why: str
    is_certain: bool = True
    on: frozenset[str]
    elsewhere: str


def _departure(raw: Any) -> Departure:
    given = msgspec.convert(raw, _Departure)
    if given.verdict is not Verdict.REFERENCE_WRONG and given.verdict is not (
        Verdict.KNOWN_DIFFERENCE
    ):
        raise ValueError(f"a departure's verdict cannot be {given.verdict}")
    return Departure(
        value=given.value,
        verdict=given.verdict,
        why=given.why,
        is_certain=given.is_certain,
        on=given.on,
        elsewhere=given.elsewhere,
    )


def _taken(raw: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = raw.pop(name, None)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.60}, no {kind.__name__}")
    return value


def _converted(raw: Any, kind: type[_T], what: str) -> _T:
    """Return a dataclass; a name that it lacks is a mistake, not to be passed over."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(raw, dict) or set(raw) - known:
        unknown = sorted(set(raw) - known) if isinstance(raw, dict) else repr(raw)[:60]
        raise ValueError(f"{what} has what it cannot have: {unknown}")
    return msgspec.convert(raw, kind)


def _check(events: tuple[Event, ...]) -> None:
    if not any(isinstance(event, Add) for event in events):
        raise ValueError("no request is added")
    for earlier, later in pairwise(events):
        if earlier.step > later.step:
            raise ValueError(f"events are not in the order of their steps at step {later.step}")
    for event in events:
        if event.step < 0:
            raise ValueError(f"{event.req_id!r} has step {event.step}; steps begin with 0")
        if isinstance(event, Add) and (event.max_tokens < 1 or not event.prompt):
            raise ValueError(f"{event.req_id!r} has no prompt, or less than one token to draw")
        if isinstance(event, Add) and min(event.prompt) < 0:
            raise ValueError(f"{event.req_id!r} has a token id below 0")


def _event(event: Event) -> dict[str, Any]:
    kind = "add" if isinstance(event, Add) else "abort"
    return {"do": kind, **{name: _spelled(value) for name, value in _changed(event).items()}}


def _read_event(raw: Any) -> Event:
    if not isinstance(raw, dict) or raw.get("do") not in _EVENTS:
        raise ValueError(f"an event is to do {' or '.join(_EVENTS)}; this one is {raw!r:.60}")
    kind = _EVENTS[raw["do"]]
    given = {name: value for name, value in raw.items() if name != "do"}
    event = _converted(given, kind, "an event")
    if isinstance(event, Add):
        return dataclasses.replace(event, options=_read(event.options))
    return event


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not what they are by default."""
    return {
        field.name: item
        for field in dataclasses.fields(value)
        if (item := getattr(value, field.name)) != field.default
    }


def _spelled(value: Any) -> Any:
    """Return a value as JSON can hold it: infinities and NaN, which it has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, tuple | list):
        return [_spelled(item) for item in value]
    if isinstance(value, dict):  # a mapping is its pairs, here as in `Add`
        return [[_spelled(key), _spelled(item)] for key, item in value.items()]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) != {"float"}:
            raise ValueError(f"an option holds {value!r:.60}; mappings are written as pairs")
        return float(value["float"])
    return tuple(_read(item) for item in value) if isinstance(value, list | tuple) else value
