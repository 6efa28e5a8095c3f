"""Runs slices of V1's steps on a runner of its own, with rows and KV blocks of its own.

A request runs in the steps in which V1 runs it, so that chunks and batches are V1's. What V1 took
from its prefix cache, and what a preempted request has to compute again, runs before in steps of
its own. V1's tokens are committed in place of the drawn ones, so that one difference is one
finding.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)

from mrv2.trace import Probe
from mrv2_diff.shadow.draws import Draw, compare
from mrv2_diff.shadow.messages import Done
from mrv2_diff.shadow.slices import Arrived, Room, Slice, Work


class StepRunner(Protocol):
    """The part of the adapter's runner that is called here."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> object:
        """Run a step's first half."""

    def sample_tokens(
        self, grammar_output: Any, forced: Sequence[Sequence[int]] | None = None
    ) -> Any:
        """Run a step's second half."""


class DrawTrace:
    """Keeps what a step draws from."""

    def __init__(self) -> None:
        self.req_ids: list[str] = []
        """The step's requests, in batch order."""
        self.draw_ids: list[str] = []
        self.values: dict[str, torch.Tensor] = {}

    def wants(self, probe: Probe) -> bool:
        """Ask for the processed logits, which a step can do without."""
        return probe == "processed_logits"

    def record(self, probe: Probe, value: object) -> None:
        """Copy logits to the host."""
        if probe == "layout":
            layout: Any = value
            counts = np.diff(layout.cu_num_logits).tolist()
            self.req_ids = layout.req_ids
            self.draw_ids = [
                req_id for req_id, count in zip(layout.req_ids, counts, strict=True) if count
            ]
            self.values.clear()
        elif probe in ("logits", "processed_logits") and isinstance(value, torch.Tensor):
            self.values[probe] = value.float().to("cpu", copy=True)


