"""The harness finds faults, each by the value named beforehand, and none where there is none."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from mrv2 import Runner, StepInFlight, StepPlan
from mrv2_diff import cli, process
from mrv2_diff.case import Case
from mrv2_diff.catalog import CASES
from mrv2_diff.mutants import MUTANTS, Mutant
from mrv2_diff.record import Record, read
from mrv2_diff.verdict import Verdict

process.prepare()

# E402: vLLM reads the environment when it is imported.
from mrv2_diff.run import RunRequest, run_cases  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """Run each fault's case with the fault, then each case without; by the fault's or case's id.

    Cases of one engine follow each other, so that an engine is started once.
    """
    jobs: list[tuple[str, Case, AbstractContextManager[object]]] = []
    for engine in dict.fromkeys(CASES[mutant.case].engine for mutant in MUTANTS):
        faulty = [mutant for mutant in MUTANTS if CASES[mutant.case].engine == engine]
        jobs += [(mutant.id, CASES[mutant.case], mutant.apply()) for mutant in faulty]
        cases = dict.fromkeys(mutant.case for mutant in faulty)
        jobs += [(case, CASES[case], nullcontext()) for case in cases]
    request = RunRequest(cases=tuple(case for _, case, _ in jobs), pair=("v1", "mrv2"), model=None)
    made, found = run_cases(request), {}
    for name, _, context in jobs:
        with context:
            found[name] = next(made)
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_fault_is_found_by_the_value_named_beforehand(
    mutant: Mutant, records: dict[str, Record]
) -> None:
    record = records[mutant.id]
    assert record.id == mutant.case
    assert record.verdict is mutant.verdict, record.error
    assert record.first_divergence is not None
    assert record.first_divergence.value == mutant.first


@pytest.mark.parametrize("case", sorted({mutant.case for mutant in MUTANTS}))
def test_control_without_a_fault_passes(case: str, records: dict[str, Record]) -> None:
    assert records[case].verdict is Verdict.MATCH
    assert records[case].first_divergence is None


def test_a_fault_fails_the_command(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    with mutant.apply():
        code = cli.main(["run", "--case", mutant.case, "--out", str(tmp_path)])
    (record,) = read(tmp_path / "records.jsonl")
    assert code == 1
    assert record.verdict is mutant.verdict


def test_there_are_ten_faults_at_least() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS) >= 10


def test_a_crash_is_contained_in_its_case(tmp_path: Path) -> None:
    execute, calls = Runner.execute, iter(range(1_000_000))

    def fails_once(self: Runner, plan: StepPlan) -> StepInFlight:
        if next(calls) == 5:
            raise RuntimeError("a fault of the candidate")
        return execute(self, plan)

    with patch.object(Runner, "execute", fails_once):
        cases = ["--case", "lifecycle.greedy", "--case", "lifecycle.mixed"]
        code = cli.main(["run", *cases, "--out", str(tmp_path)])
    crashed, following = read(tmp_path / "records.jsonl")
    assert code == 1
    assert crashed.verdict is Verdict.CRASHED
    assert "a fault of the candidate" in crashed.summary
    assert following.verdict is Verdict.MATCH
