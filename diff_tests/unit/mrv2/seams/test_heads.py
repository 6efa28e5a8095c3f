"""Heads: one that pools, one that relays what a later rank draws, and those that are wrong."""

from collections import deque
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mrv2 import (
    POOLED,
    ConfigError,
    ExtensionError,
    GenerateHead,
    GraphSizes,
    KVGroup,
    PendingOutput,
    PlainDraw,
    ProtocolError,
    RunnerConfig,
    SampledTokens,
    Sampling,
    StepPlan,
    pool_head,
)
from mrv2.batch.inputs import InputBatch
from mrv2.execute.shape import GraphMode
from mrv2.ports import ForwardOutput
from mrv2_diff.invariants import PoisonFreed, check_device, check_invariants
from mrv2_diff.late_play import live_requests
from mrv2_diff.models.hashlm import hashlm_contexts, hashlm_tokens
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.seams.heads import FaultyHead, Relay, SummingPooler, relay
from mrv2_diff.toy_host import Toy, ToyHost
from mrv2_diff.toy_stories import RandomStory

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=40,
    max_model_len=48,
    vocab_size=61,
    kv_groups=(
        KVGroup(block_size=4, max_blocks=12, num_blocks=400),
        KVGroup(block_size=8, max_blocks=6, num_blocks=400),
    ),
)
GRAPHS = GraphSizes(decodes=(1, 2, 4), mixed=(8, 24), forwards=(40,))
REPLAYED = replace(CONFIG, graphs=GRAPHS)
TWO_GROUPS = (None, None)


# A head that pools.


