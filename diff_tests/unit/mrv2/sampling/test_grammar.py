"""A grammar's mask: which logits it reaches, what it refuses, and what is drawn and reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mrv2 import GrammarMask, KVGroup, ProtocolError, RunnerConfig, Sampling
from mrv2.memory.transfers import Transfers
from mrv2.sampling.bitmask import pack
from mrv2_diff.toy_host import Toy

VOCAB = 97
CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=4,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=VOCAB,
    kv_groups=(KVGroup(block_size=4, max_blocks=16),),
)
INF = float("inf")


def mask_of(by_logit: dict[int, list[int]]) -> GrammarMask:
    """A mask that allows these tokens of each logit."""
    return GrammarMask(
        bitmask=np.stack([pack(token_ids, VOCAB) for token_ids in by_logit.values()]),
        logit_idx=np.array(list(by_logit), dtype=np.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_logits_that_are_named_lose_what_is_not_allowed(dtype: torch.dtype) -> None:
    wide = torch.randn(4, 2 * VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits = wide[:, :VOCAB]
    wanted = wide.clone()
    for row, kept in ((3, [0, 96]), (1, [5])):
        wanted[row, [token for token in range(VOCAB) if token not in kept]] = -INF
    mask_of({3: [0, 96], 1: [5]}).apply(logits, Transfers(torch.device("cpu")))
    assert torch.equal(wide, wanted)


def test_a_mask_of_nothing_needs_no_logits() -> None:
    mask = GrammarMask(
        bitmask=np.zeros((0, 4), dtype=np.int32), logit_idx=np.zeros(0, dtype=np.int32)
    )
    mask.check(0, VOCAB)
    mask.apply(torch.zeros(0, VOCAB), Transfers(torch.device("cpu")))


RIGHT = mask_of({1: [5], 0: [6]})


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (replace(RIGHT, bitmask=RIGHT.bitmask[:, :3]), r"\[2, 3\]; .* need \[2, 4\]"),
        (replace(RIGHT, bitmask=RIGHT.bitmask[:1]), r"\[1, 4\]; 2 logits"),
        (replace(RIGHT, logit_idx=RIGHT.logit_idx[:, None]), "shape"),
        (replace(RIGHT, bitmask=RIGHT.bitmask.astype(np.int64)), "int64 and int32"),
        (replace(RIGHT, logit_idx=RIGHT.logit_idx.astype(np.int64)), "int32 and int64"),
        (replace(RIGHT, logit_idx=np.array([0, 2], dtype=np.int32)), r"\[0, 2\]; .* 2, and none"),
        (replace(RIGHT, logit_idx=np.array([-1, 0], dtype=np.int32)), r"\[-1, 0\]"),
        (replace(RIGHT, logit_idx=np.array([1, 1], dtype=np.int32)), "twice"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_and_the_step_can_still_be_sampled(
    mask: GrammarMask, said: str
) -> None:
    toy = Toy(CONFIG)
    toy.host.add("a", [1, 2, 3])
    toy.host.add("b", [4, 5])
    step = toy.runner.execute(toy.host.plan({"a": 3, "b": 2}))
    with pytest.raises(ProtocolError, match=said):
        toy.runner.sample(step, grammar=mask)
    toy.host.take(toy.runner.sample(step, grammar=RIGHT).wait())
    assert toy.outputs() == [("a", [6]), ("b", [5])]


def test_what_is_drawn_is_committed_and_the_others_draw_as_without() -> None:
    toy = Toy(CONFIG)
    toy.host.add("a", [1, 2, 3])
    toy.host.add("b", [4, 5])
    for allowed in (7, 8, 9):
        work = {name: request.num_left for name, request in toy.host.requests.items()}
        step = toy.runner.execute(toy.host.plan(work))
        toy.host.take(toy.runner.sample(step, grammar=mask_of({1: [allowed]})).wait())
    free = dict(toy.expected())
    drawn = dict(toy.outputs())
    assert drawn["b"] == [7, 8, 9]
    assert drawn["a"] == free["a"]
    row = toy.runner.rows.row("b")
    assert toy.runner.requests.token_ids.tensor[row, :5].tolist() == [4, 5, 7, 8, 9]


def test_raw_logprobs_are_those_of_the_masked_logits() -> None:
    toy = Toy(CONFIG)
    toy.host.add("a", [1, 2, 3], Sampling(num_logprobs=3))
    step = toy.runner.execute(toy.host.plan({"a": 3}))
    output = toy.runner.sample(step, grammar=mask_of({0: [11, 12]})).wait()
    assert output.logprobs is not None
    ids, values = output.logprobs.token_ids[0], output.logprobs.values[0]
    assert output.token_ids == [[int(ids[0])]]
    assert sorted(ids[1:3].tolist()) == [11, 12]
    assert np.exp(values[1:3]).sum() == pytest.approx(1.0, abs=1e-6)
    assert values[3] == -INF
