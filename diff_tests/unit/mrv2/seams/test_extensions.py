"""Extensions: what each hook can do, and that a bad one costs nothing but its step."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mrv2 import (
    Arrival,
    ConfigError,
    ExtensionError,
    ExtensionResources,
    GraphSizes,
    KVGroup,
    Mrv2Error,
    NullTrace,
    ProtocolError,
    Runner,
    RunnerConfig,
    RunnerOutput,
    Sampling,
    StepExtension,
    StepPlan,
)
from mrv2.execute.shape import GraphMode
from mrv2_diff.invariants import check_device, check_invariants, snapshot
from mrv2_diff.late_play import live_requests
from mrv2_diff.models.hashlm import HashLM, hashlm_tokens
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.seams.extensions import (
    Axes,
    AxesHashLM,
    BakingGraphMaker,
    EmbeddingHashLM,
    Embeds,
    Faulty,
    ForwardOnly,
    LongStepsEager,
    Marks,
    SaltedHashLM,
    Salts,
    TellingHost,
    Unshared,
    salt_of,
)
from mrv2_diff.toy_host import Toy, ToyHost
from mrv2_diff.toy_stories import RandomStory

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=40,
    max_model_len=48,
    vocab_size=61,
    kv_groups=(KVGroup(block_size=4, max_blocks=12, num_blocks=400),),
)
GRAPHS = {
    "eager": GraphSizes(),
    "forwards": GraphSizes(forwards=(2, 8, 40)),
    "replayed": GraphSizes(decodes=(1, 2, 4), mixed=(8, 24), forwards=(40,)),
}
Make = Callable[[ExtensionResources], StepExtension]


def toy_of(graphs: str, *extensions: Make, model: type[HashLM] = HashLM, **options: Any) -> Toy:
    """Return a runner with these extensions, whose steps are captured as far as they allow."""
    config = replace(CONFIG, graphs=GRAPHS[graphs])
    maker = options.pop("maker", None) or (PlayedGraphMaker() if graphs != "eager" else None)
    ports = model(config, 400)
    return Toy(config, around=lambda _: ports, graph_maker=maker, extensions=extensions, **options)


def member(toy: Toy, kind: type[StepExtension]) -> Any:
    return next(each for each in toy.runner.extensions.members if isinstance(each, kind))


# Further inputs of the model.


def assert_salted(host: ToyHost) -> None:
    for request in [*host.finished, *host.requests.values()]:
        num_tokens, salt = len(request.outputs), salt_of(request.prompt)
        assert request.outputs == hashlm_tokens(request.prompt, num_tokens, 61, salt=salt)


SALTED = {"further": (Salts, SaltedHashLM), "positions": (Axes, AxesHashLM)}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", SALTED)
def test_an_extension_gives_inputs_to_every_step(name: str, graphs: str, lag: int) -> None:
    extension, model = SALTED[name]
    toy = toy_of(graphs, extension, model=model)
    toy.host = TellingHost(CONFIG, "salt", salt_of)
    toy.play(Unshared(3, toy.runner.config), 150, lag=lag)
    assert sum(len(tokens) for _, tokens in toy.outputs()) > 200
    assert_salted(toy.host)
    if graphs != "eager":
        assert toy.runner.num_steps[GraphMode.EAGER] == 0


@pytest.mark.parametrize("graphs", GRAPHS)
def test_embeddings_take_the_place_of_token_ids(graphs: str) -> None:
    def embeds_of(prompt: list[int]) -> dict[int, int]:
        return {place: 7 for place in range(len(prompt)) if prompt[place] % 4 == 0}

    toy = toy_of(graphs, Embeds, model=EmbeddingHashLM)
    toy.host = TellingHost(CONFIG, "embeds", embeds_of)
    toy.play(Unshared(4, toy.runner.config), 150)
    for request in [*toy.host.finished, *toy.host.requests.values()]:
        embedded = embeds_of(request.prompt)
        prompt = [embedded.get(at, token_id) for at, token_id in enumerate(request.prompt)]
        assert request.outputs == hashlm_tokens(prompt, len(request.outputs), 61)


# How much is captured, and in which variant.


class Modes(NullTrace):
    """Notes the longest request of each step and the step's mode."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, GraphMode]] = []
        self._length = 0

    def record(self, probe: str, value: Any) -> None:
        if probe == "layout":
            self._length = value.max_seq_len
        if probe == "graph_key":
            self.seen.append((self._length, value.mode))


