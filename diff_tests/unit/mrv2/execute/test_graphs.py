"""Steps as graphs: which step is replayed, what pads it, and what is done again after it."""

from dataclasses import replace
from typing import Any

import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mrv2 import (
    CapacityError,
    CaptureError,
    Captures,
    ConfigError,
    GraphSizes,
    KVGroup,
    ProtocolError,
    Runner,
    RunnerConfig,
    Sampling,
)
from mrv2.batch.layout import BatchLayout, idle_decode, layout_batch, pack_mixed, pack_uniform
from mrv2.execute.shape import GraphKey, GraphMode, GraphShapes
from mrv2.memory.ring import NUM_SLOTS
from mrv2.memory.transfers import Transfers
from mrv2.plan import Scheduled
from mrv2_diff.invariants import snapshot
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import RandomStory, mixed_sampling

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=6,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=16), KVGroup(block_size=8, max_blocks=8)),
    graphs=GraphSizes(decodes=(1, 2, 4), forwards=(8, 16)),
)
WINDOWS = (None, 5)


def layout(query_lens: list[int], draws: bool = True) -> BatchLayout:
    known = [length if draws else length + 1 for length in query_lens]
    scheduled = Scheduled(
        req_ids=[f"r{index}" for index in range(len(query_lens))],
        num_tokens=query_lens,
        num_computed_tokens=[0] * len(query_lens),
        num_known_tokens=known,
    )
    return layout_batch(scheduled, idle_decode(len(query_lens), 9, 1).rows)


@pytest.mark.parametrize(
    ("query_lens", "draws", "key"),
    [
        ([1], True, (GraphMode.DECODE, 1, 1)),
        ([1, 1, 1], True, (GraphMode.DECODE, 4, 4)),
        ([1, 1, 1, 1], True, (GraphMode.DECODE, 4, 4)),
        ([1] * 5, True, (GraphMode.FORWARD, 8, 5)),
        ([1, 1], False, (GraphMode.FORWARD, 8, 2)),
        ([3, 1], True, (GraphMode.FORWARD, 8, 2)),
        ([9, 1], True, (GraphMode.FORWARD, 16, 2)),
        ([17], True, (GraphMode.EAGER, 17, 1)),
    ],
)
def test_a_step_gets_the_least_size_that_holds_it(
    query_lens: list[int], draws: bool, key: tuple[GraphMode, int, int]
) -> None:
    shapes = GraphShapes(CONFIG.graphs, CONFIG.max_num_reqs, CONFIG.max_num_tokens)
    assert shapes.choose(layout(query_lens, draws), Captures.WHOLE) == GraphKey(*key)
    eager = GraphKey(GraphMode.EAGER, sum(query_lens), len(query_lens))
    assert shapes.choose(layout(query_lens, draws), Captures.NONE) == eager


def test_padding_puts_the_idle_row_behind_a_step() -> None:
    packed = pack_uniform(layout([1, 1]), 4, 6).reshape(3, 8).tolist()
    assert packed == [[9, 9, 6, 6, 0, 0, 0, 0], *[[0, 1, 2, 3, 4, 0, 0, 0]] * 2]


MIXED = replace(CONFIG, graphs=GraphSizes(decodes=(1, 2, 4), mixed=(4, 16), forwards=(32,)))


@pytest.mark.parametrize(
    ("query_lens", "draws", "key"),
    [
        ([1, 1], True, (GraphMode.DECODE, 2, 2)),
        ([1] * 5, True, (GraphMode.MIXED, 16, 6)),
        ([1, 1], False, (GraphMode.MIXED, 4, 4)),
        ([3], True, (GraphMode.MIXED, 4, 4)),
        ([9, 1], True, (GraphMode.MIXED, 16, 6)),
        ([17], True, (GraphMode.FORWARD, 32, 1)),
        ([33], True, (GraphMode.EAGER, 33, 1)),
    ],
)
def test_a_step_with_prompts_is_captured_whole_where_it_fits(
    query_lens: list[int], draws: bool, key: tuple[GraphMode, int, int]
) -> None:
    shapes = GraphShapes(MIXED.graphs, MIXED.max_num_reqs, MIXED.max_num_tokens)
    assert shapes.choose(layout(query_lens, draws), Captures.WHOLE) == GraphKey(*key)


def test_padding_a_step_with_prompts_names_who_draws() -> None:
    packed = pack_mixed(layout([3, 2]), 4, 6).reshape(3, 8).tolist()
    assert packed == [[9, 9, 6, 6, 0, 0, 0, 0], [0, 3, 5, 5, 5, 0, 0, 0], [9, 9, 6, 6, 0, 0, 0, 0]]
    chunks = pack_mixed(layout([3, 2], draws=False), 4, 6).reshape(3, 8)
    assert chunks[:2].tolist() == packed[:2]
    assert chunks[2].tolist() == [6, 6, 6, 6, 0, 0, 0, 0]