@dataclass(slots=True, kw_only=True)
class _Followed:
    """A request."""

    prompt_len: int
    params: Any
    token_ids: list[int]
    """Those that V1 kept."""
    reserved: tuple[list[int], ...]
    """Its blocks, of each group; they are handed out in this order."""
    num_given: list[int]
    num_computed: int = 0
    was_announced: bool = False
    must_resume: bool = False


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step that is being put together."""

    new: list[NewRequestData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData.make_empty)
    num_tokens: dict[str, int] = field(default_factory=dict)


class Follower:
    """The shadow's requests.

    Args:
        runner: Runs the steps.
        trace: Given to that runner.
        room: What there is for requests. Block 0 is never given away: vLLM's layers may write what
            belongs to no request there.
        max_num_tokens: Of a step.
        dtype: In whose spacings differences are judged.
        returns_raw: Whether logprobs are those of the raw logits.
        on_step: Called behind each step of a catch-up, of which one slice can need many.
    """

    def __init__(
        self,
        runner: StepRunner,
        trace: DrawTrace,
        room: Room,
        max_num_tokens: int,
        dtype: torch.dtype,
        *,
        returns_raw: bool,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._trace = trace
        self._room = room
        self.max_num_tokens = max_num_tokens
        """Of a step."""
        self._on_step = on_step
        self._dtype = dtype
        self._returns_raw = returns_raw
        self._requests: dict[str, _Followed] = {}
        self._free = deque(range(room.num_blocks, 0, -1))
        """The last one is given away next, so that a block which someone still reads is soon
        written by another request."""
        self._departed: set[str] = set()

    @torch.inference_mode()
    def run(self, part: Slice) -> Done:
        """Run a slice and compare what V1 answered."""
        done = Done(num_slices=part.num_steps)
        gone = list(self._requests) if part.forget_all else part.finished
        for req_id in gone:
            self._drop(req_id)
        for arrived in part.arrived:
            self._take(arrived)
        for req_id in part.restarted:
            if req_id in self._requests:
                self._restart(self._requests[req_id])
        work = self._in_step_with_v1(part, done)
        if work:
            self._catch_up(work)
            self._run_together(work, part, done)
        elif self._departed:
            self._execute(_Step())  # rows are given back at once
        return done

    def _in_step_with_v1(self, part: Slice, done: Done) -> list[Work]:
        """Return the work of requests whose tokens are known here; drop the others."""
        work = []
        for asked in part.work:
            request = self._requests.get(asked.req_id)
            if request is None:
                continue
            answered = asked.req_id in part.answers
            known = len(request.token_ids)
            if answered and request.prompt_len <= asked.end < known:
                # V1 threw tokens away and draws them again.
                del request.token_ids[asked.end :]
                known = asked.end
                self._restart(request)
            if asked.end > known or answered != (asked.end == known):
                done.dropped[asked.req_id] = (
                    f"V1 ran it to {asked.end} of {known} tokens "
                    f"{'with' if answered else 'without'} an answer"
                )
                self._drop(asked.req_id)
                continue
            if request.num_computed > asked.start:
                self._restart(request)
            work.append(asked)
        return work

    def _catch_up(self, work: Sequence[Work]) -> None:
        """Compute what V1 did not have to, in steps of our own."""
        while True:
            step, room = _Step(), self.max_num_tokens
            for asked in work:
                request = self._requests[asked.req_id]
                num_tokens = min(asked.start - request.num_computed, room)
                if num_tokens > 0:
                    self._add(step, asked.req_id, num_tokens)
                    room -= num_tokens
            if not step.num_tokens:
                return
            self._execute(step)
            self._runner.sample_tokens(None)  # none of them draws
            self._on_step()

    def _run_together(self, work: Sequence[Work], part: Slice, done: Done) -> None:
        """Run what V1 ran in this step, and compare what it drew."""
        step = _Step()
        for asked in work:
            self._add(step, asked.req_id, asked.end - asked.start)
        self._execute(step)
        drawn = list(self._trace.draw_ids)
        drawing = set(drawn)
        forced = [
            [part.answers[req_id].token_id] if req_id in drawing else []
            for req_id in self._trace.req_ids
        ]
        grammar = _grammar([req_id for req_id in drawn if req_id in part.grammar], part)
        output = self._runner.sample_tokens(grammar, forced)
        for row, req_id in enumerate(drawn):
            request, theirs = self._requests[req_id], part.answers[req_id]
            draw = self._draw(req_id, row, request, output)
            compare(draw, theirs, self._dtype, done)
            request.token_ids.append(theirs.token_id)

    def _draw(self, req_id: str, row: int, request: _Followed, output: Any) -> Draw:
        index = output.req_id_to_index[req_id]
        (token_id,) = output.sampled_token_ids[index]
        logprobs = None
        if request.params.logprobs is not None and output.logprobs is not None:
            lists = output.logprobs.slice_request(index, 1)
            logprobs = lists.logprob_token_ids[0].tolist(), lists.logprobs[0].tolist()
        return Draw(
            req_id=req_id,
            position=len(request.token_ids),
            is_greedy=request.params.temperature < _GREEDY_BELOW,
            token_id=int(token_id),
            logits=self._trace.values["logits"][row],
            processed=self._trace.values["processed_logits"][row],
            logprobs=logprobs,
            returns_raw=self._returns_raw,
        )

    def _add(self, step: _Step, req_id: str, num_tokens: int) -> None:
        """Put a request's next tokens into a step, in the V1 scheduler's words."""
        request = self._requests[req_id]
        step.num_tokens[req_id] = num_tokens
        given = self._give_blocks(request, request.num_computed + num_tokens)
        if not request.was_announced:
            step.new.append(
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=request.token_ids[: request.prompt_len],
                    mm_features=[],
                    sampling_params=request.params,
                    pooling_params=None,
                    block_ids=given,
                    num_computed_tokens=0,
                    lora_request=None,
                )
            )
            request.was_announced = True
        else:
            cached = step.cached
            cached.req_ids.append(req_id)
            if request.must_resume:
                cached.resumed_req_ids.add(req_id)
                cached.all_token_ids[req_id] = list(request.token_ids)
            cached.new_block_ids.append(given if any(given) else None)
            cached.num_computed_tokens.append(request.num_computed)
            cached.num_output_tokens.append(len(request.token_ids) - request.prompt_len)
        request.must_resume = False
        request.num_computed += num_tokens

    def _give_blocks(self, request: _Followed, end: int) -> tuple[list[int], ...]:
        given = []
        for group, size in enumerate(self._room.block_sizes):
            first, needed = request.num_given[group], -(-end // size)
            given.append(request.reserved[group][first:needed])
            request.num_given[group] = max(first, needed)
        return tuple(given)

    def _execute(self, step: _Step) -> None:
        self._runner.execute_model(
            SchedulerOutput(
                scheduled_new_reqs=step.new,
                scheduled_cached_reqs=step.cached,
                num_scheduled_tokens=step.num_tokens,
                total_num_scheduled_tokens=sum(step.num_tokens.values()),
                scheduled_spec_decode_tokens={},
                scheduled_encoder_inputs={},
                finished_req_ids=self._departed,
                free_encoder_mm_hashes=[],
            )
        )
        self._departed = set()

    def _take(self, arrived: Arrived) -> None:
        blocks = [[self._free.pop() for _ in range(count)] for count in arrived.num_blocks]
        self._requests[arrived.req_id] = _Followed(
            prompt_len=len(arrived.prompt),
            params=arrived.params,
            token_ids=list(arrived.prompt),
            reserved=tuple(blocks),
            num_given=[0] * len(blocks),
        )

    def _restart(self, request: _Followed) -> None:
        """Let a request be computed from its first token again."""
        if request.was_announced:
            for blocks in request.reserved:  # as with V1, other blocks than it had
                self._free.append(blocks.pop())
                blocks.insert(0, self._free.popleft())  # its own only where no other is free
        request.num_computed = 0
        request.num_given = [0] * len(request.num_given)
        request.must_resume = request.was_announced

    def _drop(self, req_id: str) -> None:
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        for blocks in request.reserved:
            self._free += blocks
        if request.was_announced:
            self._departed.add(req_id)


_GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM."""


def _grammar(req_ids: Sequence[str], part: Slice) -> GrammarOutput | None:
    if not req_ids:
        return None
    masks = np.stack([part.grammar[req_id] for req_id in req_ids])
    return GrammarOutput(structured_output_request_ids=list(req_ids), grammar_bitmask=masks)