def test_a_step_whose_capture_is_forbidden_runs_eagerly_beside_replayed_ones() -> None:
    modes = Modes()
    toy = toy_of("replayed", LongStepsEager, trace=modes)
    toy.play(RandomStory(5, toy.runner.config), 300)
    assert toy.outputs() == toy.expected()
    num_steps = toy.runner.num_steps
    assert min(num_steps[mode] for mode in GraphMode if mode is not GraphMode.FORWARD) > 10
    assert all((length > LongStepsEager.length) == (mode == "eager") for length, mode in modes.seen)


def test_an_extension_may_leave_the_model_its_own_graphs_alone() -> None:
    toy = toy_of("replayed", ForwardOnly)
    toy.play(RandomStory(5, toy.runner.config), 100)
    assert toy.outputs() == toy.expected()
    used = {mode for mode, count in toy.runner.num_steps.items() if count}
    assert used == {GraphMode.FORWARD}


@pytest.mark.parametrize("lag", [0, 2])
def test_the_graph_of_a_steps_own_variant_is_replayed(lag: int) -> None:
    maker = BakingGraphMaker()
    toy = toy_of("replayed", maker.make, model=SaltedHashLM, maker=maker)
    toy.host = TellingHost(CONFIG, "salt", salt_of)
    toy.play(Unshared(6, toy.runner.config), 300, lag=lag)
    assert_salted(toy.host)
    for variant in (False, True):
        named = [graph for graph in maker.graphs if f"variant ({variant},)" in graph.name]
        assert len(named) == 5
        assert sum(graph.num_replays for graph in named) > 20, variant


def test_a_variant_that_was_not_captured_runs_eagerly() -> None:
    maker = BakingGraphMaker()
    toy = toy_of("replayed", maker.make, model=SaltedHashLM, maker=maker)
    toy.host = TellingHost(CONFIG, "salt", salt_of)
    toy.host.add("a", [3, 1, 2])
    with patch.object(maker.adapters, "variant", lambda layout: "another"):
        for num_tokens in (3, 1, 1):
            toy.run({"a": num_tokens})
    assert_salted(toy.host)
    assert toy.runner.num_steps[GraphMode.FORWARD] == 3


# Hooks around a step.


def marks_of(output: RunnerOutput) -> list[tuple[int, int]]:
    marks: Any = output.extras["marks"]
    return list(marks)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_what_is_staged_before_a_step_is_seen_by_that_step(graphs: str, lag: int) -> None:
    toy = toy_of(graphs, Marks)
    story, pending, number = RandomStory(7, toy.runner.config), deque[Any](), 0

    def take() -> None:
        nonlocal number
        number += 1
        output = pending.popleft().wait()
        # A request without a token is in the middle of its prompt.
        tokens = [tokens[-1] if tokens else None for tokens in output.token_ids]
        seen = marks_of(output)
        assert [step for step, _ in seen] == [number] * len(seen)
        given = [token_id for _, token_id in seen]
        assert all(ours in (None, theirs) for ours, theirs in zip(tokens, given, strict=True))
        toy.host.take(output)

    for step in range(150):
        queued = toy.step(story(toy.host, step))
        if queued is not None:
            pending.append(queued)
        while len(pending) > lag:
            take()
    while pending:
        take()
    assert toy.outputs() == toy.expected()
    assert set(member(toy, Marks).rows.values()) == {
        name for name, request in toy.host.requests.items() if request.has_row
    }


@pytest.mark.parametrize("graphs", ["eager", "replayed"])
def test_a_step_that_is_committed_anew_calls_what_follows_its_commit_again(graphs: str) -> None:
    toy = toy_of(graphs, Marks)
    toy.host.add("a", [1, 2, 3], Sampling(presence_penalty=1.5, frequency_penalty=1.5))
    toy.run({"a": 3})
    marks = member(toy, Marks)
    for _ in range(8):
        marks.calls.clear()
        pending = toy.step({"a": 1})
        assert pending is not None
        output = pending.wait()
        toy.host.take(output)
        assert marks_of(output) == [(marks.number, output.token_ids[0][0])]
        assert marks.calls.count("marks after_commit") == (1 if graphs == "eager" else 2)
        assert marks.calls.count("marks before_forward") == 1


