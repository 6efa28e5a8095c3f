"""The compiled draw has the distribution of its logits' softmax."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare  # type: ignore[import-untyped]

from mrv2.sampling.gumbel import draw

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