class Seen:
    """An observer that counts the modes of steps."""

    def __init__(self) -> None:
        self.modes: list[GraphMode] = []

    def wants(self, probe: str) -> bool:
        return False

    def record(self, probe: str, value: object) -> None:
        if isinstance(value, GraphKey):
            self.modes.append(value.mode)


def play(config: RunnerConfig, seed: int, lag: int, *, mixed: bool) -> tuple[Toy, Seen]:
    maker = PlayedGraphMaker() if config.graphs.decodes else None
    seen = Seen()
    toy = Toy(config, windows=WINDOWS, graph_maker=maker, trace=seen)
    story = RandomStory(seed, config, sampling=mixed_sampling if mixed else None)
    toy.play(story, 150, lag=lag)
    return toy, seen


@pytest.mark.parametrize("lag", [0, 2, 2 * NUM_SLOTS])
@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_give_the_oracles_tokens(seed: int, lag: int) -> None:
    toy, seen = play(CONFIG, seed, lag, mixed=False)
    used = (GraphMode.EAGER, GraphMode.FORWARD, GraphMode.DECODE)
    assert min(seen.modes.count(mode) for mode in used) >= 5
    outputs = toy.outputs()
    assert sum(len(tokens) for _, tokens in outputs) > 100
    assert outputs == toy.expected()


@pytest.mark.parametrize("lag", [0, 2, 2 * NUM_SLOTS])
@pytest.mark.parametrize("seed", range(3))
def test_steps_with_prompts_give_the_oracles_tokens_when_replayed(seed: int, lag: int) -> None:
    toy, seen = play(MIXED, seed, lag, mixed=False)
    assert min(seen.modes.count(mode) for mode in (GraphMode.DECODE, GraphMode.MIXED)) >= 5
    outputs = toy.outputs()
    assert sum(len(tokens) for _, tokens in outputs) > 100
    assert outputs == toy.expected()


@pytest.mark.parametrize("seed", range(4))
def test_steps_with_prompts_give_the_tokens_of_eager_ones_whatever_is_asked_for(seed: int) -> None:
    replayed, seen = play(MIXED, seed, 1, mixed=True)
    eager, _ = play(replace(CONFIG, graphs=GraphSizes()), seed, 1, mixed=True)
    assert seen.modes.count(GraphMode.MIXED) >= 10
    assert replayed.outputs() == eager.outputs()


@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_give_the_tokens_of_eager_ones_whatever_is_asked_for(seed: int) -> None:
    replayed, seen = play(CONFIG, seed, 1, mixed=True)
    eager, _ = play(replace(CONFIG, graphs=GraphSizes()), seed, 1, mixed=True)
    assert seen.modes.count(GraphMode.DECODE) >= 5
    assert replayed.outputs() == eager.outputs()


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["decodes", "mixed"])
def test_capture_warm_up_and_idle_steps_leave_every_row_as_it_was(config: RunnerConfig) -> None:
    toy = Toy(config, windows=WINDOWS, graph_maker=PlayedGraphMaker())
    for index in range(3):
        toy.host.add(f"r{index}", [1 + index, 2, 3])
    toy.run({f"r{index}": 3 for index in range(3)})
    before, caches = snapshot(toy.runner), [cache[:-1].clone() for cache in toy.model.caches]
    rows = [tensor[:-1].clone() for tensor in _row_tensors(toy.runner)]
    for num_reqs in (1, 3, 5):
        toy.runner.run_idle(num_reqs)
        toy.runner.warm_up()
    after = snapshot(toy.runner)
    assert [tensor[:-1].tolist() for tensor in _row_tensors(toy.runner)] == [
        row.tolist() for row in rows
    ]
    for cache, kept in zip(toy.model.caches, caches, strict=True):
        assert torch.equal(cache[:-1], kept)
    host = [
        path
        for path in before
        if path.startswith(("runner.rows", "runner.requests", "runner.sampler"))
    ]
    differing = {path for path in host if before[path] != after[path]}
    assert len(host) > 20
    assert differing <= {path for path in host if path.endswith(("tensor", "_words"))}
    for _ in range(10):
        toy.run({f"r{index}": 1 for index in range(3)})
    assert toy.outputs() == toy.expected()


def _row_tensors(runner: Runner) -> list[torch.Tensor]:
    requests = runner.requests
    tables = [table.tensor for table in runner.block_tables.tables]
    return [requests.token_ids.tensor, requests.num_computed_tokens.tensor, *tables]


def test_forced_tokens_win_over_those_that_a_graph_committed() -> None:
    toy = Toy(CONFIG, windows=WINDOWS, graph_maker=PlayedGraphMaker())
    toy.host.add("a", [5, 6, 7])
    toy.run({"a": 3})
    step = toy.runner.execute(toy.host.plan({"a": 1}))
    drawn = toy.runner.sample(step, forced=[[11]]).wait().token_ids
    row = toy.runner.rows.row("a")
    assert drawn != [[11]]
    assert toy.runner.requests.token_ids.tensor[row, 4].item() == 11


