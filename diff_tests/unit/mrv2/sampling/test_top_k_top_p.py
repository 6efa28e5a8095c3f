"""Top-k and top-p: what stays, ties, earlier cutoffs, rows that are left alone, and the stage."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.stage import StageResources
from mrv2.sampling.top_k_top_p import TopKTopP, cut_to_top
from mrv2.state.requests import RequestColumns

_INF, _NAN = float("inf"), float("nan")


def stay(
    logits: Tensor,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    temperature: float = 1.0,
    before: float = -_INF,
) -> Tensor:
    """Which tokens stay, one parameter for all rows or one for each."""
    count = len(logits)
    cutoff = torch.full((count,), before)
    cut_to_top(
        cutoff,
        logits,
        torch.arange(count, dtype=torch.int32),
        torch.full((count,), temperature),
        torch.full((count,), temperature),
        torch.as_tensor(top_k, dtype=torch.int32).expand(count).contiguous(),
        torch.as_tensor(top_p, dtype=torch.float32).expand(count).contiguous(),
    )
    return ~(logits / (temperature or 1.0) < cutoff.unsqueeze(1))


def by_definition(divided: Tensor, top_k: int, top_p: float) -> tuple[list[bool], float]:
    """What stays of one row, and how clear it was: by sums over all larger ones, in float64."""
    values = divided.double()
    kept = torch.ones_like(values, dtype=torch.bool)
    if 0 < top_k < len(values):
        kept = values >= values.sort(descending=True).values[top_k - 1]
    if top_p >= 1.0:
        return kept.tolist(), 1.0
    weight = torch.where(kept, (values - values.max()).exp(), 0.0)
    larger = (values.unsqueeze(0) > values.unsqueeze(1)).double() @ weight / weight.sum()
    return (kept & (larger < top_p)).tolist(), float((larger - top_p).abs().min())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_what_stays_is_what_the_definition_says(temperature: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(400, 90, generator=generator) * 8).round() / 4  # many ties
    top_k = torch.randint(0, 100, (400,), generator=generator)
    top_p = torch.rand(400, generator=generator).clamp(0.01)
    top_p[::4] = 1.0
    stays = stay(logits, top_k, top_p, temperature)
    for row in range(400):
        wanted, clear = by_definition(logits[row] / temperature, int(top_k[row]), float(top_p[row]))
        if clear > 1e-6:
            assert stays[row].tolist() == wanted, row


def test_the_sampler_of_v1_would_keep_the_same_where_no_tokens_are_equal() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(4000, 256, generator=generator) * 3
    top_k = torch.randint(1, 257, (4000,), generator=generator)
    top_p = torch.rand(4000, generator=generator).clamp(0.01)
    values, order = logits.sort(dim=1)
    ranks = torch.arange(256, 0, -1)
    values = values.masked_fill(ranks > top_k.unsqueeze(1), -_INF)
    sums = values.softmax(1).cumsum(1)
    goes = sums <= 1 - top_p.unsqueeze(1)
    goes[:, -1] = False
    goes |= values == -_INF
    wanted = torch.empty_like(goes).scatter_(1, order, ~goes)
    assert torch.equal(stay(logits, top_k, top_p), wanted)


def test_equal_tokens_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert stay(logits, top_k=2).tolist() == [[True, True, True, True, False]]
    assert stay(logits, top_p=0.6).tolist() == [[True, True, True, True, False]]
    assert stay(torch.zeros(1, 6), top_p=0.01).tolist() == [[True] * 6]


def test_the_likeliest_stays_however_small_p_is() -> None:
    logits = torch.tensor([[0.0, 0.1, -3.0]])
    assert stay(logits, top_p=1e-30).tolist() == [[False, True, False]]


@pytest.mark.parametrize("top_k", [0, 5, 6, 1_000_000])
def test_zero_and_the_vocabulary_keep_all(top_k: int) -> None:
    assert bool(stay(torch.arange(5.0).unsqueeze(0), top_k=top_k).all())


def test_top_p_is_of_what_earlier_cutoffs_and_top_k_leave() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2001, 0.0999]]).log()
    # Of all, two tokens have 0.7 and a third is needed; of the three that the cutoff leaves, not.
    assert int(stay(logits, top_p=0.75).sum()) == 3
    assert int(stay(logits, top_p=0.75, before=-1.61).sum()) == 2
    assert int(stay(logits, top_k=2, top_p=0.75).sum()) == 2
    assert int(stay(logits, top_k=2, top_p=0.7).sum()) == 1


def test_rows_that_are_no_distribution_and_greedy_rows_are_left_alone() -> None:
    logits = torch.tensor([[0.0, _NAN, 1.0], [0.0, _INF, 1.0], [-_INF] * 3])
    for top_k, top_p in ((1, 1.0), (0, 0.1), (1, 0.1)):
        assert bool(stay(logits, top_k, top_p).all())
    assert bool(stay(torch.tensor([[0.0, 1.0]]), 1, 0.1, temperature=0.0).all())


def test_fewer_tokens_than_k_all_stay() -> None:
    logits = torch.tensor([[-_INF, 1.0, -_INF, 0.0, -_INF]])
    assert bool(stay(logits, top_k=3).all())


def test_the_stage_is_wanted_by_random_rows_with_a_top_k_or_a_top_p() -> None:
    arena = Arena(Transfers(torch.device("cpu")))
    columns = DrawColumns(8, arena)
    stage = TopKTopP(
        StageResources(
            num_rows=8,
            vocab_size=50,
            arena=arena,
            columns=columns,
            requests=RequestColumns(8, 4, arena),
            thinking=None,
        )
    )
    asked = [(0, 1.0, 1.0), (5, 1.0, 1.0), (0, 0.5, 1.0), (5, 0.5, 0.0), (50, 1.0, 1.0)]
    for row, (top_k, top_p, temperature) in enumerate(asked):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        request = Arrival(
            req_id="r",
            token_ids=[1],
            prompt_len=1,
            num_computed_tokens=0,
            block_ids=(),
            sampling=sampling,
        )
        columns.admit(row, request)
        stage.admit(row, request)
    wanted = [row for row in range(8) if stage.wants(np.array([row], dtype=np.int32))]
    assert wanted == [1, 2]
    stage.evict(1)
    assert not stage.wants(np.array([1], dtype=np.int32))
