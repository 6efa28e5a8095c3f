"""How far the reference differs from itself: the floor under which a difference is no difference.

The reference runs a probe workload beside a second instance of itself that is given the same steps
in another form (another order of the batch, other neighbours, other chunks), so that every request
is computed with other matrix shapes and other reductions. The largest differences, by kind of
value, are the floor. A maximum over a sample is an underestimate of the largest difference that can
occur, so cases are judged against `MARGIN` times the floor.
"""

import random

from mrv2_diff.case import Add

MARGIN = 2.0
"""Bound over floor.

On two float32 models (AMD EPYC, 2026-11-29) the floors of single cases, 0 to 15 spacings, spread by
less.
"""

SCHEDULES = ("reordered", "other neighbours", "other chunks")
"""Forms of a step other than its own."""
FLOOR_SCHEDULES = ("same", *SCHEDULES)
"""Forms under which the reference is held against itself: a repeat, and the others."""

NUM_REQUESTS = 40
FEW_REQUESTS = 10
"""For cases in their small form, in a process that is slow. A smaller sample finds a lower floor,
where it finds another, and judges more strictly."""


def probe(num_requests: int = NUM_REQUESTS) -> tuple[Add, ...]:
    """Return so many requests of all kinds.

    Short and long prompts, greedy and random, with and without logprobs.

    None has a seed of its own: V1 on a CPU fails on a seeded request whose prompt is cut into
    chunks.
    """
    source = random.Random(5)
    events = [
        Add(
            step=source.randrange(60),
            req_id=f"probe-{index}",
            prompt=tuple(source.randrange(256) for _ in range(source.randrange(2, 120))),
            max_tokens=source.randrange(10, 60),
            temperature=source.choice((0.0, 0.0, 0.7, 1.3)),
            logprobs=source.choice((None, 5)),
        )
        for index in range(num_requests)
    ]
    return tuple(sorted(events, key=lambda event: event.step))
