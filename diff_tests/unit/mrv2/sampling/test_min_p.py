"""Min-p: what stays, rows that are left alone, and when the stage is wanted."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.config import RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.min_p import MinP, cut_by_min_p
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.stage import LogitsView, StageResources
from mrv2.state.requests import RequestColumns

_INF, _NAN = float("inf"), float("nan")


def resources(max_num_reqs: int = 8, vocab_size: int = 100) -> StageResources:
    arena = Arena(Transfers(torch.device("cpu")))
    config = RunnerConfig(
        device=arena.transfers.device,
        max_num_reqs=max_num_reqs,
        max_num_tokens=max_num_reqs,
        max_model_len=4,
        vocab_size=vocab_size,
        kv_groups=(),
    )
    return StageResources(
        num_rows=max_num_reqs,
        vocab_size=vocab_size,
        arena=arena,
        columns=DrawColumns(max_num_reqs, arena),
        requests=RequestColumns(max_num_reqs, 4, arena),
        thinking=config.thinking,
    )


def arrival(sampling: Sampling) -> Arrival:
    return Arrival(
        req_id="r",
        token_ids=[1],
        prompt_len=1,
        num_computed_tokens=0,
        block_ids=(),
        sampling=sampling,
    )


def cutoffs(
    logits: Tensor, min_p: list[float], temperature: float = 1.0, before: float = -_INF
) -> Tensor:
    count = len(logits)
    cutoff = torch.full((count,), before)
    cut_by_min_p(
        cutoff,
        logits,
        torch.arange(count, dtype=torch.int32),
        torch.full((count,), temperature),
        torch.full((count,), temperature),
        torch.tensor([math.log(value) if value else -_INF for value in min_p]),
    )
    return cutoff


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_at_least_min_p_as_likely_as_the_likeliest_stay(temperature: float) -> None:
    logits = torch.randn(2000, 300, generator=torch.Generator().manual_seed(1)) * 2
    min_p = torch.rand(2000, generator=torch.Generator().manual_seed(2))
    divided = logits / temperature
    stays = divided >= cutoffs(logits, min_p.tolist(), temperature).unsqueeze(1)
    exact = torch.softmax(divided.double(), 1)
    ratio = exact / exact.amax(1, keepdim=True) / min_p.double().unsqueeze(1)
    clear = (ratio - 1).abs() > 2e-6
    assert torch.equal(stays[clear], (ratio >= 1)[clear])
    assert float(clear.float().mean()) > 0.9999


def test_the_sampler_of_v1_would_keep_the_same() -> None:
    logits = torch.randn(5000, 256, generator=torch.Generator().manual_seed(3)) * 3
    min_p = torch.rand(5000, generator=torch.Generator().manual_seed(4))
    probabilities = torch.softmax(logits, 1)
    goes = probabilities < probabilities.amax(1, keepdim=True) * min_p.unsqueeze(1)
    assert torch.equal(logits < cutoffs(logits, min_p.tolist()).unsqueeze(1), goes)


def test_one_keeps_the_likeliest_and_its_equals_and_zero_keeps_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.9], [1.0, 3.0, 3.0, 2.9]])
    assert cutoffs(logits, [1.0, 0.0]).tolist() == [3.0, -_INF]


def test_a_cutoff_is_never_lowered() -> None:
    assert cutoffs(torch.tensor([[0.0, 1.0]]), [0.1], before=0.5).tolist() == [0.5]


def test_greedy_rows_and_rows_without_a_likeliest_are_left_alone() -> None:
    logits = torch.tensor([[0.0, _NAN], [-_INF, -_INF], [0.0, 1.0]])
    assert cutoffs(logits, [0.5] * 3)[:2].tolist() == [-_INF, -_INF]
    assert cutoffs(logits, [0.5] * 3, temperature=0.0).tolist() == [-_INF] * 3


def test_the_stage_is_wanted_by_random_rows_with_a_min_p() -> None:
    stage_resources = resources()
    stage = MinP(stage_resources)
    asked = {0: (1.0, 0.0), 1: (1.0, 0.2), 2: (0.0, 0.2), 5: (0.7, 1.0)}
    for row, (temperature, min_p) in asked.items():
        request = arrival(Sampling(temperature=temperature, min_p=min_p))
        stage_resources.columns.admit(row, request)
        stage.admit(row, request)
    wanted = [row for row in range(8) if stage.wants(np.array([row], dtype=np.int32))]
    assert wanted == [1, 5]
    stage.evict(5)
    assert not stage.wants(np.array([0, 2, 5], dtype=np.int32))


def test_the_stage_raises_cutoffs_by_state_row() -> None:
    stage_resources = resources()
    stage = MinP(stage_resources)
    for row, min_p in ((6, 0.5), (2, 0.0)):
        request = arrival(Sampling(temperature=1.0, min_p=min_p))
        stage_resources.columns.admit(row, request)
        stage.admit(row, request)
    stage_resources.columns.flush()
    stage.flush()
    stage_resources.arena.flush()
    rows = np.array([2, 6, 6], dtype=np.int32)
    narrowing = Narrowing(torch.zeros(8), torch.full((3,), -_INF), 3)
    view = LogitsView(
        logit_rows=torch.from_numpy(rows), positions=torch.zeros(3).long(), rows_np=rows
    )
    stage.narrow(narrowing, torch.tensor([[0.0, 1.0], [0.0, 2.0], [5.0, 3.0]]), view)
    assert narrowing.cutoff.tolist() == pytest.approx([-_INF, 2 + math.log(0.5), 5 + math.log(0.5)])
