"""The work of testing the harness: what there is, and who does what."""

import pytest

from mrv2_diff.catalog import CASES
from mrv2_diff.compare.steps import OF_PROMPTS
from mrv2_diff.compare.tally import CHAIN
from mrv2_diff.mutants import MUTANTS
from mrv2_diff.schedule_faults import SCHEDULE_FAULTS
from mrv2_diff.selftest.alike import ENGINES, alike
from mrv2_diff.selftest.jobs import Dealer, Job
from mrv2_diff.selftest.todo import chosen, jobs, kinds
from mrv2_diff.verdict import Verdict

pytestmark = pytest.mark.vllm


def job(group: str, cost: float = 1.0) -> Job:
    return Job(what="control", name="any", group=group, cost=cost)


def test_there_are_sixty_faults_in_lockstep_alone_each_with_a_name() -> None:
    names = [*(mutant.id for mutant in MUTANTS), *(fault.id for fault in SCHEDULE_FAULTS)]
    assert len(set(names)) == len(names)
    assert len(MUTANTS) >= 60


def test_each_mutant_names_a_case_and_what_must_show_it() -> None:
    for mutant in MUTANTS:
        assert CASES[mutant.case].apart is None
        assert not mutant.verdict.passes
        if mutant.first is None:
            assert mutant.verdict in (Verdict.CRASHED, Verdict.WRONG_VALUE)
        else:
            assert mutant.first in (*CHAIN, OF_PROMPTS)


def test_no_two_mutants_are_the_same_fault() -> None:
    assert len({mutant.apply for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.title for mutant in MUTANTS}) == len(MUTANTS)


def test_a_case_runs_without_a_fault_before_it_runs_with_one() -> None:
    todo = jobs(MUTANTS, SCHEDULE_FAULTS, 20, seed=0)
    for index, each in enumerate(todo):
        if each.what == "mutant":
            case = next(mutant.case for mutant in MUTANTS if mutant.id == each.name)
            controls = [job.name for job in todo[:index] if job.what == "control"]
            assert controls.count(case) == 1
        if each.what == "schedule fault":
            assert any(job.what == "schedules" for job in todo[:index])
    assert len({job.name for job in todo if job.what == "mutant"}) == len(MUTANTS)


def test_every_case_in_which_nothing_is_wrong_is_run_once() -> None:
    todo = [job for job in jobs([], [], 103, seed=5) if job.what == "alike"]
    assert sorted(case.number for job in todo for case in job.cases) == list(range(103))
    for each in todo:
        assert {str(ENGINES[case.engine]) for case in each.cases} == {each.group}


def test_faults_are_chosen_by_name_and_by_kind() -> None:
    mutants, faults = chosen(["stale-row", "ring-not-restarted"], ["penalties"])
    assert {fault.id for fault in faults} == {"ring-not-restarted"}
    named = {mutant.id for mutant in mutants}
    assert named == {"stale-row", *kinds()["penalties"]}
    everything = chosen([], [])
    assert everything == (list(MUTANTS), list(SCHEDULE_FAULTS))


def test_cases_come_again_from_their_seed_and_differ_by_number() -> None:
    first, again, other = alike(30, 1), alike(30, 1), alike(30, 2)
    workloads = [case.case().workload() for case in first]
    assert workloads == [case.case().workload() for case in again]
    assert workloads != [case.case().workload() for case in other]
    assert len(set(workloads)) == 30
    assert {case.engine for case in first} == set(ENGINES)


def test_a_worker_stays_with_its_engine_and_helps_others_last() -> None:
    dealer = Dealer([job("a"), job("a"), job("a"), job("b", 5.0), job("b"), job("c")])
    assert [dealer.next(0), dealer.next(1)] == [job("b", 5.0), job("a")]
    assert [dealer.next(0), dealer.next(0)] == [job("b"), job("c")]
    assert [dealer.next(0), dealer.next(1), dealer.next(1)] == [job("a"), job("a"), None]
