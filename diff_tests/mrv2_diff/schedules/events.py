"""Counts what a schedule made happen, read from what the scheduler sent."""

from collections import Counter
from typing import Any

KINDS: tuple[str, ...] = (
    "arrivals",
    "arrivals with a cached prefix",
    "next turns of a session",
    "chunks of a prompt",
    "ends",
    "aborts while running",
    "aborts while waiting",
    "aborts with an output in flight",
    "ids that end and arrive in one step",
    "preemptions",
    "resumes",
    "resumes with a cached prefix",
    "resumes in other blocks",
    "preempted and resumed in one step",
    "running requests left out of a step",
    "progress taken back",
    "steps without tokens",
    "steps without tokens beside live rows",
    "steps with more known requests than rows",
    "steps queued ahead of an output",
)
"""What a generator has to make happen, or its run proves less than it says."""


class EventCounts:
    """How often each kind of event happened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._blocks: dict[str, list[list[int]]] = {}
        self._known_tokens: dict[str, int] = {}
        self._last: frozenset[str] = frozenset()

    def count(self, kind: str, times: int = 1) -> None:
        """Add to a kind."""
        if kind not in self.counts:
            raise KeyError(f"no kind of event is called {kind!r}")
        self.counts[kind] += times

    def aborted(self, *, running: bool, in_flight: bool) -> None:
        """Count an abort."""
        self.count("aborts while running" if running else "aborts while waiting")
        self.count("aborts with an output in flight", in_flight)

    def see(
        self, step: Any, *, num_queued: int, num_known: int, num_rows: int, max_rows: int
    ) -> None:
        """Count what a SchedulerOutput brings.

        Args:
            step: The SchedulerOutput.
            num_queued: Steps before it whose output was not taken.
            num_known: Requests that the runner knows after it.
            num_rows: Rows that are taken after it.
            max_rows: Rows that there are.
        """
        empty = not step.num_scheduled_tokens
        self.count("steps without tokens", empty)
        self.count("steps without tokens beside live rows", empty and num_rows > 0)
        self.count("steps with more known requests than rows", num_known > max_rows)
        self.count("steps queued ahead of an output", num_queued > 0 and not empty)
        preempted = step.preempted_req_ids or set()
        self.count("preemptions", len(preempted))
        self._see_new(step)
        self._see_cached(step, preempted)
        for name in step.finished_req_ids - {new.req_id for new in step.scheduled_new_reqs}:
            self._blocks.pop(name, None)
        self._last = frozenset(step.num_scheduled_tokens) if not empty else self._last

    def _see_new(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            name = new.req_id
            if name in self._blocks and name not in step.finished_req_ids:
                pass  # a session's next turn, counted where it was asked for
            else:
                self.count("arrivals")
                self.count("arrivals with a cached prefix", new.num_computed_tokens > 0)
                self.count("ids that end and arrive in one step", name in step.finished_req_ids)
            self._blocks[name] = [list(blocks) for blocks in new.block_ids]
            end = new.num_computed_tokens + step.num_scheduled_tokens[name]
            self.count("chunks of a prompt", end < len(new.prompt_token_ids))
            self._known_tokens[name] = len(new.prompt_token_ids)

    def _see_cached(self, step: Any, preempted: set[str]) -> None:
        cached = step.scheduled_cached_reqs
        for name, new_blocks, computed, outputs in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            end = computed + step.num_scheduled_tokens[name]
            self.count("chunks of a prompt", end < self._known_tokens[name] + outputs)
            if name in cached.resumed_req_ids:
                self.count("resumes")
                self.count("resumes with a cached prefix", computed > 0)
                self.count("preempted and resumed in one step", name in preempted)
                held = self._blocks[name]
                others = any(new[: len(old)] != old[: len(new)]
                             for new, old in zip(new_blocks, held, strict=True))  # fmt: skip
                self.count("resumes in other blocks", others)
                self._blocks[name] = [list(blocks) for blocks in new_blocks]
                continue
            self.count("running requests left out of a step", name not in self._last)
            for held_blocks, blocks in zip(self._blocks[name], new_blocks or (), strict=False):
                held_blocks.extend(blocks)