def test_a_capture_that_fails_leaves_nothing_to_replay() -> None:
    maker = PlayedGraphMaker(fails_at="of 2 requests")
    with pytest.raises(CaptureError, match="a decode step of 2 requests"):
        Toy(CONFIG, windows=WINDOWS, graph_maker=maker)
    assert [graph.is_released for graph in maker.graphs] == [True]
    model = HashLM(CONFIG, 400, WINDOWS)
    runner = Runner(CONFIG, model, model, graph_maker=PlayedGraphMaker(fails_at="of 1 requests"))
    with pytest.raises(CaptureError):
        runner.capture()
    runner.run_idle(2)  # eagerly


def test_graphs_can_be_released_and_captured_anew() -> None:
    maker = PlayedGraphMaker()
    toy = Toy(CONFIG, windows=WINDOWS, graph_maker=maker)
    toy.host.add("a", [5, 6, 7])
    toy.run({"a": 3})
    toy.run({"a": 1})
    assert [graph.num_replays for graph in maker.graphs] == [0, 0, 1]
    toy.runner.release_graphs()
    toy.run({"a": 1})
    toy.runner.capture()
    toy.run({"a": 1})
    assert [graph.num_replays for graph in maker.graphs] == [0, 0, 1, 0, 0, 1]
    assert toy.outputs() == toy.expected()


def test_sizes_and_idle_steps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"graphs.decodes has 7; max_num_reqs is 6"):
        replace(CONFIG, graphs=GraphSizes(decodes=(1, 7)))
    with pytest.raises(ConfigError, match=r"graphs.forwards has 49; max_num_tokens is 48"):
        replace(CONFIG, graphs=GraphSizes(forwards=(49,)))
    with pytest.raises(ConfigError, match="decodes is \\(1, 1\\); give positive sizes, each once"):
        GraphSizes(decodes=(1, 1))
    model = HashLM(CONFIG, 400, WINDOWS)
    with pytest.raises(ConfigError, match="on cpu steps cannot be captured"):
        Runner(CONFIG, model, model)
    toy = Toy(CONFIG, windows=WINDOWS, graph_maker=PlayedGraphMaker())
    toy.host.add("a", [5, 6, 7])
    step = toy.runner.execute(toy.host.plan({"a": 3}))
    with pytest.raises(ProtocolError, match="step 1 was executed but not sampled"):
        toy.runner.run_idle(1)
    toy.runner.sample(step)
    runner = Runner(CONFIG, model, model, graph_maker=PlayedGraphMaker())
    with pytest.raises(CapacityError, match="7 idle requests are to run; max_num_reqs is 6"):
        runner.run_idle(7)


def test_a_plain_draw_is_of_greedy_and_random_rows_alike() -> None:
    """A graph serves both: what it draws follows the rows' own temperature and seed."""
    tokens = []
    for graphs in (CONFIG.graphs, GraphSizes()):
        config = replace(CONFIG, graphs=graphs)
        maker = PlayedGraphMaker() if graphs.decodes else None
        toy = Toy(config, windows=WINDOWS, graph_maker=maker)
        for index in range(3):
            sampling = Sampling(temperature=0.7 * index, seed=index)
            toy.host.add(f"r{index}", [5, 6, 7], sampling=sampling)
        toy.run({f"r{index}": 3 for index in range(3)})
        for _ in range(20):
            toy.run({f"r{index}": 1 for index in range(3)})
        tokens.append(toy.outputs())
    assert tokens[0] == tokens[1]


class CountingTransfers(Transfers):
    """Counts uploads."""

    num_uploads = 0

    def upload(self, values: npt.NDArray[Any], out: Tensor | None = None) -> Tensor:
        self.num_uploads += 1
        return super().upload(values, out)


def test_a_replayed_step_costs_one_upload_where_something_changed_and_none_elsewhere() -> None:
    transfers = CountingTransfers(CONFIG.device)
    seen = Seen()
    toy = Toy(
        CONFIG, windows=WINDOWS, transfers=transfers, graph_maker=PlayedGraphMaker(), trace=seen
    )
    for name in "abc":
        toy.host.add(name, [5, 6, 7, 8])
    toy.run(dict.fromkeys("abc", 4))
    uploads = []
    for number in range(6):
        if number == 4:
            toy.host.finish("b")
        transfers.num_uploads = 0
        toy.run(dict.fromkeys(toy.host.requests, 1))
        uploads.append(transfers.num_uploads)
    # The padded layout and the fifth block; then nothing, until the next block and a departure.
    assert seen.modes[1:] == [GraphMode.DECODE] * 6
    assert uploads == [1, 0, 0, 0, 1, 0]
