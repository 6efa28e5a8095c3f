"""The harness finds planted faults, each by what was written down beforehand, and no others.

A sample of what `mrv2-diff mutants` does: a fault of each kind on few engines, and some cases in
which nothing is wrong. And its accounting: it says so where a fault is missed, or an alarm false.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from mrv2 import Runner, Step, StepPlan
from mrv2_diff import cli, process
from mrv2_diff.catalog import CASES
from mrv2_diff.catalog.prompts import CHUNKED, ROOMY
from mrv2_diff.catalog.workloads import STRAINED
from mrv2_diff.record import read
from mrv2_diff.schedule_faults import SCHEDULE_FAULTS
from mrv2_diff.selftest.alike import ENGINES, Alike
from mrv2_diff.selftest.request import SelfTestRequest
from mrv2_diff.selftest.result import SelfTest
from mrv2_diff.verdict import Verdict

process.prepare()

# E402: vLLM reads the environment when it is imported.
from mrv2_diff import mutants  # noqa: E402
from mrv2_diff.mutants import MUTANTS  # noqa: E402
from mrv2_diff.selftest.run import selftest  # noqa: E402

pytestmark = pytest.mark.vllm

NUM_ALIKE = 50


def sample() -> tuple[str, ...]:
    """The first two faults of each kind that three engines can show, and one of each check."""
    here = [each for each in MUTANTS if CASES[each.case].engine in (ROOMY, CHUNKED, STRAINED)]
    kinds: dict[str, list[str]] = {}
    for mutant in here:
        kinds.setdefault(mutant.kind, []).append(mutant.id)
    checks = {fault.found_by: fault.id for fault in SCHEDULE_FAULTS}
    return (*(name for names in kinds.values() for name in names[:2]), *checks.values())


@pytest.fixture(scope="module")
def found() -> SelfTest:
    """Two processes, as the command has them."""
    request = SelfTestRequest(only=sample(), num_alike=NUM_ALIKE, seed=1)
    return selftest(request, lambda line: None)


def test_every_fault_is_found_by_what_was_written_down(found: SelfTest) -> None:
    assert [finding for finding in found.findings if finding.outcome != "caught"] == []
    assert {finding.id for finding in found.findings} == set(sample())
    assert len(found.findings) >= 35


def test_every_case_passes_without_a_fault(found: SelfTest) -> None:
    assert [control for control in found.controls if not control.passes] == []
    cases = {finding.case for finding in found.findings}
    assert {control.name for control in found.controls} == cases


def test_nothing_is_found_where_nothing_is_wrong(found: SelfTest) -> None:
    assert found.alarms == []
    assert (found.num_alike, len(found.alike)) == (NUM_ALIKE, 2 * NUM_ALIKE)
    assert found.passes


def test_what_is_alike_was_run_in_other_forms(found: SelfTest) -> None:
    for runner in ("v1", "mrv2"):
        runs = [run for run in found.alike if run.runner == runner]
        assert {run.engine for run in runs} == set(ENGINES)
        for what in ("order", "neighbours", "chunks"):
            assert sum(run.changes.get(what, 0) for run in runs) > NUM_ALIKE
        for what in ("chunks", "preemptions", "cache_hits"):
            assert sum(run.events.get(what, 0) for run in runs) > 0


def test_faults_that_are_missed_or_mistaken_are_told_and_fail_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = replace(MUTANTS[0], id="idle", apply=nullcontext)
    other = replace(MUTANTS[0], id="other", first="ranks")
    monkeypatch.setattr(mutants, "MUTANTS", (idle, other))
    monkeypatch.setattr("mrv2_diff.selftest.todo.MUTANTS", (idle, other))
    request = SelfTestRequest(only=("idle", "other"), num_alike=0, num_workers=0)
    result = selftest(request, lambda line: None)
    assert [(each.id, each.outcome, each.found) for each in result.findings] == [
        ("idle", "survived", ""),
        ("other", "otherwise", "positions"),
    ]
    assert len(result.faults) == 2
    assert not result.passes
    assert [control.passes for control in result.controls] == [True]


def test_a_planted_difference_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Alike.case
    monkeypatch.setattr(
        Alike, "case", lambda self: replace(case(self), fault="temperature-of-another-row")
    )
    monkeypatch.setattr("mrv2_diff.selftest.todo.ENGINES", {"roomy": ENGINES["roomy"]})
    request = SelfTestRequest(plants=False, num_alike=15, num_workers=0)
    result = selftest(request, lambda line: None)
    alarmed = {run.runner for run in result.alarms}
    assert alarmed == {"mrv2"}
    assert result.num_alarmed > 0
    assert not result.passes


def test_a_fault_fails_the_command(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    with mutant.apply():
        code = cli.main(["run", "--case", mutant.case, "--out", str(tmp_path)])
    (record,) = read(tmp_path / "records.jsonl")
    assert code == 1
    assert record.verdict is mutant.verdict


def test_a_crash_is_contained_in_its_case(tmp_path: Path) -> None:
    execute, calls = Runner.execute, iter(range(1_000_000))

    def fails_once(self: Runner, plan: StepPlan) -> Step:
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
