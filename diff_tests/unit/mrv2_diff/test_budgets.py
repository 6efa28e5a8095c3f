"""Memory and time against budgets, judged from figures that are given."""

import random

import pytest

from mrv2_diff.budgets import MIN_ROUNDS, ROUND_PAIRS, StepTimes, Times, judge_memory, judge_time
from mrv2_diff.case import Budget
from mrv2_diff.record import Cost, HeldBy, Memory, PhasePeak
from mrv2_diff.verdict import Verdict

KIB = 1024
BUDGET = Budget()


def _peak(**held: int) -> PhasePeak:
    ops = tuple(HeldBy(op=f"aten::{name} in f.py: f", bytes=size) for name, size in held.items())
    return PhasePeak(peak_bytes=sum(held.values()), held_by=ops)


def _memory(state: int = 0, **phases: PhasePeak) -> Memory:
    return Memory(
        step_peak_tensor_bytes=0, step_peak_python_bytes=0, state_held_bytes=state, phases=phases
    )


def test_the_defaults_are_what_the_page_says() -> None:
    assert (BUDGET.memory, BUDGET.latency) == (1.02, 1.05)


def test_equal_memory_is_within_its_budget() -> None:
    memory = _memory(weights=_peak(empty=100 * KIB), execute=_peak(mm=10 * KIB))
    cost = judge_memory(memory, memory, BUDGET)
    assert (cost.verdict, cost.ratio, cost.required, cost.samples) == (Verdict.MATCH, 1.0, 1.0, 2)


def test_more_memory_names_phase_and_operation() -> None:
    reference = _memory(KIB, execute=_peak(mm=50 * KIB), sample=_peak(sort=60 * KIB))
    candidate = _memory(
        KIB, execute=_peak(mm=50 * KIB), sample=_peak(sort=60 * KIB, zeros=10 * KIB)
    )
    cost = judge_memory(reference, candidate, BUDGET)
    assert cost.verdict is Verdict.OVER_BUDGET
    assert (cost.phase, cost.op) == ("sample", "aten::zeros in f.py: f")
    assert cost.ratio == pytest.approx(71 / 61)
    assert "in sample, 1.164 times V1's, budget 1.02, required 1.164" in cost.summary
    assert "aten::zeros in f.py: f holds 10.0 KiB more" in cost.summary


def test_what_is_kept_between_steps_is_named_where_it_is_that() -> None:
    peaks = _peak(mm=50 * KIB)
    cost = judge_memory(_memory(KIB, execute=peaks), _memory(9 * KIB, execute=peaks), BUDGET)
    assert (cost.verdict, cost.op) == (Verdict.OVER_BUDGET, "kept between steps")


def test_an_operation_that_both_have_alike_is_not_the_one() -> None:
    """Though it has the name of what the candidate has more of."""
    mm = HeldBy(op="aten::empty in both.py: mm", bytes=50 * KIB)
    own = HeldBy(op="aten::empty in ours.py: upload", bytes=5 * KIB)
    theirs = PhasePeak(peak_bytes=mm.bytes, held_by=(mm,))
    ours = PhasePeak(peak_bytes=mm.bytes + own.bytes, held_by=(mm, own))
    cost = judge_memory(_memory(execute=theirs), _memory(execute=ours), BUDGET)
    assert (cost.verdict, cost.op) == (Verdict.OVER_BUDGET, own.op)


def test_one_purpose_of_two_functions_is_not_the_one() -> None:
    theirs = HeldBy(op="aten::sort in theirs.py: cut", bytes=50 * KIB)
    sort = HeldBy(op="aten::sort in ours.py: narrow", bytes=50 * KIB)
    own = HeldBy(op="aten::add in ours.py: narrow", bytes=5 * KIB)
    cost = judge_memory(
        _memory(sample=PhasePeak(peak_bytes=50 * KIB, held_by=(theirs,))),
        _memory(sample=PhasePeak(peak_bytes=55 * KIB, held_by=(sort, own))),
        BUDGET,
    )
    assert cost.op == own.op


def test_a_step_counts_by_its_highest_part() -> None:
    reference = _memory(execute=_peak(mm=50 * KIB), sample=_peak(sort=10 * KIB))
    candidate = _memory(execute=_peak(mm=50 * KIB), sample=_peak(sort=45 * KIB))
    assert judge_memory(reference, candidate, BUDGET).verdict is Verdict.MATCH


@pytest.mark.parametrize("phase", ["weights", "profile", "kv", "graphs"])
def test_each_phase_of_the_start_counts(phase: str) -> None:
    less, more = (_memory(0, **{phase: _peak(empty=size)}) for size in (100, 103))
    cost = judge_memory(less, more, BUDGET)
    assert (cost.verdict, cost.phase) == (Verdict.OVER_BUDGET, phase)
    assert judge_memory(more, less, BUDGET).verdict is Verdict.MATCH
    assert judge_memory(less, more, Budget(memory=1.03)).verdict is Verdict.MATCH


def test_a_phase_without_bytes_in_the_reference_is_over() -> None:
    cost = judge_memory(_memory(execute=_peak()), _memory(execute=_peak(mm=1)), BUDGET)
    assert cost.verdict is Verdict.OVER_BUDGET


