"""Attention planners: on the host before a replay, never captured, decodes first."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2 import GraphSizes, KVGroup, NullTrace, RunnerConfig, Sampling
from mrv2.batch.layout import BatchLayout
from mrv2.execute.shape import GraphMode
from mrv2_diff.models.hashlm import HashLM, hashlm_tokens
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.seams.draft_stories import (
    DraftStory,
    Life,
    ScoringHost,
    drafting_toy,
    undrafted_lives,
)
from mrv2_diff.seams.planners import DecodesFirst, HostPlanned, NeverCaptured, PlannedLate
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import RandomStory

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=40,
    max_model_len=48,
    vocab_size=61,
    kv_groups=(KVGroup(block_size=4, max_blocks=12, num_blocks=400),),
)
REPLAYED = replace(CONFIG, graphs=GraphSizes(decodes=(1, 2, 4), mixed=(8, 24), forwards=(40,)))


def played(kind: type[HashLM], config: RunnerConfig, seed: int, lag: int, **options: Any) -> Toy:
    ports = kind(config, 400)
    maker = PlayedGraphMaker() if config.graphs.decodes else None
    toy = Toy(config, around=lambda _: ports, graph_maker=maker, **options)
    toy.play(RandomStory(seed, config), 200, lag=lag)
    return toy


# Planned on the host.


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("config", [CONFIG, REPLAYED], ids=["eager", "replayed"])
def test_a_planner_of_the_host_plans_each_step_before_it(config: RunnerConfig, lag: int) -> None:
    toy = played(HostPlanned, config, 1, lag)
    assert sum(len(tokens) for _, tokens in toy.outputs()) > 300
    assert toy.outputs() == toy.expected()
    if config is REPLAYED:
        assert min(toy.runner.num_steps[mode] for mode in (GraphMode.DECODE, GraphMode.MIXED)) > 20


def test_a_plan_that_is_made_behind_its_replay_shows() -> None:
    toy = played(PlannedLate, REPLAYED, 1, 0)
    assert toy.outputs() != toy.expected()
    eager = played(PlannedLate, CONFIG, 1, 0)
    assert eager.outputs() == eager.expected()


@pytest.mark.parametrize("lag", [0, 2])
def test_a_planner_of_the_host_is_given_the_lengths_that_drafts_leave(lag: int) -> None:
    graphs = GraphSizes(decodes=(1, 2, 4), query_lens=(1, 3))
    config = replace(CONFIG, max_drafts=2, graphs=graphs)
    lives: list[Life] = undrafted_lives(4, config, 12, lambda rng, config: Sampling())
    ports = HostPlanned(config, 400)
    toy, host = drafting_toy(config, PlayedGraphMaker(), around=lambda _: ports)
    toy.play(DraftStory(4, config, lives), 300, lag=lag)
    for request in [*host.finished, *host.requests.values()]:
        assert request.outputs == host.lives[request].tokens[: len(request.outputs)]
    assert sum(count for (ran, kept), count in host.accepted.items() if ran > kept) > 50
    assert toy.runner.num_steps[GraphMode.DECODE] > 50


# Never captured.


def test_a_planner_that_cannot_be_captured_leaves_every_step_eager() -> None:
    toy = played(NeverCaptured, REPLAYED, 2, 1)
    assert toy.outputs() == toy.expected()
    used = {mode for mode, count in toy.runner.num_steps.items() if count}
    assert used == {GraphMode.EAGER}


# Decodes first.


class Layouts(NullTrace):
    """Keeps each step's layout."""

    def __init__(self) -> None:
        self.seen: list[BatchLayout] = []

    def record(self, probe: str, value: Any) -> None:
        if probe == "layout":
            self.seen.append(value)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("config", [CONFIG, REPLAYED], ids=["eager", "replayed"])
def test_decodes_come_first_on_the_device_and_outputs_in_the_hosts_order(
    config: RunnerConfig, lag: int
) -> None:
    layouts = Layouts()
    toy = played(DecodesFirst, config, 3, lag, trace=layouts)
    assert toy.outputs() == toy.expected()  # the host checks who was given them
    moved = [layout for layout in layouts.seen if layout.order is not None]
    assert len(moved) > 20
    for layout in layouts.seen:
        is_long = layout.query_lens > 1
        assert is_long.tolist() == sorted(is_long.tolist())
    for layout in moved:
        assert layout.order is not None
        listed = [layout.scheduled.req_ids[place] for place in layout.order]
        assert listed == layout.req_ids != layout.scheduled.req_ids


def test_logprobs_come_in_the_hosts_order() -> None:
    scores = []
    for kind in (DecodesFirst, HashLM):
        ports = kind(CONFIG, 400)
        toy = Toy(CONFIG, around=lambda _, ports=ports: ports)  # type: ignore[misc]
        toy.host = host = ScoringHost(CONFIG.kv_groups, 400)

        def sampling(rng: Any, config: RunnerConfig) -> Sampling:
            return Sampling(num_logprobs=rng.randint(0, 3), num_prompt_logprobs=rng.choice((1, 2)))

        toy.play(RandomStory(6, CONFIG, sampling=sampling), 120)
        scores.append([(r.req_id, host.scores[r], host.of_prompts.get(r)) for r in host.finished
                       if r.outputs])  # fmt: skip
    assert scores[0] == scores[1]
    assert sum(len(each) for _, each, _ in scores[0]) > 200


# Captured steps of one token.


def test_a_captured_step_of_one_prompt_token_draws_nothing() -> None:
    """A step of one token and one request has one logit for all tokens, and none is wanted."""
    config = replace(CONFIG, graphs=GraphSizes(mixed=(1, 4, 16)))
    toy = Toy(config, graph_maker=PlayedGraphMaker())
    prompt = [1, 2, 3, 4, 5, 6]
    request = toy.host.add("a", prompt)
    row_tokens = toy.runner.requests.token_ids.tensor
    for place in range(len(prompt)):
        assert request.outputs == []
        toy.run({"a": 1})
        assert row_tokens[toy.runner.rows.row("a"), : len(prompt)].tolist() == prompt, place
    for _ in range(5):
        toy.run({"a": 1})
    assert request.outputs == hashlm_tokens(prompt, 6, 61)
    assert toy.runner.num_steps[GraphMode.MIXED] == 11


@pytest.mark.parametrize("lag", [0, 2])
def test_stories_with_captured_steps_of_one_token_draw_what_the_oracle_says(lag: int) -> None:
    config = replace(CONFIG, max_num_reqs=2, graphs=GraphSizes(mixed=(1, 4, 16)))
    toy = Toy(config, graph_maker=PlayedGraphMaker())
    toy.play(RandomStory(8, config), 300, lag=lag)
    assert toy.runner.num_steps[GraphMode.MIXED] > 150
    assert toy.outputs() == toy.expected()
