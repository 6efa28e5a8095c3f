"""Logprobs against float64, ranks with ties, every count from none to all, and memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrv2.sampling.logprobs import gather_logprobs

EPS = 2.0**-23


def spread(num_logits: int, vocab_size: int, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_logits, vocab_size, generator=generator) * scale


@pytest.mark.parametrize("vocab_size", [1, 37, 512, 5003, 152_064])
def test_values_are_torchs_log_softmax_bit_for_bit(vocab_size: int) -> None:
    logits = spread(3, vocab_size)
    result = gather_logprobs(logits, torch.tensor([0, 0, vocab_size - 1]), min(20, vocab_size))
    wanted = torch.log_softmax(logits, dim=1).gather(1, result.token_ids)
    assert torch.equal(result.values, wanted)


@pytest.mark.parametrize(("vocab_size", "ulp"), [(37, 2), (512, 2), (5003, 4), (152_064, 200)])
def test_values_are_near_log_softmax_in_float64(vocab_size: int, ulp: int) -> None:
    # torch's float32 sum over a row has few lanes, so its error grows with the row. The kernel's
    # has 8,192 lanes and stays within 2 ulp (seen up to 152,000 tokens).
    logits = spread(3, vocab_size)
    exact = torch.log_softmax(logits.double(), dim=1)
    result = gather_logprobs(logits, torch.tensor([0, 5, 36]), 20)
    wanted = exact.gather(1, result.token_ids)
    error = (result.values.double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert float(error.max()) < ulp * EPS


@pytest.mark.parametrize("shift", [-1e30, -1e4, 1e4, 3e38])
def test_large_logits_do_not_overflow(shift: float) -> None:
    logits = torch.full((1, 100), shift)
    values = gather_logprobs(logits, torch.tensor([3]), 2).values
    assert values.tolist() == [pytest.approx([-4.6051702] * 3)]


def test_columns_are_the_drawn_token_then_the_likeliest_in_order() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0]])
    result = gather_logprobs(logits, torch.tensor([2, 0]), 3)
    assert result.token_ids.tolist() == [[2, 1, 3, 2], [0, 0, 1, 2]]
    assert result.ranks.tolist() == [3, 1]
    assert result.token_ids.dtype == torch.int32
    assert result.values.dtype == torch.float32


def test_none_of_the_likeliest() -> None:
    result = gather_logprobs(spread(4, 50), torch.tensor([1, 2, 3, 4]), 0)
    assert result.token_ids.tolist() == [[1], [2], [3], [4]]
    assert result.values.shape == (4, 1)


def test_all_of_the_vocabulary_sums_to_one() -> None:
    result = gather_logprobs(spread(2, 50), torch.tensor([1, 49]), 50)
    assert result.values.shape == (2, 51)
    assert [sorted(row) for row in result.token_ids[:, 1:].tolist()] == [list(range(50))] * 2
    assert result.values[:, 1:].double().exp().sum(1).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_tokens_of_one_logprob_share_the_worst_of_their_ranks() -> None:
    logits = torch.tensor([[5.0, 7.0, 5.0, 5.0, 1.0]]).expand(5, -1)
    assert gather_logprobs(logits, torch.arange(5), 0).ranks.tolist() == [4, 1, 4, 4, 5]


def test_ranks_count_rounded_logprobs_as_v1_does() -> None:
    # Logits so close that many distinct ones round to one logprob.
    logits = spread(64, 3001, scale=1e-7)
    token_ids = torch.arange(64) * 41
    rounded = torch.log_softmax(logits, dim=1)
    wanted = (rounded >= rounded.gather(1, token_ids.unsqueeze(1))).sum(1)
    assert gather_logprobs(logits, token_ids, 0).ranks.tolist() == wanted.tolist()
    of_logits = (logits >= logits.gather(1, token_ids.unsqueeze(1))).sum(1)
    assert wanted.tolist() != of_logits.tolist(), "the logits make no ties: nothing was shown"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_softmax_is_nan_and_leaves_the_others(bad: float) -> None:
    logits = spread(3, 20)
    alone = gather_logprobs(logits[2:], torch.tensor([4]), 2)
    logits[0, 7] = bad
    logits[1] = -float("inf")
    result = gather_logprobs(logits, torch.tensor([7, 0, 4]), 2)
    assert bool(result.values[:2].isnan().all())
    assert result.ranks[:2].tolist() == [0, 0]
    assert result.values[2:].tolist() == alone.values.tolist()


def test_masked_tokens_are_minus_infinity() -> None:
    logits = torch.tensor([[1.0, -float("inf"), 1.0]])
    result = gather_logprobs(logits, torch.tensor([1]), 3)
    assert result.values[0].tolist() == pytest.approx(
        [-float("inf"), -0.6931472, -0.6931472, -float("inf")]
    )
    assert result.ranks.tolist() == [3]


def test_logits_are_left_as_they_are() -> None:
    logits = spread(3, 700)
    before = logits.clone()
    gather_logprobs(logits, torch.tensor([1, 2, 3]), 700)
    assert torch.equal(logits, before)


def test_no_logits() -> None:
    result = gather_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 3)
    assert result.values.shape == (0, 4)


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    logits = torch.tensor([[2.0, 5.0, 2.0, 5.0, 2.0, -0.0, 0.0], [0.0] * 7])
    result = gather_logprobs(logits, torch.tensor([0, 6]), 4)
    assert result.token_ids[:, 1:].tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    masked = torch.tensor([[-float("inf"), 1.0, -float("inf"), -float("inf")]])
    assert gather_logprobs(masked, torch.tensor([1]), 3).token_ids.tolist() == [[1, 1, 0, 2]]


def test_the_likeliest_are_the_same_however_many_are_asked_for() -> None:
    logits = spread(3, 999).round()
    few = gather_logprobs(logits, torch.tensor([1, 2, 3]), 20)
    one = gather_logprobs(logits, torch.tensor([1, 2, 3]), 1)
    assert few.token_ids[:, :2].tolist() == one.token_ids.tolist()
    many = gather_logprobs(logits, torch.tensor([1, 2, 3]), 50)
    assert many.values[:, :21].tolist() == few.values.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [0, 5, 40])
def test_other_dtypes_are_taken_as_float32(dtype: torch.dtype, count: int) -> None:
    logits = spread(3, 700).to(dtype)
    result = gather_logprobs(logits, torch.tensor([4, 5, 6]), count)
    wanted = gather_logprobs(logits.float(), torch.tensor([4, 5, 6]), count)
    assert result.values.tolist() == wanted.values.tolist()
    assert result.ranks.tolist() == wanted.ranks.tolist()


def test_logits_are_returned_as_they_are_and_ranked_as_such() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, -float("inf"), 0.5]])
    result = gather_logprobs(logits, torch.tensor([2]), 3, normalises=False)
    assert result.token_ids.tolist() == [[2, 0, 2, 1]]
    assert result.values.tolist() == [[3.0, 3.0, 3.0, 1.0]]
    assert result.ranks.tolist() == [2]
    cut = gather_logprobs(logits, torch.tensor([3]), 0, normalises=False)
    assert (cut.values.item(), cut.ranks.item()) == (-float("inf"), 5)
    # Logits that normalising rounds to one logprob are still apart.
    close = spread(1, 3001, scale=1e-7)
    place = gather_logprobs(close, torch.tensor([41]), 0, normalises=False).ranks
    assert place.item() == int((close[0] >= close[0, 41]).sum())


def test_nan_is_a_value_of_its_own_among_logits_and_the_least_likely() -> None:
    logits = torch.tensor([[3.0, float("nan"), 1.0, -float("inf")]])
    result = gather_logprobs(logits, torch.tensor([1]), 4, normalises=False)
    assert result.token_ids.tolist() == [[1, 0, 2, 3, 1]]
    assert str(result.values.tolist()) == "[[nan, 3.0, 1.0, -inf, nan]]"
    assert result.ranks.tolist() == [0]
    assert gather_logprobs(logits, torch.tensor([2]), 0, normalises=False).ranks.tolist() == [2]


class LargestOutput(TorchDispatchMode):
    """Remembers the largest float tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and not made._is_view():
                self.num_elements = max(self.num_elements, made.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_the_logits_is_made(dtype: torch.dtype) -> None:
    logits = spread(64, 60_000).to(dtype)
    with LargestOutput() as largest:
        gather_logprobs(logits, torch.zeros(64, dtype=torch.int64), 5)
    assert 0 < largest.num_elements <= logits.numel() // 10