def test_extensions_are_called_in_their_order_and_give_their_outputs_by_name() -> None:
    class Others(Marks):
        name = "others"

    calls: list[str] = []
    toy = toy_of("eager", partial(Marks, calls=calls), partial(Others, calls=calls))
    toy.host.add("a", [1, 2, 3])
    pending = toy.step({"a": 3})
    assert pending is not None
    assert calls == [
        f"{name} {hook}"
        for hook in ("before_forward", "after_commit", "outputs", "after_sample")
        for name in ("marks", "others")
    ]
    output = pending.wait()
    marks = [(1, output.token_ids[0][0])]
    assert output.extras == {"marks": marks, "others": marks}
    assert list(output.extras) == ["marks", "others"]


# What extensions and plans may not do.


@pytest.mark.parametrize("of_arrival", [False, True])
def test_extras_for_nobody_are_refused(of_arrival: bool) -> None:
    toy = toy_of("eager", Salts, Marks, model=SaltedHashLM)
    toy.host.add("a", [1, 2, 3])
    plan = toy.host.plan({"a": 3})
    extras: Mapping[str, object] = {"salt": 1, "marks": 2, "nobody": 3}
    arrival: Arrival = replace(plan.arrivals[0], extras=extras)
    wrong = replace(plan, arrivals=(arrival,)) if of_arrival else replace(plan, extras=extras)
    before = snapshot(toy.runner)
    message = r"extras are given for \['marks', 'nobody'\]; those who take any are \['salt'\]"
    for refuses in (toy.runner.execute, toy.runner.check, toy.runner.update_rows):
        with pytest.raises(ProtocolError, match=message):
            refuses(wrong)
    assert snapshot(toy.runner) == before
    toy.host.take(toy.runner.sample(toy.runner.execute(plan)).wait())
    assert toy.outputs() == toy.expected()


def test_two_extensions_of_one_name_are_refused() -> None:
    with pytest.raises(ExtensionError, match=r"several extensions are named \['marks'\]"):
        toy_of("eager", Marks, Marks)


def test_an_input_is_given_by_one_extension() -> None:
    class Others(Salts):
        name = "salt of others"

        def extend(self, *args: Any) -> Any:
            return {"salt": super().extend(*args)[self.name]}

    toy = toy_of("eager", Salts, Others, model=SaltedHashLM)
    toy.host.add("a", [1, 2, 3])
    with pytest.raises(ExtensionError, match="'salt of others' gives the input 'salt', which an"):
        toy.run({"a": 3})
    assert len(toy.runner.rows) == 0


# Whoever raises: the step's work is not done, and everything is as before it.

BEFORE = ("check", "captures", "variant", "before_forward", "extend", "address")
BEHIND = ("after_commit", "outputs", "after_sample")


def host_state(runner: Runner) -> list[object]:
    blocks = runner.block_tables._num_blocks.tolist()
    return [dict(runner.rows._row_of), blocks, runner.requests.progress.upper.tolist()]


def prepared(graphs: str) -> Toy:
    """Return a runner with two requests in the middle of their decodes, one of them with a wish."""
    toy = toy_of(graphs, Faulty, Marks)
    toy.host.add("a", [1, 2, 3, 4, 5, 6, 7])
    toy.host.add("b", [8, 9], Sampling(num_logprobs=1))
    toy.run({"a": 7, "b": 2})
    toy.run({"b": 1, "a": 1})
    return toy


def assert_goes_on(toy: Toy) -> None:
    """Run on, with the request that arrived in the step that failed."""
    live = live_requests(toy.host)
    check_device(toy.runner, live)
    for _ in range(10):
        work = {name: request.num_left for name, request in toy.host.requests.items()}
        toy.run(work)
        live = live_requests(toy.host)
        check_invariants(toy.runner, live)
        check_device(toy.runner, live)
    assert toy.outputs() == toy.expected()
    assert min(len(tokens) for _, tokens in toy.outputs()) > 10


