"""What three engines of their own did, judged without starting one."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff import apart
from mrv2_diff.apart import Found, judge_apart, run_apart
from mrv2_diff.case import Add, Apart, Case, EngineSpec, Variant
from mrv2_diff.drivers.one_engine import OURS, Continuation, Job, Outcome
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.verdict import Verdict

EVENTS = (
    Add(step=0, req_id="greedy", prompt=(1, 2), max_tokens=3),
    Add(step=0, req_id="random", prompt=(3,), max_tokens=3, temperature=1.0, seed=1),
)
TOKENS = ([4, 5, 6], [7, 8, 9])
CRASHED = Found(outcome=None, error="Traceback\nRuntimeError: no offset\n")


def _case(candidate: str = "mrv2", right: str = "mrv2", raises: str | None = "no offset") -> Case:
    runners: dict[str, Any] = {"candidate": candidate, "right": right}
    variants: dict[str, Any] = {name: Variant(runner=each) for name, each in runners.items()}
    return Case(
        id="made-up",
        area="nothing",
        feature="nothing",
        title="two requests",
        engine=EngineSpec(model=ModelSpec()),
        workload=lambda: EVENTS,
        apart=Apart(
            reference=Variant(runner="v1"),
            raises=raises,
            why="made up",
            **variants,
        ),
    )


def _found(
    greedy: list[int] = TOKENS[0], random: list[int] = TOKENS[1], ours: bool = True
) -> Found:
    outcome = Outcome(
        runner_class=OURS if ours else "V1",
        steps=3,
        preemptions=0,
        steps_checked=0,
        async_scheduling=False,
        compiled_graphs=0,
        attention=[],
        continuations=[Continuation(token_ids=ids, logprobs=[]) for ids in (greedy, random)],
    )
    return Found(outcome=outcome)


V1 = _found(ours=False)


def test_a_crash_that_was_named_and_right_tokens() -> None:
    found = judge_apart(_case(), CRASHED, _found(), _found())
    assert found.verdict is Verdict.REFERENCE_CRASHED
    assert found.tokens.compared == 6
    assert "no offset" in found.summary


def test_a_crash_that_does_not_happen_is_missing() -> None:
    assert judge_apart(_case(), V1, _found(), _found()).verdict is Verdict.MISSING


def test_another_crash_says_nothing() -> None:
    other = dataclasses.replace(CRASHED, error="MemoryError")
    assert judge_apart(_case(), other, _found(), _found()).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("wrong", [{"greedy": [4, 5, 0]}, {"random": [7, 8]}])
def test_a_candidate_with_other_tokens_is_wrong_whatever_the_reference_does(
    wrong: dict[str, Any],
) -> None:
    for reference in (CRASHED, V1):
        found = judge_apart(_case(), reference, _found(**wrong), _found())
        assert found.verdict is Verdict.WRONG_VALUE
        assert found.first is not None
        assert found.first.index == 2


def test_a_candidate_that_fails_has_crashed() -> None:
    assert judge_apart(_case(), CRASHED, CRASHED, _found()).verdict is Verdict.CRASHED
    assert judge_apart(_case(), CRASHED, _found(), CRASHED).verdict is Verdict.INCONCLUSIVE


def test_another_runner_than_asked_for_says_nothing() -> None:
    assert judge_apart(_case(), CRASHED, V1, _found()).verdict is Verdict.INCONCLUSIVE
    assert judge_apart(_case(), CRASHED, _found(), V1).verdict is Verdict.INCONCLUSIVE


def test_a_reference_is_wrong_only_where_its_greedy_tokens_are() -> None:
    case = _case(right="v1", raises=None)
    wrong = _found(greedy=[0, 5, 6], random=[0, 0, 0], ours=False)
    right = _found(random=[1, 1, 1], ours=False)  # another generator's
    found = judge_apart(case, wrong, _found(), right)
    assert found.verdict is Verdict.REFERENCE_WRONG
    assert found.summary.startswith("1 of V1's 3 tokens")
    drawn_otherwise = _found(random=[0, 0, 0], ours=False)
    assert judge_apart(case, drawn_otherwise, _found(), right).verdict is Verdict.MISSING
    assert judge_apart(case, CRASHED, _found(), right).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("replayed", [0, 9])
def test_with_graphs_ours_must_have_replayed(
    monkeypatch: pytest.MonkeyPatch, replayed: int
) -> None:
    jobs: list[Job] = []

    def run_job(job: Job, runner: str) -> Outcome:
        jobs.append(job)
        found = _found(ours=runner == "mrv2").outcome
        assert found is not None
        return dataclasses.replace(found, steps_by_mode={"eager": 3, "decode": replayed})

    monkeypatch.setattr(apart, "run_job", run_job)
    case = _case(raises=None, right="v1")
    findings = run_apart(case, Path("model"), "cuda", "FULL_DECODE_ONLY")
    assert {job.engine["compilation_config"]["cudagraph_mode"] for job in jobs} == {
        "FULL_DECODE_ONLY"
    }
    assert {job.engine["attention_backend"] for job in jobs} == {"TRITON_ATTN"}
    assert findings.verdict is Verdict.MISSING
    assert ("no decode was replayed" in findings.summary) == (replayed == 0)
    assert ("was expected to be wrong and is not" in findings.summary) == (replayed > 0)
