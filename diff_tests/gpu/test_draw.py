"""The compiled draw has the distribution of its logits' softmax."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy.stats import chisquare  # type: ignore[import-untyped]

from mrv2.sampling.gumbel import draw
from mrv2_diff.draws import ALPHA, LOGITS, MIXES, over_positions, probabilities, sampling_of
from mrv2_diff.draws import p_value as p_value_of

pytestmark = pytest.mark.gpu

NUM_DRAWS = 400_000
VOCABULARY = 48


def drawn(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """One token at each of `NUM_DRAWS` positions, from one row of logits."""
    device = torch.device("cuda")
    token_ids = torch.full((NUM_DRAWS,), -1, dtype=torch.int64, device=device)
    draw(
        token_ids,
        logits.to(device).expand(NUM_DRAWS, VOCABULARY),
        torch.zeros(NUM_DRAWS, dtype=torch.int32, device=device),
        torch.arange(NUM_DRAWS, dtype=torch.int64, device=device),
        torch.ones(1, dtype=torch.float32, device=device),
        torch.tensor([seed], dtype=torch.int64, device=device),
        torch.zeros(1, device=device),
        torch.full((NUM_DRAWS,), float("-inf"), device=device),
    )
    return token_ids.cpu()


def p_value(logits: torch.Tensor, token_ids: torch.Tensor) -> float:
    expected = torch.softmax(logits.double(), dim=0) * NUM_DRAWS
    counts = torch.bincount(token_ids, minlength=VOCABULARY)
    assert len(counts) == VOCABULARY
    assert float(expected.min()) > 20
    return float(chisquare(counts.numpy(), (expected / expected.sum() * NUM_DRAWS).numpy()).pvalue)


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_draws_follow_the_softmax(seed: int) -> None:
    logits = torch.linspace(-3.0, 3.0, VOCABULARY)[torch.randperm(VOCABULARY)]
    assert p_value(logits, drawn(logits, seed)) > 1e-4


def test_another_distribution_is_told_apart() -> None:
    logits = torch.linspace(-3.0, 3.0, VOCABULARY)
    assert p_value(logits * 0.98, drawn(logits, 0)) < 1e-4


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_every_sampler_and_every_pair_has_its_distribution(mix: tuple[str, ...]) -> None:
    sampling = sampling_of(mix, seed=11)
    token_ids = over_positions(sampling, logits=LOGITS.cuda())
    assert p_value_of(token_ids, probabilities(sampling)) > ALPHA


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_tokens_among_many_that_are_never_drawn_have_their_distribution(
    mix: tuple[str, ...],
) -> None:
    vocab_size = 40_009
    places = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))[: len(LOGITS)]
    logits, expected = torch.full((vocab_size,), -60.0), torch.zeros(vocab_size).double()
    logits[places] = LOGITS
    sampling = sampling_of(mix, seed=11)
    expected[places] = probabilities(sampling)
    moved = {int(places[token]): bias for token, bias in sampling.logit_bias.items()}
    sampling = dataclasses.replace(sampling, logit_bias=moved)
    token_ids = over_positions(sampling, 30_000, logits.cuda())
    assert p_value_of(token_ids, expected) > ALPHA
