"""Plays a story on a runner whose device is late, and keeps everything that must not depend on it.

The host is `mrv2_diff.toy_host`, the lateness is `mrv2_diff.race_lane`, and what holds after every
step is in `mrv2_diff.invariants`.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from mrv2 import (
    PROMPT_LOGPROBS,
    KVGroup,
    Logprobs,
    PendingOutput,
    RunnerConfig,
    RunnerOutput,
    StepPlan,
)
from mrv2.execute.shape import GraphMode
from mrv2_diff.invariants import (
    LiveRequest,
    PoisonFreed,
    check_device,
    check_invariants,
    snapshot,
)
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.race_lane import LateGraphMaker, LateModel, LateStream, LateTransfers, Schedule
from mrv2_diff.toy_host import Story, Toy, ToyHost, ToyRequest, Work


@dataclass(slots=True, kw_only=True)
class Played:
    """What came of a story."""

    results: list[tuple[object, ...]] = field(default_factory=list)
    """Each step's output when it was taken: request ids, tokens, logprobs and those of prompts."""
    results_at_end: list[tuple[object, ...]] = field(default_factory=list)
    """The same outputs, looked at again behind the last step."""
    state: dict[str, object] = field(default_factory=dict)
    """Every value that the runner held in the end, and the caches, once nothing was queued."""
    outputs: list[tuple[str, list[int]]] = field(default_factory=list)
    expected: list[tuple[str, list[int]]] = field(default_factory=list)
    """What `outputs` must be where every request is greedy."""
    events: Counter[str] = field(default_factory=Counter)
    """How often a request did what."""
    steps_by_mode: dict[GraphMode, int] = field(default_factory=dict)
    stream: LateStream | None = None

    def differences(self, other: "Played") -> list[str]:
        """Return what is not the same in another play of the same story."""
        pairs = {
            "results": (self.results, other.results),
            "results at end": (self.results_at_end, other.results_at_end),
            "outputs": (self.outputs, other.outputs),
        }
        differing = [name for name, (ours, theirs) in pairs.items() if ours != theirs]
        paths = self.state.keys() | other.state.keys()
        return differing + sorted(p for p in paths if self.state.get(p) != other.state.get(p))


class CountingHost(ToyHost):
    """A host that counts what happens to requests, and how often while a token is in flight."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        super().__init__(groups, num_blocks)
        self.events: Counter[str] = Counter()

    def preempt(self, req_id: str) -> None:
        """Count, then preempt."""
        self._count(req_id, "preempted")
        super().preempt(req_id)

    def finish(self, req_id: str) -> ToyRequest:
        """Count, then finish."""
        self._count(req_id, "finished")
        return super().finish(req_id)

    def rewind(self, req_id: str, num_tokens: int) -> None:
        """Count, then rewind."""
        self._count(req_id, "rewound")
        super().rewind(req_id, num_tokens)

    def plan(self, work: Work) -> StepPlan:
        """Plan, then count."""
        made = super().plan(work)
        arrived = {arrival.req_id for arrival in made.arrivals}
        returned = arrived & set(made.departed)
        resumed = {name for name in returned if self.requests[name].num_preemptions}
        self.events["resumed in the same step"] += len(resumed)
        self.events["id used again in the same step"] += len(returned - resumed)
        num_live = sum(request.has_row for request in self.requests.values())
        self.events["live and not scheduled"] += num_live - len(work)
        return made

    def _count(self, req_id: str, event: str) -> None:
        self.events[event] += 1
        self.events[f"{event} in flight"] += self.requests[req_id].num_in_flight > 0


def _counting_host(config: RunnerConfig, num_blocks: int) -> CountingHost:
    return CountingHost(config.kv_groups, num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What a story is played with that the runner does not have by itself."""

    make_host: Callable[[RunnerConfig, int], CountingHost] = _counting_host
    """Returns the host, of the runner's sizes and the number of its blocks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the runner."""


PLAIN = Feature()


