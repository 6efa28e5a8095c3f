"""What the scheduler sent, in one form for both of vLLM's dialects, so that it can be compared.

V1's scheduler sends a resumed request among the cached ones; for its own V2 runner vLLM sends it
among the new ones. Block ids may differ, their numbers may not.
"""

import hashlib
import json
from typing import Any

Row = list[Any]


class StreamHash:
    """Hash of a stream of SchedulerOutputs."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._live: set[str] = set()
        self.steps = 0

    def add(self, output: Any) -> None:
        """Take the next step."""
        self._live -= set(output.finished_req_ids)
        self._hash.update(json.dumps(self._normalised(output)).encode())
        self.steps += 1

    def hexdigest(self) -> str:
        """Return the hash of all steps so far."""
        return self._hash.hexdigest()[:16]

    def _normalised(self, output: Any) -> dict[str, Any]:
        fresh: list[Row] = []
        running: list[Row] = []
        resumed: list[Row] = []
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            rows = resumed if new.req_id in self._live else fresh
            rows.append(_row(new.req_id, counts, new.num_computed_tokens, new.block_ids))
            self._live.add(new.req_id)
        cached = output.scheduled_cached_reqs
        for place, req_id in enumerate(cached.req_ids):
            rows = resumed if req_id in cached.resumed_req_ids else running
            computed, blocks = cached.num_computed_tokens[place], cached.new_block_ids[place]
            rows.append(_row(req_id, counts, computed, blocks))
        return {
            "new": fresh,
            "running": running,
            "resumed": resumed,
            "finished": sorted(output.finished_req_ids),
            "preempted": sorted(output.preempted_req_ids or ()),
        }


def _row(req_id: str, counts: dict[str, int], computed: int, blocks: Any) -> Row:
    """Return a request's part in a step: tokens, tokens before, new blocks of all KV groups."""
    return [req_id, counts[req_id], computed, sum(len(group) for group in blocks or ())]
