"""Drafts: whatever is run ahead of its logits, each request draws what it draws without any."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mrv2 import (
    ConfigError,
    ExtensionError,
    GrammarMask,
    GraphSizes,
    KVGroup,
    Mrv2Error,
    ProtocolError,
    RunnerConfig,
    Sampling,
    StepPlan,
    ThinkingMarkers,
)
from mrv2.batch.inputs import InputBatch
from mrv2.execute.shape import GraphMode
from mrv2.memory.transfers import Transfers
from mrv2.sampling.bitmask import num_words
from mrv2_diff.invariants import PoisonFreed, check_device, check_invariants, snapshot
from mrv2_diff.late_play import live_requests, play_late
from mrv2_diff.models.hashlm import HashAttention, HashLM, hashlm_tokens
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.race_lane import AtRandom, HeldBack, LastMoment, Prompt, Schedule
from mrv2_diff.seams.draft_stories import (
    DRAFTS,
    DraftingHost,
    DraftStory,
    Life,
    drafting_toy,
    undrafted_lives,
)
from mrv2_diff.seams.drafts import AcceptsAll
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import mixed_sampling

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=40,
    max_model_len=48,
    vocab_size=61,
    kv_groups=(KVGroup(block_size=4, max_blocks=12, num_blocks=400),),
    thinking=ThinkingMarkers(start=(3,), end=(5, 8)),
)
NUM_STEPS = {0: 500, 1: 1025, 2: 1025}
"""Of each play of the proof, by lag: 24 plays, more than 20,000 steps in all."""


def with_drafts(num_drafts: int, *, replayed: bool) -> RunnerConfig:
    graphs = GraphSizes()
    if replayed:
        graphs = GraphSizes(decodes=(1, 2, 4), query_lens=(1, 1 + num_drafts))
    return replace(CONFIG, max_drafts=num_drafts, graphs=graphs)


class Passed:
    """An event: a runner that was given one knows nothing of its step until somebody waits."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def drafting(config: RunnerConfig) -> tuple[Toy, DraftingHost]:
    maker = PlayedGraphMaker() if config.graphs.decodes else None
    return drafting_toy(config, maker, transfers=Transfers(config.device, record=Passed))


def greedy_or_random(rng: Random, config: RunnerConfig) -> Sampling:
    temperature = rng.choice((0.0, 0.0, 0.6, 1.2))
    return Sampling(temperature=temperature, seed=rng.getrandbits(64))


@cache
def lives() -> list[Life]:
    return undrafted_lives(1, CONFIG, 24, greedy_or_random)


@cache
def demanding_lives() -> list[Life]:
    return undrafted_lives(2, CONFIG, 24, mixed_sampling)


def assert_undrafted(host: DraftingHost, at_least: int) -> None:
    requests = [*host.finished, *host.requests.values()]
    assert sum(len(request.outputs) for request in requests) >= at_least
    for request in requests:
        life, num_taken = host.lives[request], len(request.outputs)
        assert request.outputs == life.tokens[:num_taken]
        scores = life.scores[:num_taken] if life.scores else []
        assert host.scores.get(request, []) == scores
        assert host.of_prompts.get(request, life.of_prompt) == life.of_prompt


