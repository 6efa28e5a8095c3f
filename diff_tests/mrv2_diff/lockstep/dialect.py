"""What vLLM's scheduler says to V1, said as it says it to its V2 runner.

The two differ in how a request that was preempted comes back. V1 keeps what it knows of it, so the
scheduler names it among the known requests, with its tokens. V2 forgets it, so it arrives again as
a new one, whose tokens so far are to be computed like a prompt. Every new request of V2 carries
those tokens. V1 is also told the tokens of a request that missed a step; V2 kept them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


class V2Dialect:
    """Translates the steps of one engine, in their order."""

    def __init__(self) -> None:
        self._known: dict[str, NewRequestData] = {}

    @property
    def known(self) -> "dict[str, NewRequestData]":
        """Requests that have arrived and not ended, preempted ones too, as they arrived."""
        return self._known

    def forget(self) -> None:
        """Start over."""
        self._known.clear()

    def translate(self, step: "SchedulerOutput") -> "SchedulerOutput":
        """Return a step for V2; the one given is left as it is.

        Raises:
            ValueError: The step has what is not translated: drafts, or an unknown request resumed.
        """
        if step.scheduled_spec_decode_tokens:
            raise ValueError("drafts are not translated; run an engine without them")
        for req_id in step.finished_req_ids:
            self._known.pop(req_id, None)
        for request in step.scheduled_new_reqs:
            self._known[request.req_id] = request
        cached = step.scheduled_cached_reqs
        arriving = [_arriving(request) for request in step.scheduled_new_reqs]
        arriving += [
            self._resumed(cached, index)
            for index, req_id in enumerate(cached.req_ids)
            if req_id in cached.resumed_req_ids
        ]
        return replace(
            step, scheduled_new_reqs=arriving, scheduled_cached_reqs=_without_resumed(cached)
        )

    def _resumed(self, cached: "CachedRequestData", index: int) -> "NewRequestData":
        req_id = cached.req_ids[index]
        if req_id not in self._known:
            raise ValueError(f"{req_id!r} is resumed and never arrived")
        return replace(
            self._known[req_id],
            block_ids=cached.new_block_ids[index],
            num_computed_tokens=cached.num_computed_tokens[index],
            prefill_token_ids=list(cached.all_token_ids[req_id]),
        )


def _arriving(request: "NewRequestData") -> "NewRequestData":
    return replace(request, prefill_token_ids=list(request.prompt_token_ids or ()))


def _without_resumed(cached: "CachedRequestData") -> "CachedRequestData":
    kept = [i for i, req_id in enumerate(cached.req_ids) if req_id not in cached.resumed_req_ids]

    def of_kept(values: list[Any]) -> list[Any]:
        return [values[index] for index in kept] if values else []

    return replace(
        cached,
        req_ids=of_kept(cached.req_ids),
        resumed_req_ids=set(),
        new_token_ids=of_kept(cached.new_token_ids),
        all_token_ids={},
        new_block_ids=of_kept(cached.new_block_ids),
        num_computed_tokens=of_kept(cached.num_computed_tokens),
        num_output_tokens=of_kept(cached.num_output_tokens),
    )
