"""The draw: its distribution, its tail, what it depends on, and rows that are no distribution."""

import math

import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from mrv2.sampling.gumbel import draw, reference_gumbel

NUM_DRAWS = 200_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.5, -3.0, 1.25, -5.0, 0.0])
ALPHA = 1e-4
"""A correct draw fails a test with this probability, once: the seeds are fixed."""
_INF, _NAN = float("inf"), float("nan")


def drawn(
    logits: Tensor,
    *,
    rows: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """Draw with defaults: row 0, positions 0, 1, ..., at temperature 1, with seed 42."""
    count = len(logits)
    token_ids = torch.full((count,), -77)
    draw(
        token_ids,
        logits,
        torch.zeros(count, dtype=torch.int32) if rows is None else rows.int(),
        torch.arange(count) if positions is None else positions,
        torch.ones(1) if temperature is None else temperature,
        torch.tensor([42]) if seed is None else seed,
        torch.zeros(1 if temperature is None else len(temperature)),
        torch.full((count,), -_INF),
    )
    return token_ids


def p_value(token_ids: Tensor, logits: Tensor = LOGITS) -> float:
    """Chi-square of the counts against the softmax of `logits`."""
    counts = torch.bincount(token_ids, minlength=len(logits))
    expected = torch.softmax(logits.double(), 0) * len(token_ids)
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


def many(logits: Tensor = LOGITS) -> Tensor:
    return logits.expand(NUM_DRAWS, -1)


def test_draws_over_positions_follow_the_softmax() -> None:
    assert p_value(drawn(many())) > ALPHA


def test_draws_over_seeds_follow_the_softmax() -> None:
    token_ids = drawn(
        many(),
        rows=torch.arange(NUM_DRAWS),
        positions=torch.full((NUM_DRAWS,), 17),
        temperature=torch.ones(NUM_DRAWS),
        seed=torch.arange(NUM_DRAWS),
    )
    assert p_value(token_ids) > ALPHA


def test_the_chi_square_would_see_a_logit_that_is_wrong_by_two_percent() -> None:
    # 200,000 draws and 7 degrees of freedom: token 0 (probability 0.46) off by 0.05 in its logit
    # is a noncentrality of 123, which is missed with probability below 1e-9 at ALPHA.
    wrong = LOGITS.clone()
    wrong[0] += 0.05
    theirs, ours = torch.softmax(LOGITS.double(), 0), torch.softmax(wrong.double(), 0)
    noncentrality = NUM_DRAWS * float(((ours - theirs) ** 2 / theirs).sum())
    missed = stats.ncx2.cdf(stats.chi2.isf(ALPHA, 7), 7, noncentrality)
    assert missed < 1e-9
    assert p_value(drawn(many(wrong))) < ALPHA


def test_draws_at_neighbouring_positions_are_independent() -> None:
    token_ids = drawn(many())
    probabilities = torch.softmax(LOGITS.double(), 0)
    pairs = torch.bincount(token_ids[:-1:2] * 8 + token_ids[1::2], minlength=64)
    expected = torch.outer(probabilities, probabilities).flatten() * (NUM_DRAWS // 2)
    likely = expected > 5
    rest = torch.tensor([pairs[~likely].sum(), expected[~likely].sum()])
    counts = torch.cat((pairs[likely].double(), rest[:1]))
    wanted = torch.cat((expected[likely], rest[1:]))
    assert stats.chisquare(counts.numpy(), wanted.numpy()).pvalue > ALPHA


def test_draws_of_neighbouring_seeds_are_independent() -> None:
    ours = drawn(many(), seed=torch.tensor([8]))
    theirs = drawn(many(), seed=torch.tensor([9]))
    same = int((ours == theirs).sum())
    expected = float((torch.softmax(LOGITS.double(), 0) ** 2).sum())
    assert stats.binomtest(same, NUM_DRAWS, expected).pvalue > ALPHA


def test_a_draw_depends_on_seed_position_and_logits_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 300, generator=generator)
    seed, positions = torch.arange(50) * 7919, torch.arange(50) * 13
    in_order = drawn(
        logits,
        rows=torch.arange(50),
        positions=positions,
        temperature=torch.ones(50),
        seed=seed,
    )
    # Another batch order, other rows, another neighbourhood.
    order, row_of = torch.randperm(50, generator=generator), torch.randperm(64)[:50]
    moved_seed = torch.full((64,), 123)
    moved_seed[row_of] = seed
    moved = drawn(
        logits[order],
        rows=row_of[order],
        positions=positions[order],
        temperature=torch.ones(64),
        seed=moved_seed,
    )
    assert moved.tolist() == in_order[order].tolist()
    alone = drawn(logits[7:8], positions=positions[7:8], seed=seed[7:8])
    assert alone.item() == in_order[7].item()


def test_a_large_batch_is_drawn_as_its_parts_are() -> None:
    logits = torch.randn(600, 1000, generator=torch.Generator().manual_seed(1))
    whole = drawn(logits)
    parts = [drawn(logits[i : i + 1], positions=torch.tensor([i])) for i in (0, 261, 262, 599)]
    assert [int(part) for part in parts] == whole[[0, 261, 262, 599]].tolist()


# ---------------------------------------------------------------- the noise itself


def noise_of(words: list[tuple[int, int]]) -> Tensor:
    """Noise of unsigned words."""
    pairs = torch.tensor(words).int()
    return reference_gumbel(pairs[:, 0], pairs[:, 1])


def noise_of_64_bits(value: int) -> float:
    return float(noise_of([(value >> 32, value & 0xFFFFFFFF)]))


def test_extreme_words_give_finite_noise_in_the_stated_range() -> None:
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    noise = noise_of([(high, low) for high in edges for low in edges])
    assert bool(noise.isfinite().all())
    assert -2.82 < float(noise.min()) < -2.81
    assert 45.0 < float(noise.max()) < 45.1


@pytest.mark.parametrize("exponent", range(1, 65))
def test_noise_is_exact_to_a_few_units_down_to_the_last_bit(exponent: int) -> None:
    v = 2.0**-exponent
    exact = -math.log(-math.log1p(-v))
    assert noise_of_64_bits(2 ** (64 - exponent)) == pytest.approx(exact, rel=4e-7, abs=2e-7)


def test_noise_falls_as_the_words_grow() -> None:
    # 2**k and its neighbour above, over all 64 bits: a step of the formula would show here.
    values = sorted(
        {(1 << bit) + extra for bit in range(64) for extra in (0, 1 << max(0, bit - 9))}
    )
    noise = noise_of([(value >> 32, value & 0xFFFFFFFF) for value in values])
    assert bool((noise.diff() <= 0).all())


@pytest.mark.parametrize("probability", [1e-3, 1e-6, 1e-9, 1e-12, 1e-15])
def test_rare_noise_is_as_rare_as_it_should_be(probability: float) -> None:
    # Noise above this has the given probability; count the 64-bit words that make it.
    threshold = -math.log(-math.log1p(-probability))
    low, high = 0, 2**64 - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if noise_of_64_bits(middle) > threshold else (low, middle)
    # Noise is a float32 near 20: half its spacing is a relative 1e-6 of the probability.
    assert high / 2**64 == pytest.approx(probability, rel=3e-6)


def test_mean_and_variance_of_the_noise_are_gumbels() -> None:
    words = torch.randint(
        -(2**31), 2**31, (NUM_DRAWS, 2), generator=torch.Generator().manual_seed(3)
    ).int()
    noise = reference_gumbel(words[:, 0], words[:, 1]).double()
    # Five standard errors of 200,000 draws.
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=5 * 1.2825 / NUM_DRAWS**0.5)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > ALPHA


