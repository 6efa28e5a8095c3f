"""A host of a few lines: it keeps requests and blocks, and says what each step runs.

It stands in for vLLM's scheduler in tests of the runner alone. A test names every event itself, so
that a lifecycle reads as a story; `plan` turns what happened since the last step into a `StepPlan`.
Blocks are handed out last in, first out: what was just freed is used again at once, and a runner
that keeps a stale block shows it.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mrv2 import (
    Arrival,
    Continuation,
    GraphMaker,
    KVGroup,
    NextDecode,
    PendingOutput,
    Runner,
    RunnerConfig,
    RunnerOutput,
    Sampling,
    Scheduled,
    StepPlan,
)
from mrv2.memory.transfers import Transfers
from mrv2_diff.models.hashlm import HashLM, hashlm_tokens

Work = Mapping[str, int]
"""Tokens to run in a step for each request, in the order of the batch."""

Story = Callable[["ToyHost", int], Work]
"""Called before each step with its number; tells the host what happens, and returns the work."""


@dataclass(slots=True, kw_only=True, eq=False)
class ToyRequest:
    """What the host knows of a request."""

    req_id: str
    prompt: list[int]
    sampling: Sampling
    outputs: list[int] = field(default_factory=list)
    blocks: list[list[int]]
    """For each KV group."""
    num_computed: int = 0
    num_in_flight: int = 0
    """Tokens that were drawn by queued steps and not taken yet, as if every draft were accepted."""
    num_drafts_in_flight: int = 0
    """Drafts of those steps."""
    has_row: bool = False
    num_preemptions: int = 0

    @property
    def num_known(self) -> int:
        """Tokens that exist, those in flight counted in."""
        return len(self.prompt) + len(self.outputs) + self.num_in_flight

    @property
    def num_left(self) -> int:
        """Known tokens that have not run: at least 1 for a request that can be scheduled."""
        return self.num_known - self.num_computed


class ToyHost:
    """Requests, blocks, and the plan of the next step.

    What a request runs beyond its known tokens are drafts. They count as accepted until the output
    of their step is taken, as in vLLM's scheduler.

    Args:
        groups: KV groups of the runner.
        num_blocks: Blocks of each group.
    """

    max_drafts = 0
    """Drafts that a request may run in a step."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        self.requests: dict[str, ToyRequest] = {}
        """Those that have not finished."""
        self.num_blocks = num_blocks
        self.finished: list[ToyRequest] = []
        self._sizes = [group.block_size for group in groups]
        self._free = [list(range(num_blocks)) for _ in groups]
        self._holders: list[Counter[int]] = [Counter() for _ in groups]
        self._departed: list[str] = []
        self._draws: deque[list[tuple[ToyRequest, int, int]]] = deque()
        """For each step in flight who draws, in which life, and how many drafts it runs."""
        self._last: Scheduled | NextDecode | None = None
        """What the last step ran, if every request drew."""

    def num_free(self, group: int) -> int:
        """Return how many blocks of a KV group nobody holds."""
        return len(self._free[group])

    def add(
        self, req_id: str, prompt: Sequence[int], sampling: Sampling | None = None
    ) -> ToyRequest:
        """Take a new request; it gets a row when it first runs."""
        request = ToyRequest(
            req_id=req_id,
            prompt=list(prompt),
            sampling=sampling or Sampling(),
            blocks=[[] for _ in self._sizes],
        )
        self.requests[req_id] = request
        return request

    def share(self, owner: str, req_id: str, num_tokens: int) -> None:
        """Let a request that has not run begin with the computed blocks of another one's prefix."""
        request, source = self.requests[req_id], self.requests[owner]
        assert num_tokens <= source.num_computed
        for group, size in enumerate(self._sizes):
            assert num_tokens % size == 0, "only whole blocks are shared"
            request.blocks[group] = source.blocks[group][: num_tokens // size]
            self._holders[group].update(request.blocks[group])
        request.num_computed = num_tokens

    def preempt(self, req_id: str) -> None:
        """Take the row, the blocks and the progress; tokens in flight will be drawn again."""
        request = self.requests[req_id]
        self._leave(request)
        request.num_computed = request.num_in_flight = request.num_drafts_in_flight = 0
        request.num_preemptions += 1

    def finish(self, req_id: str) -> ToyRequest:
        """End a request; its id may be used again at once."""
        request = self.requests.pop(req_id)
        self._leave(request)
        self.finished.append(request)
        return request

    def rewind(self, req_id: str, num_tokens: int) -> None:
        """Take progress back: the request's last computed tokens run again, in the same blocks."""
        self.requests[req_id].num_computed -= num_tokens

    def plan(self, work: Work) -> StepPlan:
        """Return the next step's plan: what happened since the last one, and the work."""
        arrivals, continuations = [], []
        scheduled = Scheduled(
            req_ids=list(work),
            num_tokens=list(work.values()),
            num_computed_tokens=[],
            num_known_tokens=[],
        )
        draws: list[tuple[ToyRequest, int, int]] = []
        for req_id, num_tokens in work.items():
            request = self.requests[req_id]
            num_drafts = num_tokens - request.num_left
            assert num_tokens > 0
            assert num_drafts <= self.max_drafts
            new_blocks = self._grow(request, request.num_computed + num_tokens)
            if not request.has_row:
                arrivals.append(_arrival(request))
            elif any(new_blocks):
                continuations.append(Continuation(req_id=req_id, new_block_ids=new_blocks))
            request.has_row = True
            scheduled.num_computed_tokens.append(request.num_computed)
            scheduled.num_known_tokens.append(request.num_known)
            request.num_computed += num_tokens
            if num_drafts >= 0:
                draws.append((request, request.num_preemptions, num_drafts))
                request.num_in_flight += 1 + num_drafts
                request.num_drafts_in_flight += num_drafts
        departed, self._departed = self._departed, []
        if work:
            self._draws.append(draws)
        going_on = self._going_on(scheduled)
        self._last = going_on if work and len(draws) == len(work) else None
        return StepPlan(
            departed=tuple(departed),
            arrivals=tuple(arrivals),
            continuations=tuple(continuations),
            scheduled=going_on,
        )

    def take(self, output: RunnerOutput) -> None:
        """Take the output of the oldest step whose output was not taken."""
        drawn = {
            r: tokens for r, tokens in zip(output.req_ids, output.token_ids, strict=True) if tokens
        }
        draws = self._draws.popleft()
        assert list(drawn) == [request.req_id for request, _, _ in draws]
        for request, num_preemptions, num_drafts in draws:
            if request.num_preemptions == num_preemptions:
                tokens = drawn[request.req_id]
                request.outputs.extend(tokens)
                request.num_computed -= 1 + num_drafts - len(tokens)
                request.num_in_flight -= 1 + num_drafts
                request.num_drafts_in_flight -= num_drafts

    def _going_on(self, scheduled: Scheduled) -> Scheduled | NextDecode:
        """Return the short form of a step that only goes on from the last one."""
        if self._last is None:
            return scheduled
        following = self._last.next_decode()
        return following if following.listed() == scheduled else scheduled

    def _leave(self, request: ToyRequest) -> None:
        if request.has_row:
            self._departed.append(request.req_id)
        request.has_row = False
        for group, blocks in enumerate(request.blocks):
            holders = self._holders[group]
            holders.subtract(blocks)
            self._free[group].extend(block for block in blocks if not holders[block])
        request.blocks = [[] for _ in self._sizes]

    def _grow(self, request: ToyRequest, num_tokens: int) -> tuple[list[int], ...]:
        new_blocks = []
        for group, size in enumerate(self._sizes):
            missing = -(-num_tokens // size) - len(request.blocks[group])
            blocks = [self._free[group].pop() for _ in range(missing)]
            self._holders[group].update(blocks)
            request.blocks[group].extend(blocks)
            new_blocks.append(blocks)
        return tuple(new_blocks)


class Toy:
    """A runner of HashLM with a host that drives it.

    Args:
        config: Of the runner.
        num_blocks: Blocks of each KV group.
        windows: Attention windows, as for `HashLM`.
        transfers: Carries every copy; the runner's own by default.
        around: Returns what stands between the runner and the model, a `Model` that is its own
            `AttentionPlanner`; nothing by default.
        graph_maker: Captures the sizes of `config.graphs`, at once.
        capturing: Entered while it does.
        options: Further arguments of the runner, such as its head.
    """

    def __init__(
        self,
        config: RunnerConfig,
        num_blocks: int = 400,
        windows: Sequence[int | None] | None = None,
        transfers: Transfers | None = None,
        around: Callable[[HashLM], Any] = lambda model: model,
        graph_maker: GraphMaker | None = None,
        capturing: AbstractContextManager[object] | None = None,
        **options: Any,
    ) -> None:
        self.model = HashLM(config, num_blocks, windows)
        ports = around(self.model)
        self.runner = Runner(config, ports, ports, transfers, graph_maker=graph_maker, **options)
        if graph_maker is not None:
            with capturing or nullcontext():
                self.runner.capture()
        self.host = ToyHost(config.kv_groups, num_blocks)
        self._vocab_size = config.vocab_size
        self._windows = tuple(windows or (None,) * len(config.kv_groups))

    def step(self, work: Work) -> PendingOutput | None:
        """Queue one step; None where it runs nothing."""
        plan = self.host.plan(work)
        if not work:
            self.runner.update_rows(plan)
            return None
        return self.runner.sample(self.runner.execute(plan))

    def run(self, work: Work) -> None:
        """Run one step and take its output."""
        pending = self.step(work)
        if pending is not None:
            self.host.take(pending.wait())

    def play(
        self,
        story: Story,
        num_steps: int,
        *,
        lag: int = 0,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a story.

        Args:
            story: What happens before each step.
            num_steps: Calls of `story`.
            lag: Steps queued before the oldest one's output is taken; 0 waits for each. A step that
                runs nothing takes one, too.
            after_step: Called when a step was queued.
        """
        pending: deque[PendingOutput] = deque()
        for number in range(num_steps):
            queued = self.step(story(self.host, number))
            after_step()
            if queued is not None:
                pending.append(queued)
            if pending and (queued is None or len(pending) > lag):
                self.host.take(pending.popleft().wait())
        while pending:
            self.host.take(pending.popleft().wait())

    def outputs(self) -> list[tuple[str, list[int]]]:
        """Return what every request drew, those that finished first, in order."""
        return [(request.req_id, request.outputs) for request in self._everyone()]

    def expected(self) -> list[tuple[str, list[int]]]:
        """Return what `outputs` must be if every request is greedy, from `hashlm_tokens` alone."""
        return [
            (
                request.req_id,
                hashlm_tokens(
                    request.prompt, len(request.outputs), self._vocab_size, self._windows
                ),
            )
            for request in self._everyone()
        ]

    def _everyone(self) -> list[ToyRequest]:
        return [*self.host.finished, *self.host.requests.values()]


def _arrival(request: ToyRequest) -> Arrival:
    return Arrival(
        req_id=request.req_id,
        token_ids=request.prompt + request.outputs,
        prompt_len=len(request.prompt),
        num_computed_tokens=request.num_computed,
        block_ids=tuple(list(blocks) for blocks in request.blocks),
        sampling=request.sampling,
    )
