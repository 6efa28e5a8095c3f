"""A short case as text: a script for people, and a test for pytest."""

import dataclasses
import math
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

from mrv2_diff.case import Abort, Case, Event

MAX_SHOWN_TOKENS = 24
"""Of a prompt in a script; the file and the test have them all."""


def script(case: Case, pair: tuple[str, str], outcome: str) -> str:
    """Return a case as lines, one for each event, with what comes of it as the last.

    Args:
        case: A lockstep case.
        pair: Reference and candidate.
        outcome: One sentence.
    """
    changed = _changed(case.engine)
    engine = ", ".join(
        f"{name} {source(value) if name == 'model' else value}" for name, value in changed.items()
    )
    lines = [
        f"# {case.id}: {case.title}",
        f"# {pair[0]} and {pair[1]}; engine: {engine}",
    ]
    if case.fault is not None:
        lines.append(f"# with the planted fault {case.fault}")
    lines += [f"step {event.step:<3} {_event(event)}" for event in case.workload()]
    return "\n".join([*lines, f"=> {outcome}"])


def _event(event: Event) -> str:
    if isinstance(event, Abort):
        return f"abort {event.req_id}"
    given = [f"prompt {_tokens(event.prompt)}", f"max_tokens {event.max_tokens}"]
    given.append("greedy" if event.temperature == 0.0 else f"temperature {event.temperature:g}")
    others = (("seed", event.seed), ("logprobs", event.logprobs))
    given += [f"{name} {value}" for name, value in others if value is not None]
    given += [f"{name} {value}" for name, value in event.options]
    return f"add   {event.req_id}: {', '.join(given)}"


def _tokens(prompt: tuple[int, ...]) -> str:
    if len(prompt) > 3 and prompt == tuple(range(1, len(prompt) + 1)):
        return f"1..{len(prompt)}"
    shown = " ".join(str(token) for token in prompt[:MAX_SHOWN_TOKENS])
    more = len(prompt) - MAX_SHOWN_TOKENS
    return f"{shown} and {more} more" if more > 0 else shown


def pytest_module(case: Case, pair: tuple[str, str], outcome: str) -> str:
    """Return the source of a test module that fails as long as the case does.

    It stands by itself where mrv2 and vLLM are installed.

    Args:
        case: A lockstep case.
        pair: Reference and candidate.
        outcome: One sentence for the module's docstring.
    """
    events = case.workload()
    kinds = {type(value).__name__ for value in _dataclasses((case.engine, *events))}
    models = sorted(kinds & {"ModelSpec"})
    imports = [f"from mrv2_diff.case import {', '.join(sorted((kinds | {'Case'}) - {*models}))}"]
    if case.departure is not None:
        imports[0] = imports[0].replace("import ", "import Departure, ")
        imports.append("from mrv2_diff.verdict import Verdict")
    imports[0] = _in_order(imports[0])
    if models:
        imports.append("from mrv2_diff.models.spec import ModelSpec")
    fault = f"    fault={case.fault!r},\n" if case.fault is not None else ""
    departure = f"    departure={source(case.departure)},\n" if case.departure is not None else ""
    name = identifier(case.id)
    listed = "".join(f"    {source(event)},\n" for event in events)
    return f'''"""{_quoted(case.id)}: {_quoted(outcome)}"""

from mrv2_diff import process
{chr(10).join(imports)}

process.prepare()  # vLLM reads the environment when it is imported

from mrv2_diff.run import RunRequest, run_cases  # noqa: E402

EVENTS = (
{listed})

CASE = Case(
    id={case.id!r},
    area={case.area!r},
    feature={case.feature!r},
    title={case.title!r},
    engine={source(case.engine)},
    workload=lambda: EVENTS,
{fault}{departure})


def test_{name}() -> None:
    request = RunRequest(cases=(CASE,), pair={pair!r}, model=None, measures=False)
    (record,) = run_cases(request)
    assert record.verdict.passes, f"{{record.verdict}}: {{record.summary}}"
'''


def identifier(name: str) -> str:
    """Return an id as part of a name in Python."""
    return re.sub(r"\W+", "_", name)


def _in_order(line: str) -> str:
    start, _, names = line.partition(" import ")
    return f"{start} import {', '.join(sorted(names.split(', ')))}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', "'")


def _dataclasses(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if dataclasses.is_dataclass(value):
            yield value
            yield from _dataclasses(_changed(value).values())


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not what they are by default."""
    return {
        field.name: item
        for field in dataclasses.fields(value)
        if (item := getattr(value, field.name)) != field.default
    }


def source(value: Any) -> str:
    """Return Python that makes a value of a case."""
    if dataclasses.is_dataclass(value):
        given = ", ".join(f"{name}={source(item)}" for name, item in _changed(value).items())
        return f"{type(value).__name__}({given})"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(source(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(source(item) for item in value))}}})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