@pytest.mark.parametrize("resends", [True, False], ids=["the same plan", "another plan"])
@pytest.mark.parametrize(
    ("graphs", "hook"),
    [("eager", hook) for hook in BEFORE if hook not in ("captures", "variant")]
    + [("replayed", hook) for hook in BEFORE if hook not in ("extend", "address")],
)
def test_a_step_that_fails_before_its_forward_may_be_sent_again(
    graphs: str, hook: str, resends: bool
) -> None:
    toy = prepared(graphs)
    toy.host.add("c", [11, 12, 13])
    before = host_state(toy.runner)
    plan = toy.host.plan({"a": 1, "c": 3, "b": 1})  # "a" is given its third block
    assert plan.continuations
    member(toy, Faulty).arm(hook)
    with pytest.raises(ExtensionError, match="'faulty'"):
        toy.runner.execute(plan)
    member(toy, Faulty).arm("")
    assert host_state(toy.runner) == before
    if not resends:
        scheduled = plan.scheduled.listed() if hasattr(plan.scheduled, "listed") else plan.scheduled
        alone = replace(
            scheduled,
            req_ids=scheduled.req_ids[:1],
            num_tokens=scheduled.num_tokens[:1],
            num_computed_tokens=scheduled.num_computed_tokens[:1],
            num_known_tokens=scheduled.num_known_tokens[:1],
        )
        toy.runner.sample(toy.runner.execute(replace(plan, arrivals=(), scheduled=alone)))
        plan = replace(plan, continuations=())  # "a" has its block, and runs the same token again
    toy.host.take(toy.runner.sample(toy.runner.execute(plan)).wait())
    assert_goes_on(toy)


@pytest.mark.parametrize("hook", BEHIND)
@pytest.mark.parametrize("graphs", ["eager", "replayed"])
def test_a_step_that_fails_behind_its_forward_may_be_run_again(graphs: str, hook: str) -> None:
    toy = prepared(graphs)
    toy.host.add("c", [11, 12, 13])
    progress = toy.runner.requests.progress.upper.tolist()
    plan = toy.host.plan({"a": 1, "c": 3, "b": 1})
    step = toy.runner.execute(plan)
    member(toy, Faulty).arm(hook)
    with pytest.raises(ExtensionError, match=f"'faulty' raised ZeroDivisionError in {hook}: one t"):
        toy.runner.sample(step)
    assert toy.runner.requests.progress.upper.tolist() == progress
    with pytest.raises(ProtocolError, match="step 3 cannot be sampled"):
        toy.runner.sample(step)
    # What came and what was given stays; the work is as if it had not been sent.
    again = StepPlan(scheduled=plan.scheduled)
    toy.host.take(toy.runner.sample(toy.runner.execute(again)).wait())
    assert_goes_on(toy)


def test_an_extensions_own_refusal_is_passed_on() -> None:
    class Refuses(Faulty):
        def check(self, plan: StepPlan) -> None:
            if self.hook:
                raise ConfigError("not today: come again tomorrow")

    toy = toy_of("eager", Refuses)
    toy.host.add("a", [1, 2, 3])
    plan = toy.host.plan({"a": 3})
    before = snapshot(toy.runner)
    member(toy, Refuses).arm("check")
    with pytest.raises(Mrv2Error, match="not today"):
        toy.runner.execute(plan)
    member(toy, Refuses).arm("")
    assert snapshot(toy.runner) == before
    toy.host.take(toy.runner.sample(toy.runner.execute(plan)).wait())
    assert toy.outputs() == toy.expected()


@pytest.mark.parametrize("at_call", [1, 2])
def test_an_arrival_that_an_extension_cannot_take_leaves_no_row_behind(at_call: int) -> None:
    toy = prepared("replayed")
    toy.host.add("c", [11, 12, 13])
    toy.host.add("d", [14, 15])
    before = host_state(toy.runner)
    plan = toy.host.plan({"a": 1, "c": 3, "b": 1, "d": 2})
    member(toy, Faulty).arm("admit", at_call)
    with pytest.raises(
        ExtensionError, match=r"Faulty raised ZeroDivisionError when request '[cd]'"
    ):
        toy.runner.execute(plan)
    assert host_state(toy.runner) == before
    assert set(member(toy, Marks).rows.values()) == {"a", "b"}
    toy.host.take(toy.runner.sample(toy.runner.execute(plan)).wait())
    assert_goes_on(toy)
