"""The harness finds faults, each by the value named beforehand, and none where there is none."""

from pathlib import Path
from unittest.mock import patch

import pytest

from mrv2 import Runner, StepInFlight, StepPlan
from mrv2_diff import cli
from mrv2_diff.mutants import MUTANTS, Mutant
from mrv2_diff.record import Record, read
from mrv2_diff.verdict import Verdict

pytestmark = pytest.mark.vllm


def run_case(case: str, out: Path) -> tuple[int, Record]:
    """Run one case as a user would, and return the exit code and the record."""
    code = cli.main(["run", "--case", case, "--out", str(out)])
    (record,) = read(out / "records.jsonl")
    return code, record


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_fault_is_found_by_the_value_named_beforehand(mutant: Mutant, tmp_path: Path) -> None:
    with mutant.apply():
        code, record = run_case(mutant.case, tmp_path)
    assert code == 1
    assert record.verdict is Verdict.WRONG_VALUE, record.error
    assert record.first_divergence is not None
    assert record.first_divergence.value == mutant.first


@pytest.mark.parametrize("case", sorted({mutant.case for mutant in MUTANTS}))
def test_control_without_a_fault_passes(case: str, tmp_path: Path) -> None:
    code, record = run_case(case, tmp_path)
    assert code == 0
    assert record.verdict is Verdict.MATCH
    assert record.first_divergence is None


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
