"""Plays actions through vLLM's scheduler and holds every token against what it must be.

The scheduler decides what a step runs; nothing of it is imitated. A request's output must be what
it is when the request runs alone, so whatever a schedule does to a request may not show in it. The
first token that differs raises `Divergence`.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any, TypeAlias

from msgspec.structs import replace

from mrv2_diff.schedules.actions import (
    Abort,
    Action,
    Arrive,
    Drain,
    FailLoad,
    Reset,
    Setup,
    Step,
)
from mrv2_diff.schedules.engine import HashEngine, HashRunner, ScheduledEngine
from mrv2_diff.schedules.events import EventCounts
from mrv2_diff.schedules.expected import Expectations, HashExpectations
from mrv2_diff.schedules.grammars import MadeUpGrammar
from mrv2_diff.schedules.params import sampling_params

# isort: split
# The engine's module prepares the process that these read.
import torch
from torch import Tensor
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

_MAX_STEPS_TO_DRAIN = 2000
_MAX_IDLE_STEPS = 6
"""Steps that may pass without a token while requests wait."""


class Divergence(AssertionError):
    """A request returned what it does not return alone, or the runner kept what it should not."""


Logprobs: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Token ids, values and ranks, a row for each token."""


@dataclass(slots=True)
class Turn:
    """What a request must return from one prompt, and what it returned so far."""

    prompt: list[int]
    max_tokens: int
    expected: list[int]
    received: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of the tokens received, in the pieces in which they came."""
    prompt_logprobs: Logprobs | None = None


@dataclass(slots=True)
class Account:
    """A live request: one turn, or those of a session."""

    is_session: bool
    turns: list[Turn]
    current: int = 0


@dataclass(slots=True, kw_only=True)
class _Queued:
    """A step whose output was not taken."""

    number: int
    scheduler_output: Any
    output: Any


class Driver:
    """A scheduler, a runner, and the account of every request.

    Args:
        setup: The engine.
        runner_class: As for `HashEngine`.
        engine: Drive this one, made of the same setup, instead of one of HashLM.
        expectations: What its requests return alone; of HashLM if it is None.
        compares: Whether tokens are held against those of the request alone, or only kept. Sessions
            need it: a turn's prompt is made of what the ones before must return. Grammars need that
            they are kept: a request alone is run without one.
    """

    def __init__(
        self,
        setup: Setup,
        runner_class: Callable[..., HashRunner] = HashRunner,
        *,
        engine: ScheduledEngine | None = None,
        expectations: Expectations | None = None,
        compares: bool = True,
    ) -> None:
        self.setup = setup
        self._compares = compares
        self.engine = engine or HashEngine(setup, runner_class)
        self.events = EventCounts()
        self.accounts: dict[str, Account] = {}
        """Of requests that have not ended."""
        self.ended: list[tuple[str, list[int]]] = []
        """What ended requests returned, since it was last cleared."""
        self.turns: dict[str, Turn] = {}
        """The turns of ended requests by name, where they are not compared but kept."""
        self.num_steps = 0
        self._expectations = expectations or HashExpectations(setup)
        self._queued: deque[_Queued] = deque()
        self._failing: FailLoad | None = None
        self._spoiled: dict[str, int] = {}
        self._num_arrived = 0
        self._num_idle = 0

    def play(self, actions: Iterable[Action]) -> None:
        """Do one action after the other.

        Raises:
            Divergence: A token is wrong, a request does not end, or something is left of it.
        """
        for action in actions:
            self.do(action)

    @singledispatchmethod
    def do(self, action: Action) -> None:
        """Do one action."""
        raise TypeError(f"{action!r} is no action")

    @do.register
    def _(self, action: Arrive) -> None:
        assert self._compares or not action.session, "a session needs expectations"
        assert not self._compares or action.grammar is None, "expectations know no grammar"
        account = self.accounts.get(action.name)
        if account is not None:
            if account.is_session and action.session and self._go_on(account, action):
                return
            self._abort(action.name)
        self._wait_for_outputs_of(action.name)
        prompt = action.prompt(self.setup.vocab_size)
        turn = self._turn(prompt, action)
        if not turn.max_tokens:
            return  # nothing is expected of it
        self.accounts[action.name] = Account(action.session, [turn])
        self.engine.scheduler.add_request(self._request(prompt, action, turn.max_tokens))

    @do.register
    def _(self, action: Abort) -> None:
        if action.name in self.accounts:
            self._abort(action.name)

    @do.register
    def _(self, action: Reset) -> None:
        scheduler = self.engine.scheduler
        # vLLM cannot empty a cache of which a waiting session holds blocks.
        waiting = scheduler.requests.keys() - {request.request_id for request in scheduler.running}
        blocks_of = scheduler.kv_cache_manager.get_block_ids
        if not any(any(blocks_of(name)) for name in waiting):
            scheduler.reset_prefix_cache(reset_running_requests=True)

    @do.register
    def _(self, action: FailLoad) -> None:
        self._failing = action

    @do.register
    def _(self, action: Step) -> None:
        self.step(action.lag, paused=action.paused)

    @do.register
    def _(self, action: Drain) -> None:
        self.drain()

    def step(self, lag: int = 0, *, paused: bool = False) -> None:
        """Schedule and queue a step; then take outputs until `lag` are missing."""
        scheduler, runner = self.engine.scheduler, self.engine.runner
        if paused:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        scheduler_output = scheduler.schedule()
        if paused:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        self._spoil(scheduler_output)
        self.num_steps += 1
        with torch.inference_mode():
            output = runner.execute_model(scheduler_output)
            if output is None:
                if scheduler_output.pending_structured_output_tokens:
                    # A grammar must see the tokens in flight before it says what may follow.
                    while self._queued:
                        self._take()
                output = runner.sample_tokens(scheduler.get_grammar_bitmask(scheduler_output))
        self._see(scheduler_output)
        self._queued.append(
            _Queued(number=self.num_steps, scheduler_output=scheduler_output, output=output)
        )
        self._end_preempted_sessions(scheduler_output)
        idle = not scheduler_output.num_scheduled_tokens and not paused
        self._num_idle = self._num_idle + 1 if idle else 0
        if self._num_idle > _MAX_IDLE_STEPS:
            self._end_sessions()
        while len(self._queued) > lag:
            self._take()

    def _see(self, scheduler_output: Any) -> None:
        """Count what happened in a step that was just queued."""
        self.events.see(
            scheduler_output,
            num_queued=len(self._queued),
            num_known=len(self.engine.runner.ledger),
            num_rows=len(self.engine.core.rows),
            max_rows=self.setup.max_num_reqs,
        )

    def drain(self) -> None:
        """End sessions, step until nothing is left to run, and look for what stayed behind."""
        for _ in range(_MAX_STEPS_TO_DRAIN):
            for name, account in list(self.accounts.items()):
                if account.is_session and account.current == len(account.turns):
                    self._abort(name)
            if not self.accounts:
                break
            self.step(lag=int(self.setup.is_async))
        else:
            raise Divergence(f"{sorted(self.accounts)} did not end in {_MAX_STEPS_TO_DRAIN} steps")
        while self._queued:
            self._take()
        self.step()  # tells the runner which ended
        self._require_empty()

    def _turn(self, prompt: list[int], action: Arrive) -> Turn:
        if not self._compares:
            return Turn(prompt, action.max_tokens, [])
        expected = self._expectations.outputs(prompt, action)
        return Turn(prompt, expected.max_tokens, expected.tokens)

    def _go_on(self, account: Account, action: Arrive) -> bool:
        """Queue a session's next turn, unless the session would get too long.

        A turn goes on from all that was computed before. The last token that a turn drew was never
        run, so the next one does not see it.

        Returns:
            Whether the session lives: it has this turn, or others that have not ended.
        """
        last = account.turns[-1]
        new = action.prompt(self.setup.vocab_size)
        prompt = [*last.prompt, *last.expected[:-1], *new]
        if len(prompt) + action.max_tokens > self.setup.max_model_len:
            return account.current < len(account.turns)
        turn = self._turn(prompt, action)
        if not turn.max_tokens:
            return account.current < len(account.turns)
        account.turns.append(turn)
        self.engine.scheduler.add_request(self._request(new, action, turn.max_tokens))
        self.events.count("next turns of a session")
        return True

    def _request(self, prompt: list[int], action: Arrive, max_tokens: int) -> Request:
        self._num_arrived += 1
        params = sampling_params(replace(action, max_tokens=max_tokens))
        params.update_from_generation_config({}, self.engine.eos_token_id)
        request = Request(
            request_id=action.name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self._num_arrived),
            priority=action.priority,
            block_hasher=self.engine.block_hasher,
            resumable=action.session,
        )
        if action.grammar is not None:
            request.structured_output_request.grammar = MadeUpGrammar(
                action.grammar, self.setup.vocab_size
            )
        return request

    def _abort(self, name: str) -> None:
        request = self.engine.scheduler.requests[name]
        in_flight = any(name in queued.scheduler_output.num_scheduled_tokens
                        for queued in self._queued)  # fmt: skip
        self.events.aborted(running=request.status == RequestStatus.RUNNING, in_flight=in_flight)
        self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        account = self.accounts.pop(name)
        self.ended.extend((name, turn.received) for turn in account.turns)

    def _wait_for_outputs_of(self, name: str) -> None:
        """Take outputs that vLLM would credit to a new request of the same name.

        Its front end never uses a name twice; here it must be used again at once.
        """
        while any(name in queued.scheduler_output.num_scheduled_tokens for queued in self._queued):
            self._take()

    def _end_preempted_sessions(self, scheduler_output: Any) -> None:
        """Abort sessions that were preempted while a token of theirs is in flight.

        If that token ends the turn, vLLM's scheduler forgets the session's prompt.
        """
        for name in scheduler_output.preempted_req_ids or ():
            account = self.accounts.get(name)
            if account is not None and account.is_session and len(self._queued) > 1:
                self._abort(name)

    def _end_sessions(self) -> None:
        """Abort every session: their blocks cannot be taken away, so each may wait for another."""
        for name in [name for name, account in self.accounts.items() if account.is_session]:
            self._abort(name)
        self._num_idle = 0

    def _take(self) -> None:
        queued = self._queued.popleft()
        output = queued.output
        if not isinstance(output, ModelRunnerOutput):
            output = output.get_output()
        output = self._with_failed_load(queued.scheduler_output, output)
        returned = self.engine.scheduler.update_from_output(queued.scheduler_output, output)
        for outputs in returned.values():
            for item in outputs.outputs:
                self._credit(queued.number, item)

    def _credit(self, step: int, item: Any) -> None:
        name = item.request_id
        account = self.accounts[name]
        turn = account.turns[account.current]
        turn.received.extend(item.new_token_ids)
        if not self._compares:
            self._keep_logprobs(turn, item)
        if self._compares and turn.received != turn.expected[: len(turn.received)]:
            raise Divergence(
                f"step {step}: {name} returned {turn.received}, alone it returns {turn.expected}"
            )
        if item.finish_reason is None:
            return
        self.events.count("ends")
        if self._compares and turn.received != turn.expected:
            raise Divergence(
                f"step {step}: {name} ended with {turn.received}, alone it returns {turn.expected}"
            )
        account.current += 1
        if not account.is_session:
            del self.accounts[name]
            self.ended.append((name, turn.received))
            if not self._compares:
                self.turns[name] = turn

    @staticmethod
    def _keep_logprobs(turn: Turn, item: Any) -> None:
        if item.new_logprobs is not None:
            ids, values, ranks = item.new_logprobs[:3]
            turn.logprobs.append(
                (torch.as_tensor(ids), torch.as_tensor(values), torch.as_tensor(ranks))
            )
        if item.new_prompt_logprobs_tensors is not None:
            assert turn.prompt_logprobs is None, "a prompt's logprobs came twice"
            turn.prompt_logprobs = tuple(item.new_prompt_logprobs_tensors[:3])

    def _with_failed_load(self, scheduler_output: Any, output: Any) -> Any:
        """Report a block as not loaded, as a KV connector would, and remember what runs again."""
        failing, self._failing = self._failing, None
        scheduler = self.engine.scheduler
        # vLLM takes such reports of a single KV group only.
        if failing is None or len(self.setup.windows) > 1:
            return output
        if not scheduler_output.num_scheduled_tokens:
            return output
        before = self._computed_before(scheduler_output)
        running = [name for name, count in before.items() if count > 0]
        if not running:
            return output
        name = running[failing.request % len(running)]
        blocks = self._blocks(name)[: -(-before[name] // self.setup.block_size)]
        block = blocks[failing.block % len(blocks)]
        affected = [name for name in before if block in self._blocks(name)]
        if self.setup.is_async and any(
            self._drew(output, name) or scheduler.requests[name].num_stale_output_tokens
            for name in affected
        ):
            # vLLM's scheduler drops such a token and keeps the one that was drawn after it.
            return output
        if any(self._is_session_in_flight(name) for name in affected):
            return output
        self.events.count("progress taken back")
        if not self.setup.is_async:
            self._spoiled |= dict.fromkeys(affected, self.num_steps)
        return dataclasses.replace(
            output, kv_connector_output=KVConnectorOutput(invalid_block_ids={block})
        )

    def _is_session_in_flight(self, name: str) -> bool:
        """Return whether a request is a session of which a later step's output was not taken.

        If a token in it ends the turn, vLLM's scheduler forgets the part of the session's prompt
        behind what is computed, and so behind what is to run again.
        """
        return self.accounts[name].is_session and any(
            name in queued.scheduler_output.num_scheduled_tokens for queued in self._queued
        )

    def _computed_before(self, scheduler_output: Any) -> dict[str, int]:
        """Return how many tokens each running request had computed before a step."""
        scheduled = scheduler_output.num_scheduled_tokens
        return {
            request.request_id: request.num_computed_tokens - scheduled.get(request.request_id, 0)
            for request in self.engine.scheduler.running
        }

    def _blocks(self, name: str) -> list[int]:
        blocks: list[int] = self.engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
        return blocks

    @staticmethod
    def _drew(output: Any, name: str) -> bool:
        index = output.req_id_to_index.get(name)
        return index is not None and bool(output.sampled_token_ids[index])

    def _spoil(self, scheduler_output: Any) -> None:
        """Fill slots that a request writes again with noise: what failed to load is not there."""
        spoiled, self._spoiled = self._spoiled, {}
        cached = scheduler_output.scheduled_cached_reqs
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in spoiled:
                blocks, size = self._blocks(name), self.setup.block_size
                for at in range(start, start + scheduler_output.num_scheduled_tokens[name]):
                    self.engine.spoil(blocks[at // size], at % size)

    def _require_empty(self) -> None:
        runner, core = self.engine.runner, self.engine.core
        left = {
            "requests in the ledger": len(runner.ledger),
            "rows": len(core.rows),
            "staged token writes": core.requests.token_ids.num_staged,
            "requests in the scheduler": len(self.engine.scheduler.requests),
        }
        if any(left.values()):
            raise Divergence(f"every request has ended, and yet there are: {left}")