def test_what_greedy_requests_draw_undrafted_is_what_the_oracle_says() -> None:
    greedy = [life for life in lives() if not life.sampling.temperature]
    assert 10 < len(greedy) < len(lives()) - 10
    for life in greedy:
        assert len(life.tokens) == CONFIG.max_model_len - len(life.prompt) + 1
        assert life.tokens == hashlm_tokens(life.prompt, len(life.tokens), CONFIG.vocab_size)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_drafts_change_no_token_in_any_schedule(num_drafts: int, lag: int, replayed: bool) -> None:
    toy, host = drafting(with_drafts(num_drafts, replayed=replayed))
    PoisonFreed(toy.runner)
    story = DraftStory(10 * num_drafts + lag, toy.runner.config, lives())
    if lag:
        toy.play(story, NUM_STEPS[lag], lag=lag)
        assert host.num_unseen > 100, "the host has seen all tokens before all drafts"
    else:
        for number in range(NUM_STEPS[lag]):
            work = story(host, number)
            toy.run(work)
            live = live_requests(host)
            check_invariants(toy.runner, live, flushed=bool(work))
            check_device(toy.runner, {req_id: live[req_id] for req_id in work})
    assert_undrafted(host, at_least=3 * NUM_STEPS[lag] // 2)
    ran_all = [host.accepted[num_drafts, accepted] for accepted in range(1 + num_drafts)]
    assert min(ran_all) >= 3, f"of {num_drafts} drafts {ran_all} times 0, 1, ... were accepted"
    assert host.accepted[0, 0] > 100
    for event in ("preempted", "finished", "id used again in the same step"):
        assert host.events[event] > 0, event
    assert toy.runner.num_steps[GraphMode.DECODE] > (150 if replayed else -1)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(("num_drafts", "lag"), [(2, 0), (3, 2)])
def test_drafts_change_nothing_that_requests_ask_for(
    num_drafts: int, lag: int, replayed: bool
) -> None:
    """Penalties, bad words, least tokens, budgets, logprobs of tokens and of prompts among it."""
    toy, host = drafting(with_drafts(num_drafts, replayed=replayed))
    toy.play(DraftStory(lag, toy.runner.config, demanding_lives()), 500, lag=lag)
    assert_undrafted(host, at_least=800)
    assert min(len(host.scores), len(host.of_prompts)) > 10
    assert sum(host.accepted[num_drafts, n] for n in range(1, 1 + num_drafts)) > 30


# Single steps of one request, whose every draw is known.

PROMPT = [1, 2, 3, 4, 5]


def one_request(
    num_drafts: int, tokens: list[int], *, replayed: bool, sampling: Sampling | None = None
) -> tuple[Toy, DraftingHost]:
    """Return a runner with a request "a" whose prompt has run, and which expects `tokens`."""
    maker = PlayedGraphMaker() if replayed else None
    toy, host = drafting_toy(with_drafts(num_drafts, replayed=replayed), maker, head=AcceptsAll)
    request = host.add("a", PROMPT, sampling)
    host.lives[request] = Life(prompt=request.prompt, sampling=request.sampling, tokens=tokens)
    toy.run({"a": len(PROMPT)})
    return toy, host


def greedy(num_tokens: int) -> list[int]:
    return hashlm_tokens(PROMPT, num_tokens, CONFIG.vocab_size)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_a_draw_under_penalties_reads_the_drafts_before_it(replayed: bool) -> None:
    """A graph draws without them at first, and commits what it drew over the drafts."""
    sampling = Sampling(logit_bias={7: 100.0, 8: 90.0}, bad_words=((7, 7), (8, 8)))
    toy, host = one_request(2, [7, 8] * 20, replayed=replayed, sampling=sampling)
    for _ in range(6):
        host.draft("a", 2)
        toy.run({"a": 3})
    assert host.requests["a"].outputs == [7, *[8, 7, 8, 7, 8, 7] * 3]
    assert toy.runner.num_steps[GraphMode.DECODE] == (6 if replayed else 0)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("num_forced", [1, 2, 3, 4])
def test_as_many_tokens_are_forced_as_the_host_likes(num_forced: int, replayed: bool) -> None:
    """The drafts are those of the host, too: what was run stays in the cache."""
    toy, host = one_request(3, [0, 11, 12, 13], replayed=replayed)
    host.draft("a", 3)
    step = toy.runner.execute(host.plan({"a": 4}))
    forced = [11, 12, 13, 14][:num_forced]
    pending = toy.runner.sample(step, forced=[forced])
    output = pending.wait()
    assert output.token_ids == [greedy(2)[1:]]
    assert pending.committed() == [forced]
    host.take(replace(output, token_ids=[forced]))
    check_device(toy.runner, live_requests(host))
    toy.run({"a": 1})
    known = [*PROMPT, *greedy(1), *forced]
    assert host.requests["a"].outputs[1 + num_forced :] == hashlm_tokens(known, 1, 61)


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_a_grammar_masks_any_of_a_requests_logits(replayed: bool) -> None:
    toy, host = one_request(2, [*greedy(2), 17], replayed=replayed)
    bitmask = np.zeros((2, num_words(CONFIG.vocab_size)), dtype=np.int32)
    bitmask[:, 0] = 1 << 17, 1 << 18
    host.draft("a", 2)
    step = toy.runner.execute(host.plan({"a": 3}))
    beyond = GrammarMask(bitmask=bitmask, logit_idx=np.array([1, 3], dtype=np.int32))
    with pytest.raises(ProtocolError, match="each must be one of the step's 3"):
        toy.runner.sample(step, grammar=beyond)
    grammar = GrammarMask(bitmask=bitmask, logit_idx=np.array([1, 2], dtype=np.int32))
    output = toy.runner.sample(step, grammar=grammar).wait()
    # Both drafts are right: the first as the model has it, the second as the grammar does.
    assert output.token_ids == [[*greedy(2)[1:], 17, 18]]
    host.take(output)
    check_device(toy.runner, live_requests(host))


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
def test_a_step_given_up_behind_drafts_in_flight_may_be_run_again(replayed: bool) -> None:
    toy, host = drafting(with_drafts(2, replayed=replayed))
    request, wrong = host.add("a", PROMPT), [PROMPT[0]] * 30
    host.lives[request] = Life(prompt=request.prompt, sampling=request.sampling, tokens=wrong)
    toy.run({"a": len(PROMPT)})
    host.draft("a", 2)
    first = toy.step({"a": 3})
    assert first is not None
    plan = host.plan({"a": 1})
    step = toy.runner.execute(plan)
    fault = ZeroDivisionError("one too many")
    grammar = GrammarMask(
        bitmask=np.zeros((1, num_words(CONFIG.vocab_size)), dtype=np.int32),
        logit_idx=np.array([0], dtype=np.int32),
    )
    with (
        patch.object(toy.runner.head, "finish", side_effect=fault),
        pytest.raises(ExtensionError, match="ZeroDivisionError in finish: one too many"),
    ):
        toy.runner.sample(step, grammar=grammar)
    second = toy.runner.sample(toy.runner.execute(StepPlan(scheduled=plan.scheduled)))
    host.take(first.wait())
    host.take(second.wait())
    check_device(toy.runner, live_requests(host))
    for _ in range(4):
        toy.run({"a": 1})
    outputs = host.requests["a"].outputs
    assert len(outputs) >= 6
    assert outputs == greedy(len(outputs))


WRONG_DRAFTS: dict[str, tuple[dict[str, list[int]], type[Mrv2Error], str]] = {
    "too many": ({"a": [1, 2, 3]}, ProtocolError, "'a' is given 3 drafts and is to run 2"),
    "too few": ({"a": [1]}, ProtocolError, "'a' is given 1 drafts and is to run 2"),
    "of nobody": ({"a": [1, 2], "x": [1]}, ProtocolError, "'x' is given 1 drafts and is to run 0"),
    "no token": ({"a": [1, 61]}, ConfigError, r"'a' is given drafts \[61\], outside"),
}


@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_drafts_that_do_not_fit_the_work_are_refused(name: str) -> None:
    drafts, error, message = WRONG_DRAFTS[name]
    toy, host = one_request(2, greedy(20), replayed=False)
    host.draft("a", 2)
    plan = host.plan({"a": 3})
    before = snapshot(toy.runner)
    with pytest.raises(error, match=message):
        toy.runner.execute(replace(plan, extras={"drafts": drafts}))
    assert snapshot(toy.runner) == before
    host.take(toy.runner.sample(toy.runner.execute(plan)).wait())
    assert host.requests["a"].outputs == greedy(20)[: len(host.requests["a"].outputs)]


def test_drafts_of_a_plan_that_was_only_checked_are_not_staged() -> None:
    toy, host = one_request(2, greedy(20), replayed=False)
    host.draft("a", 2)
    plan = host.plan({"a": 3})
    toy.runner.check(plan)
    tokens = toy.runner.requests.token_ids.tensor.clone()
    toy.runner.run_idle(1)
    assert torch.equal(toy.runner.requests.token_ids.tensor, tokens)


# What a planner on the host is told of lengths while drafts are in flight.


class Lengths(HashLM):
    """Notes what the layout's lengths are beside those of the device."""

    def __init__(self, config: RunnerConfig, *, exact: bool) -> None:
        super().__init__(config, 400)
        self.needs_exact_lengths = exact
        self.seen: list[tuple[bool, list[int]]] = []

    def plan(self, batch: InputBatch) -> HashAttention:
        ahead = batch.layout.seq_lens - batch.seq_lens.numpy()
        self.seen.append((batch.layout.is_exact, ahead.tolist()))
        return super().plan(batch)


def lengths(lag: int, *, exact: bool) -> Lengths:
    config = with_drafts(3, replayed=False)
    ports = Lengths(config, exact=exact)
    transfers = Transfers(config.device, record=Passed)
    toy, host = drafting_toy(config, around=lambda model: ports, transfers=transfers)
    toy.play(DraftStory(5, config, lives()), 300, lag=lag)
    assert_undrafted(host, at_least=500)
    return ports


@pytest.mark.parametrize("lag", [0, 2])
def test_a_planner_that_needs_exact_lengths_is_given_those_of_the_device(lag: int) -> None:
    seen = lengths(lag, exact=True).seen
    assert all(is_exact and not any(ahead) for is_exact, ahead in seen)


def test_other_planners_are_given_bounds_while_drafts_are_in_flight() -> None:
    seen = lengths(2, exact=False).seen
    assert all(not any(ahead) for is_exact, ahead in seen if is_exact)
    bounds = [ahead for is_exact, ahead in seen if not is_exact]
    assert all(min(ahead) >= 0 for ahead in bounds)
    assert sum(max(ahead) > 0 for ahead in bounds) > 50
    assert all(is_exact for is_exact, _ in lengths(0, exact=False).seen)


# A device that is late.

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "everything to the last moment": LastMoment,
    "every commit by 2 steps": lambda: HeldBack(
        which=lambda queued: queued.kind == "graph" or queued.name == "batch.commit_step",
        num_steps=2,
    ),
    "at random": lambda: AtRandom(3, 0.05),
}


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_device_changes_no_step_with_drafts(name: str, replayed: bool, lag: int) -> None:
    config = with_drafts(2, replayed=replayed)
    prompt, late = (
        play_late(
            config,
            DraftStory(11, config, demanding_lives()),
            50,
            lag=lag,
            schedule=schedule,
            feature=DRAFTS,
        )
        for schedule in (Prompt(), SCHEDULES[name]())
    )
    assert late.stream is not None
    assert late.stream.most_behind > 0, "nothing was late"
    assert late.differences(prompt) == []
    assert late.results == late.results_at_end
    assert sum(len(tokens) for _, tokens in late.outputs) > 80