def summed(prompt: list[int]) -> int:
    return (sum(hashlm_contexts(prompt, TWO_GROUPS)) + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("config", [CONFIG, REPLAYED], ids=["eager", "replayed"])
def test_a_pool_head_gives_each_prompts_sum_over_its_chunks(config: RunnerConfig) -> None:
    maker = PlayedGraphMaker() if config.graphs.decodes else None
    head = pool_head(SummingPooler(config))
    toy = Toy(config, graph_maker=maker, head=head, extensions=())
    PoisonFreed(toy.runner)
    story, num_pooled = PromptStory(1, config), 0
    for number in range(300):
        work = story(toy.host, number)
        queued = toy.step(work)
        live = live_requests(toy.host)
        check_invariants(toy.runner, live, flushed=bool(work))
        check_device(toy.runner, {req_id: live[req_id] for req_id in work})
        if queued is None:
            continue
        output = queued.wait()
        assert output.token_ids == [[] for _ in work]
        pooled: Any = output.extras[POOLED]
        for req_id in output.req_ids:
            request = toy.host.requests[req_id]
            assert (req_id in pooled) == (request.num_computed >= len(request.prompt))
            if req_id in pooled:
                assert pooled[req_id].tolist() == [summed(request.prompt)]
                toy.host.finish(req_id)
                num_pooled += 1
    assert num_pooled > 100
    used = {mode for mode, count in toy.runner.num_steps.items() if count}
    assert used == {GraphMode.FORWARD if config.graphs.forwards else GraphMode.EAGER}


class PromptStory(RandomStory):
    """Prompts alone, none of which begins with another one's, chunked and preempted.

    None is rewound: a sum has no way back.
    """

    def _disturb_some(self, host: ToyHost) -> None:
        for request in host.requests.values():
            if request.has_row and self._random.random() < 0.08:
                host.preempt(request.req_id)

    @property
    def _page(self) -> int:
        return self._config.max_model_len + 1


def test_a_pool_head_refuses_drafts() -> None:
    with pytest.raises(ConfigError, match="max_drafts is 2, and a pooling head draws nothing"):
        Toy(replace(CONFIG, max_drafts=2), head=pool_head(SummingPooler(CONFIG)))


# A head that relays: two runners in a row draw what one draws.

MAKERS = {
    "eager": (False, False),
    "replayed": (True, True),
    "the first replayed": (True, False),
    "the last replayed": (False, True),
}


def relayed(replays: tuple[bool, bool]) -> Relay:
    first, last = ((REPLAYED, PlayedGraphMaker()) if each else (CONFIG, None) for each in replays)
    return relay((first[0], last[0]), (first[1], last[1]))


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_two_runners_in_a_row_draw_what_one_does(name: str, lag: int) -> None:
    pair = relayed(MAKERS[name])
    host, story = pair.last.host, RandomStory(2 + lag, CONFIG)
    pending = deque[PendingOutput]()
    for number in range(250):
        work = story(host, number)
        queued = pair.step(work)
        for toy in (pair.first, pair.last):
            check_invariants(toy.runner, live_requests(host), flushed=bool(work))
        if queued is not None:
            pending.append(queued)
        while len(pending) > lag:
            host.take(pending.popleft().wait())
    outputs = pair.last.outputs()
    assert sum(request.num_preemptions for request in host.finished) > 5
    assert sum(len(tokens) for _, tokens in outputs) > 300
    for request in [*host.finished, *host.requests.values()]:
        num_tokens = len(request.outputs)
        assert request.outputs == hashlm_tokens(request.prompt, num_tokens, 61, TWO_GROUPS)
    for toy, replays in zip((pair.first, pair.last), MAKERS[name], strict=True):
        assert toy.runner.num_steps[GraphMode.DECODE] > (10 if replays else -1)


# Heads that break their protocol.

FAULTS = {
    "raises": "'faulty head' raised ZeroDivisionError in finish: one too many",
    "rows": r"gives tokens of shape \[2, 1\] and counts of shape \[3\] for 3 requests",
    "columns": r"gives tokens of shape \[3, 2\] and counts of shape \[3\] for 3 requests",
    "too many": r"'faulty head' samples \[2, 2, 2\] tokens for requests of \[1, 1, 1\] logits",
    "none": r"'faulty head' samples \[0, 0, 0\] tokens for requests of \[1, 1, 1\] logits",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("config", [CONFIG, REPLAYED], ids=["eager", "replayed"])
def test_a_step_whose_head_is_wrong_may_be_run_again(config: RunnerConfig, fault: str) -> None:
    maker = PlayedGraphMaker() if config.graphs.decodes else None
    toy = Toy(config, graph_maker=maker, head=FaultyHead, windows=TWO_GROUPS)
    toy.host.add("a", [1, 2, 3, 4, 5, 6, 7])
    toy.host.add("b", [8, 9], Sampling(num_logprobs=1))
    toy.run({"a": 7, "b": 2})
    toy.run({"b": 1, "a": 1})
    toy.host.add("c", [11, 12, 13])
    progress = toy.runner.requests.progress.upper.tolist()
    plan = toy.host.plan({"a": 1, "c": 3, "b": 1})
    step, head = toy.runner.execute(plan), toy.runner.head
    assert isinstance(head, FaultyHead)
    head.fault = fault
    with pytest.raises(ExtensionError, match=FAULTS[fault]):
        toy.runner.sample(step)
    head.fault = ""
    assert toy.runner.requests.progress.upper.tolist() == progress
    again = StepPlan(scheduled=plan.scheduled)
    toy.host.take(toy.runner.sample(toy.runner.execute(again)).wait())
    check_device(toy.runner, live_requests(toy.host))
    for _ in range(10):
        toy.run({name: request.num_left for name, request in toy.host.requests.items()})
    assert toy.outputs() == toy.expected()


def test_what_a_graph_draws_wrongly_is_found_when_its_output_is_waited_for() -> None:
    class DrawsNothing(FaultyHead):
        def plain(self, batch: InputBatch, output: ForwardOutput) -> PlainDraw:
            drawn = super().plain(batch, output)
            if self.fault:
                drawn.sampled = replace(
                    drawn.sampled, num_sampled=torch.zeros_like(drawn.sampled.num_sampled)
                )
            return drawn

    config = replace(REPLAYED, max_drafts=1, graphs=replace(GRAPHS, query_lens=(1, 2)))
    DrawsNothing.verifies_drafts = True
    toy = Toy(config, graph_maker=PlayedGraphMaker(), head=DrawsNothing, windows=TWO_GROUPS)
    toy.host.max_drafts = 1
    toy.host.add("a", [1, 2, 3])
    toy.run({"a": 3})
    assert isinstance(toy.runner.head, DrawsNothing)
    toy.runner.head.fault = "none"
    pending = toy.step({"a": 2})
    assert pending is not None
    with pytest.raises(ExtensionError, match="the head sampled 0 tokens for request 'a', which"):
        pending.wait()
    toy.runner.head.fault = ""
    toy.host.finish("a")
    toy.host.add("b", [4, 5])
    following = toy.step({"b": 2})  # others are served on
    assert following is not None
    assert following.wait().token_ids == [hashlm_tokens([4, 5], 1, 61, TWO_GROUPS)]


def test_a_heads_own_refusal_gives_the_step_up_under_a_name_that_says_so() -> None:
    toy = Toy(CONFIG, windows=TWO_GROUPS)
    toy.host.add("a", [1, 2, 3, 4], Sampling(num_prompt_logprobs=0))
    step = toy.runner.execute(plan := toy.host.plan({"a": 4}))
    refusal = ProtocolError("a request has several logits")
    with (
        patch.object(toy.runner.extensions, "after_sample", side_effect=refusal),
        pytest.raises(ExtensionError, match="step 1 is given up: a request has several logits"),
    ):
        toy.runner.sample(step)
    output = toy.runner.sample(toy.runner.execute(StepPlan(scheduled=plan.scheduled))).wait()
    scored = output.extras["prompt_logprobs"]
    assert isinstance(scored, dict)
    assert list(scored) == ["a"], "the prompt's logprobs were lost with the step"


@pytest.mark.parametrize("fault", ["int32 tokens", "strided tokens"])
def test_what_kernels_would_misread_is_refused_before_the_commit(fault: str) -> None:
    class Misfit(GenerateHead):
        def accept(self, batch: InputBatch, cu_num_logits: Tensor, drawn: Tensor) -> SampledTokens:
            given = super().accept(batch, cu_num_logits, drawn)
            wrong = given.token_ids.int()
            if fault == "strided tokens":
                wrong = torch.stack([given.token_ids] * 2, 1)[:, 0]
            return replace(given, token_ids=wrong)

    toy = Toy(CONFIG, head=Misfit, windows=TWO_GROUPS)
    toy.host.add("a", [1, 2, 3])
    toy.host.add("b", [4, 5])
    step = toy.runner.execute(toy.host.plan({"a": 3, "b": 2}))
    with pytest.raises(ExtensionError, match="give contiguous int64 tokens and int32 counts"):
        toy.runner.sample(step)
