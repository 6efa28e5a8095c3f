"""What another order of the vocabulary makes of a row's logprobs."""

import pytest
import torch

from mrv2_diff.compare.steps import OF_PROMPTS
from mrv2_diff.reduction_noise import ReductionNoise

VOCAB = 331


def _rows(scale: float = 3.0) -> torch.Tensor:
    return torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0)) * scale


def test_a_normalizer_in_float32_depends_on_the_order_by_rounding_alone() -> None:
    noise = ReductionNoise(lambda logits: logits.log_softmax(-1), VOCAB)
    noise.add(_rows())
    assert 0.0 < noise.spacings["logprobs"] <= 8.0
    assert 0.0 < noise.spacings[OF_PROMPTS] <= 64.0


def test_one_that_depends_on_no_order_has_no_noise() -> None:
    noise = ReductionNoise(lambda logits: logits - 7.0, VOCAB)
    noise.add(_rows())
    assert noise.spacings == {"logprobs": 0.0, OF_PROMPTS: 0.0}


@pytest.mark.parametrize("position", [0, VOCAB // 2])
def test_a_fault_at_a_position_is_seen(position: int) -> None:
    def faulty(logits: torch.Tensor) -> torch.Tensor:
        changed = logits.log_softmax(-1)
        changed[:, position] += 0.25
        return changed

    noise = ReductionNoise(faulty, VOCAB)
    noise.add(_rows())
    assert noise.spacings["logprobs"] > 100_000


def test_rows_that_are_not_finite_say_nothing() -> None:
    noise = ReductionNoise(lambda logits: logits.log_softmax(-1), VOCAB)
    rows = _rows()[:2]
    rows[0, 5], rows[1, 7] = float("nan"), float("-inf")
    noise.add(rows)
    assert noise.spacings["logprobs"] == 0.0
