"""Random actions from a seed."""

import random
from collections.abc import Iterator
from typing import Any

from mrv2_diff.parameters import PARAMETERS
from mrv2_diff.schedules.actions import (
    PREFIX_LEN,
    Abort,
    Action,
    Arrive,
    Drain,
    FailLoad,
    Reset,
    Setup,
    Step,
)

SETUPS: tuple[Setup, ...] = tuple(
    Setup(is_async=is_async, **options)
    for is_async in (False, True)
    for options in (
        {},
        {"by_priority": True},
        {"num_blocks": 20, "max_num_tokens": 9, "max_num_reqs": 3},
        {"num_blocks": 64, "max_num_tokens": 7, "max_num_reqs": 8},
        {"prefix_caching": False},
        {"windows": (None, 8), "num_blocks": 44},
    )
)
"""Each for a part of the steps: scarcity of rows, of tokens and of blocks, and what scheduling may
depend on."""

OPTIONS: tuple[dict[str, Any], ...] = tuple(
    {row.name: row.bundles[bundle] for row in PARAMETERS if bundle in row.bundles}
    for bundle in sorted({bundle for row in PARAMETERS for bundle in row.bundles})
)
"""Parameters whose effect depends on the tokens before, or on what the row remembers."""

_NAMES = 14
"""Names that requests have; few, so that they are used again."""
_SESSIONS = 3
"""Names of sessions among them."""
_PREFIXES = 3
_TAILS = 40
_ACTIONS_UNTIL_DRAINED = 250


def actions(seed: int, setup: Setup, count: int) -> Iterator[Action]:
    """Yield so many random actions, and one that drains after them and now and then between."""
    draw = random.Random(f"{seed} {setup}")
    for number in range(1, count + 1):
        yield _action(draw, setup)
        if number % _ACTIONS_UNTIL_DRAINED == 0:
            yield Drain()
    yield Drain()


def _action(draw: random.Random, setup: Setup) -> Action:
    kind = draw.random()
    if kind < 0.68:
        return Step(lag=draw.choice((0, 1, 1, 1)) * setup.is_async, paused=draw.random() < 0.02)
    if kind < 0.92:
        return _arrive(draw)
    if kind < 0.94:
        return Abort(name=f"r{draw.randrange(_NAMES)}")
    if kind < 0.965:
        return Reset()
    return FailLoad(request=draw.randrange(8), block=draw.randrange(8))


def _arrive(draw: random.Random) -> Arrive:
    number = draw.randrange(_NAMES)
    is_session = number < _SESSIONS
    return Arrive(
        name=f"r{number}",
        prefix=draw.randrange(_PREFIXES),
        prefix_len=0 if is_session else draw.choice((0, 0, 8, 17, PREFIX_LEN)),
        tail=draw.randrange(_TAILS),
        tail_len=draw.randint(1, 10),
        max_tokens=draw.randint(1, 14),
        stop=draw.choice((None, None, 5)),
        temperature=draw.choice((0.0,) * 7 + (0.8,)),
        seed=draw.randrange(8),
        options=draw.choice(({},) * 18 + OPTIONS),
        priority=draw.randrange(3),
        session=is_session,
    )
