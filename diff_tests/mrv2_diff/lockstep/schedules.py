"""The same step, given to the candidate in another form.

Another order, other chunks, other neighbours.

Each function takes a SchedulerOutput (a copy that may be consumed) and returns one or several that
together ask for the same work. They are how a runner is compared with itself, to measure noise, and
how a runner is shown to depend on nothing but its requests.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

Schedule = Callable[[SchedulerOutput], list[SchedulerOutput]]

_CUTS = 0.6
"""Probability that a chunk is cut by `Varied`, and the rest of it again."""


def same(step: SchedulerOutput) -> list[SchedulerOutput]:
    """Return the step as it is."""
    return [step]


def reordered(step: SchedulerOutput) -> list[SchedulerOutput]:
    """Return the step with its requests in reverse order."""
    cached = step.scheduled_cached_reqs
    order = range(len(cached.req_ids) - 1, -1, -1)
    return [
        _part(step, list(reversed(step.scheduled_new_reqs)), _select(cached, order), first=True)
    ]


def other_neighbours(step: SchedulerOutput) -> list[SchedulerOutput]:
    """Return two steps with every other request each, so that every request has new neighbours."""
    cached = step.scheduled_cached_reqs
    if len(cached.req_ids) + len(step.scheduled_new_reqs) < 2:
        return [step]
    halves = [
        (
            step.scheduled_new_reqs[first::2],
            _select(cached, range(1 - first, len(cached.req_ids), 2)),
        )
        for first in (0, 1)
    ]
    parts = [_part(step, new, old, first=index == 0) for index, (new, old) in enumerate(halves)]
    return [part for part in parts if part.num_scheduled_tokens] or [step]


def other_chunks(step: SchedulerOutput) -> list[SchedulerOutput]:
    """Return two steps.

    Every prompt chunk of two tokens or more is cut in half, everything else runs in the first.
    """
    return _cut(
        step,
        {req_id: count // 2 for req_id, count in step.num_scheduled_tokens.items() if count >= 2},
    )


class Varied:
    """Steps in another form, drawn at random: parts of the batch, each in any order, in chunks.

    A step in which a request begins behind a cached prefix only gets another order: the prefix may
    be what another request computes in the very same step, which must not come later then.

    Args:
        seed: The same seed gives the same steps the same form.
    """

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self.changes: Counter[str] = Counter()
        """How many steps got another order, other neighbours or other chunks."""

    def __call__(self, step: SchedulerOutput) -> list[SchedulerOutput]:
        """Return steps that together ask for the same work."""
        is_whole = _begins_behind_a_prefix(step)
        parts = self._divided(step, 1 if is_whole else self._source.randint(1, 3))
        cut = parts if is_whole else [piece for part in parts for piece in self._in_chunks(part)]
        self.changes["neighbours"] += len(parts) > 1
        self.changes["chunks"] += len(cut) > len(parts)
        return cut

    def _divided(self, step: SchedulerOutput, num_parts: int) -> list[SchedulerOutput]:
        """Return the step in so many parts at most, the requests of each in any order."""
        cached, new = step.scheduled_cached_reqs, step.scheduled_new_reqs
        shares: list[tuple[list[NewRequestData], list[int]]] = [([], []) for _ in range(num_parts)]
        for index in range(len(cached.req_ids)):
            self._source.choice(shares)[1].append(index)
        for request in new:
            self._source.choice(shares)[0].append(request)
        shares = [share for share in shares if share[0] or share[1]]
        if not shares:
            return [step]
        moved = False
        for requests, indices in shares:
            self._source.shuffle(requests)
            self._source.shuffle(indices)
            moved |= indices != sorted(indices)
            moved |= requests != [request for request in new if request in requests]
        self.changes["order"] += moved
        return [
            _part(step, requests, _select(cached, indices), first=index == 0)
            for index, (requests, indices) in enumerate(shares)
        ]

    def _in_chunks(self, step: SchedulerOutput) -> list[SchedulerOutput]:
        """Return the step with some of its chunks cut, once or several times."""
        second = {
            req_id: self._source.randint(1, count - 1)
            for req_id, count in step.num_scheduled_tokens.items()
            if count >= 2 and self._source.random() < _CUTS
        }
        head, *rest = _cut(step, second)
        return [head, *(piece for part in rest for piece in self._in_chunks(part))]


def _begins_behind_a_prefix(step: SchedulerOutput) -> bool:
    cached = step.scheduled_cached_reqs
    resumed = (
        count
        for req_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        if req_id in cached.resumed_req_ids
    )
    return any(resumed) or any(request.num_computed_tokens for request in step.scheduled_new_reqs)


def _cut(step: SchedulerOutput, second: dict[str, int]) -> list[SchedulerOutput]:
    """Return two steps, with so many last tokens of some requests in the second."""
    if not second:
        return [step]
    first = {
        req_id: count - second.get(req_id, 0) for req_id, count in step.num_scheduled_tokens.items()
    }
    head = replace(step, num_scheduled_tokens=first, total_num_scheduled_tokens=sum(first.values()))
    return [head, _rest(step, first, second)]


SCHEDULES: dict[str, Schedule] = {
    "same": same,
    "reordered": reordered,
    "other neighbours": other_neighbours,
    "other chunks": other_chunks,
}


def _part(
    step: SchedulerOutput, new: list[NewRequestData], cached: CachedRequestData, *, first: bool
) -> SchedulerOutput:
    """Return a part of a step.

    What happens once a step (frees, block operations) goes with the first.
    """
    req_ids = [*cached.req_ids, *(request.req_id for request in new)]
    scheduled = {req_id: step.num_scheduled_tokens[req_id] for req_id in req_ids}
    return replace(
        step,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=step.finished_req_ids if first else set(),
        preempted_req_ids=step.preempted_req_ids if first else set(),
        new_block_ids_to_zero=step.new_block_ids_to_zero if first else None,
        kv_cache_block_copies=step.kv_cache_block_copies if first else [],
    )


def _select(cached: CachedRequestData, order: Sequence[int]) -> CachedRequestData:
    req_ids = [cached.req_ids[index] for index in order]
    return replace(
        cached,
        req_ids=req_ids,
        resumed_req_ids=cached.resumed_req_ids & set(req_ids),
        new_token_ids=[cached.new_token_ids[index] for index in order]
        if cached.new_token_ids
        else [],
        all_token_ids={
            req_id: ids for req_id, ids in cached.all_token_ids.items() if req_id in req_ids
        },
        new_block_ids=[cached.new_block_ids[index] for index in order],
        num_computed_tokens=[cached.num_computed_tokens[index] for index in order],
        num_output_tokens=[cached.num_output_tokens[index] for index in order],
    )


def _rest(step: SchedulerOutput, first: dict[str, int], second: dict[str, int]) -> SchedulerOutput:
    """Return the step that runs the second halves.

    Requests that are known by now, with their blocks.
    """
    computed = dict(
        zip(
            step.scheduled_cached_reqs.req_ids,
            step.scheduled_cached_reqs.num_computed_tokens,
            strict=True,
        )
    )
    outputs = dict(
        zip(
            step.scheduled_cached_reqs.req_ids,
            step.scheduled_cached_reqs.num_output_tokens,
            strict=True,
        )
    )
    computed |= {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    req_ids = list(second)
    cached = CachedRequestData(
        req_ids=req_ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(req_ids),
        num_computed_tokens=[computed[req_id] + first[req_id] for req_id in req_ids],
        num_output_tokens=[outputs.get(req_id, 0) for req_id in req_ids],
    )
    rest = {req_id: second[req_id] for req_id in req_ids}
    return replace(
        step,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=rest,
        total_num_scheduled_tokens=sum(rest.values()),
        finished_req_ids=set(),
        preempted_req_ids=set(),
        new_block_ids_to_zero=None,
        kv_cache_block_copies=[],
    )
