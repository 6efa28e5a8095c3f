"""Draws have the distribution that the parameters ask for, and a small bias would be seen.

Every test is a chi-square of `NUM_DRAWS` draws against exact probabilities, through the sampler
with its stages. What the tests would miss is bounded by planting biases that they must reject.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from mrv2.params import Sampling
from mrv2.sampling import gumbel, temperature
from mrv2.sampling.narrowing import settle_logits
from mrv2.sampling.rng import reference_high_word, reference_key, reference_low_word
from mrv2.sampling.stage import LogitsView
from mrv2.trace import NullTrace
from mrv2_diff.draws import (
    ALPHA,
    MIXES,
    NUM_DRAWS,
    VOCAB,
    drawn,
    missed,
    over_positions,
    p_value,
    probabilities,
    sampler_for,
    sampling_of,
)

ROWS = 6


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_draws_over_positions_have_the_distribution(mix: tuple[str, ...]) -> None:
    sampling = sampling_of(mix, seed=11)
    assert p_value(over_positions(sampling), probabilities(sampling)) > ALPHA


@pytest.mark.parametrize("mix", [("temperature",), ("top-k", "top-p")], ids="+".join)
def test_draws_over_seeds_have_the_distribution(mix: tuple[str, ...]) -> None:
    count = 20_000
    samplings = [sampling_of(mix, seed=seed) for seed in range(count)]
    token_ids = drawn(samplings, torch.arange(count), torch.full((count,), 5))
    assert p_value(token_ids, probabilities(samplings[0])) > ALPHA


def test_rows_of_one_batch_have_each_their_own_distribution() -> None:
    mixes = [MIXES[place] for place in (0, 1, 7, 9, 12, 15)]
    samplings = [sampling_of(mix, seed=row) for row, mix in enumerate(mixes)]
    rows = torch.arange(NUM_DRAWS) % ROWS
    token_ids = drawn(samplings, rows, torch.arange(NUM_DRAWS) // ROWS)
    for row, sampling in enumerate(samplings):
        assert p_value(token_ids[rows == row], probabilities(sampling)) > ALPHA


def neighbours_p_value(first_seed: int = 0, step: int = 1) -> float:
    """Independence of two rows of a batch that draw at the same positions."""
    samplings = [sampling_of((), seed=first_seed), sampling_of((), seed=first_seed + step)]
    rows = torch.arange(2 * NUM_DRAWS) % 2
    token_ids = drawn(samplings, rows, torch.arange(2 * NUM_DRAWS) // 2)
    expected = probabilities(samplings[0])
    pairs = token_ids[0::2] * VOCAB + token_ids[1::2]
    return p_value(pairs, torch.outer(expected, expected).flatten())


@pytest.mark.parametrize("step", [1, 2, 2**16, 2**32, 2**63])
def test_neighbouring_rows_with_near_seeds_are_independent(step: int) -> None:
    assert neighbours_p_value(first_seed=7, step=step) > ALPHA


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_settling_before_the_draw_gives_the_same_tokens(mix: tuple[str, ...]) -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(2)) * 2
    mixed = [sampling_of(mix, seed=row) for row in range(ROWS)]
    rows, positions = torch.arange(600) % ROWS, torch.arange(600)
    fused = drawn(mixed, rows, positions, logits)
    assert torch.equal(fused, drawn(mixed, rows, positions, logits, observed=True))


# ---------------------------------------------------------------- planted biases


def _two_percent_hotter(patch: pytest.MonkeyPatch) -> None:
    original = temperature.Temperature.narrow

    def narrow(self: temperature.Temperature, narrowing, logits, view) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        original(self, narrowing, logits, view)
        narrowing.divide_by(narrowing.divisor * 1.02)

    patch.setattr(temperature.Temperature, "narrow", narrow)


def _without_a_tail(patch: pytest.MonkeyPatch) -> None:
    original = gumbel.reference_gumbel
    most = -np.log(-np.log1p(-1e-3))
    patch.setattr(gumbel, "reference_gumbel", lambda *words: original(*words).clamp(max=most))


def _noise_shared_by_rows(patch: pytest.MonkeyPatch) -> None:
    original = reference_key
    patch.setattr(
        gumbel, "reference_key", lambda seed, position: original(torch.zeros_like(seed), position)
    )


def test_a_temperature_two_percent_off_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, count = sampling_of(("temperature",), seed=11), 400_000
    expected = probabilities(sampling)
    hotter = probabilities(Sampling(temperature=sampling.temperature * 1.02))
    assert missed(hotter, expected, count) < 1e-4
    assert p_value(over_positions(sampling, count), expected) > ALPHA
    _two_percent_hotter(monkeypatch)
    assert p_value(over_positions(sampling, count), expected) < ALPHA


def tail_p_value() -> float:
    """One token 8 above 2,999 others, which have half of the probability together."""
    logits = torch.full((3000,), -8.0)
    logits[17] = 0.0
    count = 20_000
    token_ids = drawn(
        [sampling_of((), seed=3)], torch.zeros(count).long(), torch.arange(count), logits
    )
    tail = 2999 * np.exp(-8.0) / (1 + 2999 * np.exp(-8.0))
    return float(stats.binomtest(int((token_ids != 17).sum()), count, tail).pvalue)


def test_many_unlikely_tokens_have_their_share() -> None:
    assert tail_p_value() > ALPHA


def test_a_tail_cut_at_one_in_a_thousand_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Noise of 6.9 at most reaches 8 only where the likely token has less than -1.1: the tail gets a
    # twentieth of the draws instead of a half, which is 127 standard deviations of 20,000 draws.
    _without_a_tail(monkeypatch)
    assert tail_p_value() < ALPHA


def test_noise_shared_by_two_rows_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two rows with the same logits then draw the same tokens, every time.
    _noise_shared_by_rows(monkeypatch)
    assert neighbours_p_value(first_seed=7) < ALPHA


# ---------------------------------------------------------------- the far tail, by counting words


def words_with_noise_above(threshold: float) -> float:
    """Share of the 64-bit words whose noise exceeds `threshold`: noise falls as the word grows."""
    low, high = 0, 2**64 - 1
    while high - low > 1:
        middle = (low + high) // 2
        words = torch.tensor([[middle >> 32, middle & 0xFFFFFFFF]]).int()
        above = float(gumbel.reference_gumbel(words[:, 0], words[:, 1])) > threshold
        low, high = (middle, high) if above else (low, middle)
    return high / 2**64


@pytest.mark.parametrize("gap", [18.0, 20.0, 20.5, 25.0, 30.0])
def test_a_token_far_below_is_drawn_as_often_as_it_should_be(gap: float) -> None:
    # Against a likeliest token whose noise is g, it wins with noise above gap + g: the share of the
    # words averaged over g, against the softmax.
    shares = [
        words_with_noise_above(gap + float(stats.gumbel_r.ppf((step + 0.5) / 64)))
        for step in range(64)
    ]
    ideal = [
        -np.expm1(-np.exp(-(gap + float(stats.gumbel_r.ppf((step + 0.5) / 64)))))
        for step in range(64)
    ]
    assert sum(shares) == pytest.approx(sum(ideal), rel=5e-6)


def test_a_quarter_of_a_million_tokens_at_a_billionth_are_reached() -> None:
    # 262,144 tokens 20.5 below one have 3.28e-4 of the probability: 100 draws a row would see 0.03.
    # Fix the words instead: noise that one of them needs against a likely token of noise 0 has
    # probability 1.25e-9, more than five 32-bit steps of `v`; below 2**-32 low words refine it.
    share = words_with_noise_above(20.5)
    assert share * 2**32 > 5
    assert share == pytest.approx(-np.expm1(-np.exp(-20.5)), rel=3e-6)


@pytest.mark.parametrize("word", [(0, 0), (-1, -1), (0, -1), (-1, 0)])
def test_words_of_zeros_or_ones_draw_the_only_token(
    word: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(value: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda first, second, tokens: torch.full_like(first + tokens, value)

    monkeypatch.setattr(gumbel, "reference_high_word", constant(word[0]))
    monkeypatch.setattr(gumbel, "reference_low_word", constant(word[1]))
    logits = torch.full((40,), -torch.inf)
    logits[29] = -3.0
    token_ids = drawn([sampling_of(())], torch.zeros(4).long(), torch.arange(4), logits)
    assert token_ids.tolist() == [29] * 4


# ---------------------------------------------------------------- rows that are special


@pytest.mark.parametrize("heat", [0.0, 1e-6, 1e-5, 1e-2, 1.0, 100.0])
def test_a_masked_greedy_row_beside_a_random_one(heat: float) -> None:
    logits = torch.full((50,), -torch.inf)
    logits[8], logits[31] = 1.0, 2.0
    samplings = [Sampling(), Sampling(temperature=heat, top_p=0.9, seed=5)]
    rows = torch.arange(400) % 2
    token_ids = drawn(samplings, rows, torch.arange(400), logits)
    assert set(token_ids[0::2].tolist()) == {31}
    expected = {31} if heat <= 1e-2 else {8, 31}
    assert set(token_ids[1::2].tolist()) <= expected


@pytest.mark.parametrize("mix", [(), ("top-k", "top-p"), ("min-p", "temperature")], ids="+".join)
def test_a_row_of_nan_draws_a_token_and_leaves_its_neighbours(mix: tuple[str, ...]) -> None:
    samplings = [sampling_of(mix, seed=row) for row in range(ROWS)]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4))
    rows = torch.arange(ROWS)

    def tokens(values: Tensor) -> list[int]:
        view = LogitsView(logit_rows=rows.int(), positions=rows + 9, rows_np=rows.int().numpy())
        drawn_ids = sampler_for(samplings, VOCAB, NullTrace(), torch.device("cpu"))(
            values, view
        ).token_ids
        return [int(token) for token in drawn_ids]

    broken = logits.clone()
    broken[2] = torch.nan
    good, bad = tokens(logits.clone()), tokens(broken)
    assert 0 <= bad[2] < VOCAB
    assert good[:2] + good[3:] == bad[:2] + bad[3:]


@pytest.mark.parametrize("batch", [1, 7, 33])
def test_the_first_of_the_largest_is_taken_in_any_batch(batch: int) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(8))
    logits[3] = logits[40] = 9.0
    samplings = [Sampling() for _ in range(batch)]
    token_ids = drawn(samplings, torch.arange(batch), torch.arange(batch), logits)
    assert token_ids.tolist() == [3] * batch


def test_the_low_word_does_not_matter_where_the_high_word_is_not_small() -> None:
    highs = [2**25 + extra for extra in (0, 1, 2, 3, 129)]
    highs += [2**bit + extra for bit in range(26, 32) for extra in (-1, 0, 1)] + [2**32 - 1]
    lows = [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    for high in highs:
        words = torch.tensor([[high, low] for low in lows]).int()
        noise = gumbel.reference_gumbel(words[:, 0], words[:, 1])
        assert len(noise.unique()) == 1, high


def test_settled_logits_are_those_that_the_draw_sees() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(9)) * 5
    divisor, cutoff = torch.tensor([0.0, 0.31, 1.9]), torch.tensor([-torch.inf, 3.0, 0.5])
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    settled = logits.clone()
    settle_logits(settled, rows, divisor, cutoff)
    tokens = []
    for values, by, cut in (
        (logits, divisor, cutoff),
        (settled, torch.zeros(3), torch.full((3,), -torch.inf)),
    ):
        token_ids = torch.empty(3, dtype=torch.int64)
        gumbel.draw(
            token_ids, values, rows, torch.arange(3), torch.ones(3), torch.arange(3), by, cut
        )
        tokens.append(token_ids.tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 40.0, 1e6])
def test_the_token_that_wins_is_the_one_that_wins_with_all_noise_worked_out(scale: float) -> None:
    count, vocab_size = 3000, 257
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(13)) * scale
    logits[::7, ::2] = -torch.inf
    first, second = reference_key(torch.zeros(count).long(), torch.arange(count))
    key = first.unsqueeze(1), second.unsqueeze(1)
    tokens = torch.arange(vocab_size, dtype=torch.int32)
    high, low = reference_high_word(*key, tokens), reference_low_word(*key, tokens)
    wanted = (logits + gumbel.reference_gumbel(high, low)).argmax(dim=1)
    token_ids = torch.empty(count, dtype=torch.int64)
    gumbel.draw(
        token_ids,
        logits,
        torch.zeros(count, dtype=torch.int32),
        torch.arange(count),
        torch.ones(1),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
        torch.full((count,), -torch.inf),
    )
    assert torch.equal(token_ids, wanted)