def play_late(
    config: RunnerConfig,
    story: Story,
    num_steps: int,
    *,
    lag: int,
    schedule: Schedule | None = None,
    windows: Sequence[int | None] | None = None,
    checked: bool = False,
    feature: Feature = PLAIN,
) -> Played:
    """Play a story to its end.

    Args:
        config: Of the runner. The decodes of its `graphs` are captured first, and replayed.
        story: What happens before each step.
        num_steps: Calls of `story`.
        lag: Steps queued before the oldest one's output is taken.
        schedule: How late the device is; None lets everything act as it is queued.
        windows: Attention windows of the model.
        checked: Whether freed rows are poisoned and the invariants checked after each step; those
            of the device only where nothing is late.
        feature: What the runner and its host have beyond what is always there.
    """
    stream = None if schedule is None else LateStream(schedule)
    toy = _toy(config, windows, stream, feature)
    if checked:
        PoisonFreed(toy.runner)
    host = feature.make_host(config, toy.host.num_blocks)
    toy.host = host
    played = Played(stream=stream, events=host.events)
    kept, pending = list[RunnerOutput](), deque[PendingOutput]()

    def take_all_but(num_pending: int) -> None:
        while len(pending) > num_pending:
            kept.append(pending.popleft().wait())
            played.results.append(_values(kept[-1]))
            host.take(kept[-1])

    with stream or nullcontext(), _unseen_results(stream):
        for number in range(num_steps):
            work = story(host, number)
            queued = toy.step(work)
            if queued is not None:
                pending.append(queued)
            if checked:
                _check(toy, work, on_device=stream is None)
            take_all_but(lag if work else max(0, len(pending) - 1))
        take_all_but(0)
        if stream is not None:
            stream.drain()
    played.results_at_end = [_values(output) for output in kept]
    played.state = snapshot(toy.runner)
    played.steps_by_mode = dict(toy.runner.num_steps)
    played.state |= {f"cache {i}": c.numpy().tobytes() for i, c in enumerate(toy.model.caches)}
    played.outputs, played.expected = toy.outputs(), toy.expected()
    return played


def _unseen_results(stream: LateStream | None) -> AbstractContextManager[object]:
    """Return what keeps a runner from looking at results, as it does where nothing can be late."""
    if stream is None:
        return nullcontext()
    return patch("mrv2.runner.check_sampled", lambda sampled, step, head: None)


def _toy(
    config: RunnerConfig,
    windows: Sequence[int | None] | None,
    stream: LateStream | None,
    feature: Feature,
) -> Toy:
    replays = bool(config.graphs.decodes)
    if stream is None:
        maker = PlayedGraphMaker() if replays else None
        return Toy(config, windows=windows, graph_maker=maker, **feature.options)
    toy = Toy(
        config,
        windows=windows,
        transfers=LateTransfers(stream),
        around=lambda model: LateModel(model, stream),
        graph_maker=LateGraphMaker(stream) if replays else None,
        capturing=stream,
        **feature.options,
    )
    stream.settle()
    return toy


def _check(toy: Toy, work: Work, *, on_device: bool) -> None:
    live = live_requests(toy.host)
    check_invariants(toy.runner, live, flushed=bool(work))
    if on_device:
        check_device(toy.runner, {name: live[name] for name in work})


def live_requests(host: ToyHost) -> dict[str, LiveRequest]:
    """Return what a host knows of the requests that have a row."""
    return {
        name: LiveRequest(
            num_computed=request.num_computed,
            blocks=request.blocks,
            token_ids=[*request.prompt, *request.outputs],
        )
        for name, request in host.requests.items()
        if request.has_row
    }


def _values(output: RunnerOutput) -> tuple[object, ...]:
    of_prompts: Any = output.extras.get(PROMPT_LOGPROBS, {})
    scored = {"": output.logprobs, **of_prompts}
    return (
        tuple(output.req_ids),
        tuple(map(tuple, output.token_ids)),
        tuple((name, _bytes(logprobs)) for name, logprobs in scored.items() if logprobs),
    )


def _bytes(logprobs: Logprobs) -> tuple[bytes, ...]:
    arrays = (logprobs.token_ids, logprobs.values, logprobs.ranks)
    return tuple(array.tobytes() for array in arrays)
