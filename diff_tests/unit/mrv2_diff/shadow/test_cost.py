"""What is said of a shadow's cost: figures over rounds, intervals and verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrv2_diff.drivers.server import Server
from mrv2_diff.drivers.shadow_cost import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Load,
    Worse,
    compare,
    figures,
)
from mrv2_diff.drivers.shadow_load import Arm, faults, main, verdict


def loads(scale: float, num_rounds: int = 12, noise: float = 0.0, seed: int = 0) -> list[Load]:
    """Loads of 20 requests, whose rounds are in part noise."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(num_rounds):
        factor = scale * (1 + noise * generator.standard_normal())
        latencies = (factor * np.linspace(0.1, 0.3, 20)).tolist()
        made.append(Load(latencies=latencies, wall_s=5 * factor))
    return made


def test_figures_are_of_all_rounds_together() -> None:
    made = [Load(latencies=[1.0, 2.0], wall_s=2.0), Load(latencies=[3.0, 4.0], wall_s=3.0)]
    assert figures(made) == {
        "mean_s": 2.5,
        "p99_s": pytest.approx(3.97),
        "requests_per_s": pytest.approx(0.8),
    }


def test_a_slower_server_is_worse_in_every_figure() -> None:
    for found in compare(loads(1.1), loads(1.0)).values():
        assert found.value == pytest.approx(0.1)
        assert found.low == pytest.approx(0.1)
        assert found.high == pytest.approx(0.1)
        assert found.verdict == FAIL


def test_a_faster_one_is_better_in_every_figure() -> None:
    for found in compare(loads(0.9), loads(1.0)).values():
        assert found.value == pytest.approx(-0.1)
        assert found.verdict == PASS


def test_noise_of_a_round_that_both_have_cancels() -> None:
    both = compare(loads(1.01, noise=0.3, seed=1), loads(1.0, noise=0.3, seed=1))
    assert all(found.verdict == PASS for found in both.values())


def test_noise_that_hides_the_bound_is_inconclusive() -> None:
    found = compare(loads(1.03, noise=0.2, seed=1), loads(1.0, noise=0.2, seed=2))
    assert {one.verdict for one in found.values()} == {INCONCLUSIVE}


@pytest.mark.parametrize(
    ("low", "high", "rounds", "verdict"),
    [
        (-0.01, 0.03, 6, PASS),
        (-0.01, 0.031, 6, INCONCLUSIVE),
        (0.029, 0.05, 6, INCONCLUSIVE),
        (0.031, 0.05, 6, FAIL),
        (0.0, 0.0, 5, INCONCLUSIVE),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    low: float, high: float, rounds: int, verdict: str
) -> None:
    assert Worse(value=(low + high) / 2, low=low, high=high, rounds=rounds).verdict == verdict


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """95 % but for chance; a bootstrap of 12 rounds is known to be a little short."""
    covered = 0
    for number in range(100):
        mine = loads(1.0, noise=0.03, seed=2 * number)
        found = compare(mine, loads(1.0, noise=0.03, seed=2 * number + 1))["mean_s"]
        covered += found.low <= 0 <= found.high
    assert 0.84 <= covered / 100 <= 1.0


@pytest.mark.parametrize(
    ("highs", "wrong", "said"),
    [
        ([0.01, 0.02, 0.03], [], PASS),
        ([0.01, 0.02, 0.04], [], INCONCLUSIVE),
        ([0.01, 0.02, 0.09], [], FAIL),
        ([0.01, 0.02, 0.03], ["other token ids"], FAIL),
    ],
)
def test_the_verdict_is_that_of_the_worst_figure(
    highs: list[float], wrong: list[str], said: str
) -> None:
    judged = {
        f"figure {high}": Worse(value=high, low=high - 0.02, high=high, rounds=9) for high in highs
    }
    assert verdict(wrong, judged) == said


def arm(name: str, *loads_of_tokens: list[list[int]]) -> Arm:
    return Arm(name, Server("http://none", Path("none")), token_ids=list(loads_of_tokens))


@pytest.mark.parametrize(
    ("tokens", "changed", "said"),
    [
        ([[1, 2], [3]], {}, None),
        ([[1, 2], [4]], {}, "shadow 1 %: other token ids than v1"),
        ([[1, 2], [3]], {"mismatches": 1}, '"mismatches": 1'),
        ([[1, 2], [3]], {"faults": 1}, '"faults": 1'),
        ([[1, 2], [3]], {"compared_tokens": 0}, '"compared_tokens": 0'),
    ],
)
def test_other_tokens_a_finding_and_a_shadow_that_compared_nothing_are_faults(
    tokens: list[list[int]], changed: dict[str, int], said: str | None
) -> None:
    same = [[1, 2], [3]]
    report = {"mismatches": 0, "faults": 0, "compared_tokens": 9} | changed
    found = faults(
        [arm("v1", same, same), arm("shadow 1 %", same, tokens)], {"shadow 1 %": dict(report)}
    )
    assert (found == []) if said is None else (said in found[0])


def test_rounds_of_one_side_only_are_refused() -> None:
    with pytest.raises(ValueError, match="12 and 11 rounds"):
        compare(loads(1.0), loads(1.0, num_rounds=11))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "'0' is no number of minutes above 0"),
        (["--minutes", "x"], "'x' is no number of minutes"),
        (["--out", "/nowhere/x.json"], "/nowhere is no folder"),
    ],
)
def test_wrong_options_of_the_measurement_are_refused_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