def test_nothing_measured_is_no_verdict() -> None:
    cost = judge_memory(_memory(weights=_peak(mm=1)), _memory(execute=_peak(mm=1)), BUDGET)
    assert (cost.verdict, cost.ratio, cost.samples) == (Verdict.INCONCLUSIVE, None, 0)


def _times(ratio: float, noise: float, steps: int = 120, *, in_sample: float = 0.0) -> StepTimes:
    """Steps of a millisecond with noise of their own, the candidate's so many times as long."""
    draw = random.Random(5)

    def noisy(seconds: float) -> float:
        return seconds * draw.lognormvariate(0.0, noise)

    found: Times = {}
    for step in range(3, 3 + steps):
        drift = 1 + step / steps  # of the machine, the same for both
        reference = [noisy(drift * 0.0007), noisy(drift * 0.0003)]
        candidate = [noisy(drift * ratio * 0.0007), noisy(drift * ratio * 0.0003) + in_sample]
        found[step] = {"host": (reference, candidate)}
    return StepTimes([found])


def _judged(times: StepTimes, budget: Budget = BUDGET) -> Cost:
    return judge_time("host time", times, "host", budget)


def test_equal_times_are_within_the_budget() -> None:
    cost = _judged(_times(1.0, 0.02))
    assert cost.verdict is Verdict.MATCH
    assert cost.low is not None
    assert cost.high is not None
    assert cost.ratio is not None
    assert cost.low <= cost.ratio <= cost.high < 1.05
    assert cost.samples == 120 // (2 * ROUND_PAIRS)
    assert f"required {cost.high:.3f}" in cost.summary


def test_a_longer_phase_is_over_and_named() -> None:
    cost = _judged(_times(1.0, 0.02, in_sample=0.0005))
    assert (cost.verdict, cost.phase) == (Verdict.OVER_BUDGET, "sample")
    assert "most of it in sample" in cost.summary


@pytest.mark.parametrize(("ratio", "noise"), [(1.05, 0.05), (1.0, 0.6), (1.1, 0.6)])
def test_an_interval_that_holds_the_budget_is_no_verdict(ratio: float, noise: float) -> None:
    cost = _judged(_times(ratio, noise))
    assert cost.verdict is Verdict.INCONCLUSIVE
    assert cost.low is not None
    assert cost.high is not None
    assert cost.low <= 1.05 < cost.high


def test_few_steps_are_no_verdict() -> None:
    cost = _judged(_times(3.0, 0.0, steps=2 * ROUND_PAIRS * MIN_ROUNDS - 1))
    assert (cost.verdict, cost.low, cost.high) == (Verdict.INCONCLUSIVE, None, None)
    assert f"{MIN_ROUNDS - 1} rounds of 8 steps, and {MIN_ROUNDS} say something" in cost.summary


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_without_turns_there_is_no_verdict(ratio: float) -> None:
    cost = judge_time("host time", _times(ratio, 0.02), "host", BUDGET, by_turns=False)
    assert cost.verdict is Verdict.INCONCLUSIVE
    assert "one runner went first in every step" in cost.summary


def test_no_steps_are_no_verdict() -> None:
    cost = _judged(StepTimes([{}]))
    assert (cost.verdict, cost.ratio, cost.samples) == (Verdict.INCONCLUSIVE, None, 0)


def test_equal_runners_are_hardly_ever_over() -> None:
    """In 200 runs of equal runners none fails; the interval may hold the budget."""
    over = 0
    for seed in range(200):
        draw = random.Random(seed)
        steps: Times = {
            step: {"host": ([draw.lognormvariate(0, 0.1)], [draw.lognormvariate(0, 0.1)])}
            for step in range(96)
        }
        over += _judged(StepTimes([steps])).verdict is Verdict.OVER_BUDGET
    assert over == 0


def test_a_few_steps_that_were_interrupted_do_not_decide() -> None:
    times = _times(1.0, 0.02)
    for step in (10, 50, 90):  # the machine was elsewhere for 50 ms
        times.passes[0][step]["host"][1][0] += 0.05  # type: ignore[index]
    assert _judged(times).verdict is Verdict.MATCH


def test_pairs_are_of_steps_that_follow_each_other() -> None:
    """Which of the two goes first alternates by step, so that a pair has each order once."""
    steps: Times = {step: {"host": ([1.0], [2.0 if step < 4 else 9.0])} for step in (0, 1, 3, 5, 6)}
    times = StepTimes([steps] * ROUND_PAIRS)
    assert times.rounds("host") == []  # two pairs a pass are no round
    whole: Times = {step: {"host": ([1.0], [2.0])} for step in range(2 * ROUND_PAIRS)}
    assert StepTimes([whole, whole]).rounds("host") == [2.0, 2.0]


def test_a_drift_within_a_pair_does_not_count_twice() -> None:
    """ABBA: whoever goes first meets the machine as it was."""
    found: Times = {}
    clock = 1.0
    for step in range(96):
        first, clock = clock, clock * 1.01
        second, clock = clock, clock * 1.01
        reference, candidate = (first, second) if step % 2 == 0 else (second, first)
        found[step] = {"host": ([reference], [candidate])}
    cost = _judged(StepTimes([found]))
    assert cost.verdict is Verdict.MATCH
    assert cost.ratio == pytest.approx(1.0, abs=0.001)
