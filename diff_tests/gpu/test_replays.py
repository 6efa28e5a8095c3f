"""Real CUDA graphs of whole decode steps: what they give after everything about them changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mrv2 import CaptureError, GraphSizes, KVGroup, Runner, RunnerConfig
from mrv2.execute.capture import CudaGraphMaker
from mrv2.execute.shape import GraphMode
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import RandomStory, mixed_sampling

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CONFIG = RunnerConfig(
    device=CUDA,
    max_num_reqs=6,
    max_num_tokens=128,
    max_model_len=96,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=24), KVGroup(block_size=8, max_blocks=12)),
    graphs=GraphSizes(decodes=(1, 2, 4, 6)),
)
MIXED = replace(CONFIG, graphs=GraphSizes(decodes=(1, 2, 4, 6), mixed=(4, 16, 64)))
WINDOWS = (None, 5)


def play(config: RunnerConfig, seed: int, lag: int, *, mixed: bool = False) -> Toy:
    maker = CudaGraphMaker(CUDA) if config.graphs.decodes else None
    toy = Toy(config, num_blocks=2000, windows=WINDOWS, graph_maker=maker)
    story = RandomStory(seed, config, sampling=mixed_sampling if mixed else None)
    toy.play(story, 300, lag=lag)
    return toy


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_replays_give_the_oracles_tokens_whatever_changed_between_them(seed: int, lag: int) -> None:
    """Rows, lengths, blocks, sizes and neighbours differ from one replay to the next."""
    toy = play(CONFIG, seed, lag)
    assert toy.runner.num_steps[GraphMode.DECODE] > 20
    outputs = toy.outputs()
    assert sum(len(tokens) for _, tokens in outputs) > 300
    assert outputs == toy.expected()


@pytest.mark.parametrize("seed", range(4))
def test_replays_give_the_tokens_of_eager_steps_whatever_is_asked_for(seed: int) -> None:
    replayed = play(CONFIG, seed, 2, mixed=True)
    eager = play(replace(CONFIG, graphs=GraphSizes()), seed, 2, mixed=True)
    assert replayed.runner.num_steps[GraphMode.DECODE] > 20
    assert replayed.outputs() == eager.outputs()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("graphs", [GraphSizes(), MIXED.graphs])
def test_tokens_may_lie_in_the_hosts_memory(graphs: GraphSizes, seed: int) -> None:
    toy = play(replace(MIXED, graphs=graphs, maps_tokens=True), seed, 2)
    assert not toy.runner.requests.token_ids.tensor.is_cuda
    assert toy.outputs() == toy.expected()


@pytest.mark.parametrize("seed", range(2))
def test_parameters_are_served_from_tokens_in_the_hosts_memory(seed: int) -> None:
    mapped = play(replace(MIXED, maps_tokens=True), seed, 2, mixed=True)
    eager = play(replace(CONFIG, graphs=GraphSizes()), seed, 2, mixed=True)
    assert mapped.outputs() == eager.outputs()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_steps_with_prompts_give_the_oracles_tokens_when_replayed(seed: int, lag: int) -> None:
    toy = play(MIXED, seed, lag)
    assert toy.runner.num_steps[GraphMode.MIXED] > 20
    assert toy.outputs() == toy.expected()


@pytest.mark.parametrize("seed", range(4))
def test_steps_with_prompts_give_the_tokens_of_eager_ones_whatever_is_asked_for(seed: int) -> None:
    replayed = play(MIXED, seed, 2, mixed=True)
    eager = play(replace(CONFIG, graphs=GraphSizes()), seed, 2, mixed=True)
    assert replayed.runner.num_steps[GraphMode.MIXED] > 20
    assert replayed.outputs() == eager.outputs()


def test_graphs_share_their_memory() -> None:
    """Many sizes take little more than the largest alone."""
    taken = []
    for sizes in ((16,), tuple(range(1, 17))):
        graphs = GraphSizes(decodes=sizes)
        config = replace(CONFIG, max_num_reqs=16, vocab_size=200_003, graphs=graphs)
        model = HashLM(config, 2000, WINDOWS)
        runner = Runner(config, model, model)
        before = torch.cuda.memory_reserved()
        runner.capture()
        taken.append(torch.cuda.memory_reserved() - before)
        runner.release_graphs()
        torch.cuda.empty_cache()
    assert taken[1] <= 1.5 * taken[0] + (8 << 20)


def test_work_that_waits_for_the_device_cannot_be_captured() -> None:
    class Waiting(HashLM):
        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden.sum().item()
            return super().compute_logits(hidden)

    model = Waiting(CONFIG, 2000, WINDOWS)
    runner = Runner(CONFIG, model, model)
    with pytest.raises(CaptureError, match="a decode step of 6 requests cannot be captured"):
        runner.capture()
    torch.cuda.synchronize()
    toy = play(CONFIG, 0, 0)  # and the device goes on
    assert toy.outputs() == toy.expected()