# ---------------------------------------------------------------- rows that are special


def test_greedy_and_random_rows_mix() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(5))
    temperature = torch.tensor([0.0, 1.0])
    rows = torch.tensor([0, 1, 0, 1, 1, 0])
    mixed = drawn(logits, rows=rows, temperature=temperature, seed=torch.tensor([1, 2]))
    random = drawn(logits, seed=torch.tensor([2]))
    greedy = logits.argmax(1)
    assert mixed.tolist() == torch.where(rows == 0, greedy, random).tolist()
    assert mixed[rows == 1].tolist() != greedy[rows == 1].tolist()


def test_the_lowest_id_wins_a_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -0.0, 0.0], [_INF, 1.0, _INF, 0.0]])
    greedy = drawn(logits, temperature=torch.zeros(1))
    assert greedy.tolist() == [1, 0, 0]
    assert drawn(logits[2:]).tolist() == [0]


def test_minus_infinity_is_not_drawn() -> None:
    logits = torch.full((NUM_DRAWS // 10, 5), -_INF)
    logits[:, 3] = -80.0
    assert set(drawn(logits).tolist()) == {3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_draws_the_first(temperature: float) -> None:
    logits = torch.full((3, 7), -_INF)
    assert drawn(logits, temperature=torch.tensor([temperature])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_nan_is_drawn(temperature: float) -> None:
    logits = torch.tensor([[0.0, _NAN, 9.0, _NAN], [_INF, 0.0, 0.0, _NAN], [_NAN] * 4])
    assert drawn(logits, temperature=torch.tensor([temperature])).tolist() == [1, 3, 0]


def test_no_logits_draw_nothing() -> None:
    assert drawn(torch.empty(0, 9)).tolist() == []
