"""What may be left out of a workload. Pure: each function returns other events, and runs nothing.

Every way to cut is a list of *choices*, each of which takes the events as they are by now and
returns shorter ones, or None where it has nothing left to do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mrv2_diff.case import Abort, Add, Event

Events = tuple[Event, ...]
Cost = tuple[int, ...]


def cost(events: Events, num_steps: int) -> Cost:
    """Return what is to become small, the most important first.

    Requests, then steps, aborts, parameters, tokens, tokens that are not plain, and late arrivals.

    Args:
        events: The workload.
        num_steps: Steps that it took.
    """
    adds = [event for event in events if isinstance(event, Add)]
    return (
        len(adds),
        num_steps,
        len(events) - len(adds),
        sum(_parameters(add) for add in adds),
        sum(len(add.prompt) + add.max_tokens for add in adds),
        sum(add.prompt != plain(len(add.prompt)) for add in adds),
        sum(event.step for event in events),
    )


def _parameters(add: Add) -> int:
    values = sum(_size(value) for _, value in add.options)
    others = (add.temperature != 0.0, add.seed is not None, add.logprobs is not None)
    return values + sum(others) + (add.logprobs or 0 if add.logprobs != -1 else 1000)


def _size(value: object) -> int:
    return 1 + sum(_size(item) for item in value) if isinstance(value, tuple) else 1


def plain(length: int) -> tuple[int, ...]:
    """Return a prompt that is easy to read: 1, 2, 3, ..."""
    return tuple(range(1, length + 1))


def is_sound(events: Events) -> bool:
    """Say whether no request arrives under the id of one that may still be there."""
    last: dict[str, Add | None] = {}
    for event in events:
        if isinstance(event, Abort):
            last[event.req_id] = None
            continue
        earlier = last.get(event.req_id)
        if earlier is not None and event.step - earlier.step < earlier.max_tokens + 2:
            return False
        last[event.req_id] = event
    return any(isinstance(event, Add) for event in events)


def until(events: Events, step: int) -> Events:
    """Return what happens up to a step: later events and tokens are left out."""
    return tuple(
        with_tokens(max(1, step - event.step + 1))(event) if isinstance(event, Add) else event
        for event in events
        if event.step <= step
    )


def groups(events: Events) -> list[list[int]]:
    """Return the indices of each arrival with those of the aborts that follow it."""
    found: list[list[int]] = []
    owner: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        if isinstance(event, Add):
            owner[event.req_id] = [index]
            found.append(owner[event.req_id])
        elif event.req_id in owner:
            owner[event.req_id].append(index)
        else:
            found.append([index])
    return found


def only(events: Events, parts: Sequence[Sequence[int]]) -> Events:
    """Return the events whose indices are in some part."""
    kept = {index for part in parts for index in part}
    return tuple(event for index, event in enumerate(events) if index in kept)


def without_gap(events: Events, by: Callable[[int], int]) -> Iterator[Events]:
    """Yield the events with one wait between two of them changed, the last wait first."""
    steps = sorted({0, *(event.step for event in events)})
    for before, after in reversed(list(pairwise(steps))):
        wait = by(after - before)
        if wait < after - before:
            moved = after - before - wait
            yield tuple(
                replace(event, step=event.step - moved) if event.step >= after else event
                for event in events
            )


def sorted_by_step(events: Events) -> Events:
    """Return the events in the order of their steps."""
    return tuple(sorted(events, key=lambda event: event.step))


def changed(events: Events, index: int | None, change: Callable[[Add], Add]) -> Events:
    """Return the events with one arrival changed, or with every one where `index` is None."""
    return tuple(
        change(event) if isinstance(event, Add) and index in (None, position) else event
        for position, event in enumerate(events)
    )


def with_tokens(count: int) -> Callable[[Add], Add]:
    """Return a change: draw at most so many tokens, and hold stops back for no more."""

    def change(add: Add) -> Add:
        options = tuple(
            (name, min(value, count) if name == "min_tokens" and isinstance(value, int) else value)
            for name, value in add.options
        )
        return replace(add, max_tokens=min(add.max_tokens, count), options=options)

    return change


def with_prompt(length: int) -> Callable[[Add], Add]:
    """Return a change: keep at most the first so many tokens of the prompt."""
    return lambda add: replace(add, prompt=add.prompt[:length])


def earlier(count: int) -> Callable[[Add], Add]:
    """Return a change: as many tokens fewer to draw, and as many more in the prompt.

    A request then stands in few steps where it stood in many, with as many blocks.
    """

    def change(add: Add) -> Add:
        moved = min(count, add.max_tokens - 1)
        longer = replace(add, prompt=(*add.prompt, *plain(moved)))
        return with_tokens(add.max_tokens - moved)(longer)

    return change


def simpler(add: Add) -> Iterator[Add]:
    """Yield an arrival with one parameter less, or less of one, the largest change first."""
    if add.options:
        yield replace(add, options=())
    for index, (name, value) in enumerate(add.options):
        before, after = add.options[:index], add.options[index + 1 :]
        yield replace(add, options=before + after)
        if name != "structured_outputs":
            for less in _shorter(value):
                yield replace(add, options=(*before, (name, less), *after))
    if add.temperature != 0.0:
        yield replace(add, temperature=0.0, seed=None)
    if add.seed is not None:
        yield replace(add, seed=None)
    if add.logprobs is not None:
        yield replace(add, logprobs=None)
        if add.logprobs not in (0, 1):
            yield replace(add, logprobs=1)
    if add.prompt != plain(len(add.prompt)):
        yield replace(add, prompt=plain(len(add.prompt)))


def _shorter(value: object) -> Iterator[tuple[Any, ...]]:
    """Yield parts of a list: its halves, then all but one where it is short."""
    if not isinstance(value, tuple) or len(value) < 2:
        return
    half = len(value) // 2
    yield value[:half]
    yield value[half:]
    if len(value) <= 8:
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
