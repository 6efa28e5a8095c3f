"""What is said of a shadow's cost: figures over lives, intervals and verdicts."""

from __future__ import annotations

import json
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
from mrv2_diff.drivers.shadow_load import Arm, Measured, faults, main, verdict


def lives(scale: float, num_lives: int = 12, noise: float = 0.0, seed: int = 0) -> list[list[Load]]:
    """Lives with loads of 20 requests; the loads of a life have their noise in common."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(num_lives):
        factor = scale * (1 + noise * generator.standard_normal())
        load = Load(latencies=factor * np.linspace(0.1, 0.3, 20), wall_s=5 * factor)
        made.append([load, load])
    return made


def load(*latencies: float, wall_s: float) -> Load:
    return Load(latencies=np.array(latencies), wall_s=wall_s)


def test_figures_are_of_all_loads_together() -> None:
    assert figures([load(1.0, 2.0, wall_s=2.0), load(3.0, 4.0, wall_s=3.0)]) == {
        "mean_s": 2.5,
        "p99_s": pytest.approx(3.97),
        "requests_per_s": pytest.approx(0.8),
    }


def test_several_references_count_by_their_mean() -> None:
    for found in compare(lives(1.1), lives(0.8), lives(1.25)).values():
        assert found.value == pytest.approx(0.1)


def test_a_slower_server_is_worse_in_every_figure() -> None:
    for found in compare(lives(1.1), lives(1.0)).values():
        assert found.value == pytest.approx(0.1)
        assert found.low == pytest.approx(0.1)
        assert found.high == pytest.approx(0.1)
        assert found.verdict == FAIL


def test_a_faster_one_is_better_in_every_figure() -> None:
    for found in compare(lives(0.9), lives(1.0)).values():
        assert found.value == pytest.approx(-0.1)
        assert found.verdict == PASS


def test_noise_of_a_life_that_both_have_cancels() -> None:
    both = compare(lives(1.01, noise=0.3, seed=1), lives(1.0, noise=0.3, seed=1))
    assert all(found.verdict == PASS for found in both.values())


def test_noise_that_hides_the_bound_is_inconclusive() -> None:
    found = compare(lives(1.03, noise=0.2, seed=1), lives(1.0, noise=0.2, seed=2))
    assert {one.verdict for one in found.values()} == {INCONCLUSIVE}


@pytest.mark.parametrize(
    ("low", "high", "num_lives", "verdict"),
    [
        (-0.01, 0.03, 6, PASS),
        (-0.01, 0.031, 6, INCONCLUSIVE),
        (0.029, 0.05, 6, INCONCLUSIVE),
        (0.031, 0.05, 6, FAIL),
        (0.0, 0.0, 5, INCONCLUSIVE),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    low: float, high: float, num_lives: int, verdict: str
) -> None:
    found = Worse(value=(low + high) / 2, low=low, high=high, lives=num_lives)
    assert found.verdict == verdict


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """95 % of 400, give or take four standard deviations."""
    covered = 0
    for number in range(400):
        mine = lives(1.0, num_lives=6, noise=0.03, seed=2 * number)
        found = compare(mine, lives(1.0, num_lives=6, noise=0.03, seed=2 * number + 1))["mean_s"]
        covered += found.low <= 0 <= found.high
    assert 362 <= covered <= 397


def test_one_life_says_nothing_of_the_spread() -> None:
    (found, *_) = compare(lives(1.2, num_lives=1), lives(1.0, num_lives=1)).values()
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == (-1.0, float("inf"))
    kept = json.loads(json.dumps(found.values(), allow_nan=False))
    assert (kept["low"], kept["high"], kept["lives"]) == (None, None, 1)
    assert found.verdict == INCONCLUSIVE


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
        f"figure {high}": Worse(value=high, low=high - 0.02, high=high, lives=9) for high in highs
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
        [arm("v1", same, same), arm("shadow 1 %", same, tokens)],
        same,
        {"shadow 1 %": dict(report)},
    )
    assert (found == []) if said is None else (said in found[0])


def test_lives_of_one_side_only_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[12, 11\] lives"):
        compare(lives(1.0), lives(1.0, num_lives=11))


def test_what_one_life_came_to_is_put_to_the_others() -> None:
    same = [[1, 2], [3]]
    counts = {"mismatches": 0, "faults": 0, "compared_tokens": 9, "pid": 77, "up": 1}
    found = Measured()
    for scale in (1.0, 3.0):
        arms = [arm(name, same, same) for name in ("v1", "v1 again", "shadow 1 %")]
        for one, factor in zip(arms, (1.0, 1.0, 1.1), strict=True):
            one.loads = [load(scale * factor, wall_s=scale * factor)]
        arms[2].compared_late = 2
        found.add(arms, {"shadow 1 %": dict(counts)})
    assert found.faults == []
    assert found.reports == {"shadow 1 %": {"mismatches": 0, "faults": 0, "compared_tokens": 18}}
    assert found.compared_late["shadow 1 %"] == 4
    worse = found.worse()
    assert worse["v1 again"]["mean_s"].value == pytest.approx(0)
    assert worse["shadow 1 %"]["mean_s"].value == pytest.approx(0.1)
    assert worse["shadow 1 %"]["mean_s"].lives == 2


def test_a_later_life_with_other_tokens_is_a_fault() -> None:
    found = Measured()
    found.add([arm("v1", [[1]])], {})
    found.add([arm("v1", [[2]])], {})
    assert found.faults == ["v1: other token ids than v1"]


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
