"""V1 beside itself, in its own order and in others: the harness must see no difference."""

import pytest

from mrv2_diff import cli, noise
from mrv2_diff.case import Add
from mrv2_diff.catalog import CASES
from mrv2_diff.record import Record, read
from mrv2_diff.verdict import Verdict

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Record]]:
    """Run the whole catalog with V1 as its own candidate."""
    out = tmp_path_factory.mktemp("v1-v1")
    code = cli.main(["run", "--pair", "v1,v1", "--out", str(out)])
    return code, {record.id: record for record in read(out / "records.jsonl")}


def test_no_case_is_alarmed(run: tuple[int, dict[str, Record]]) -> None:
    code, records = run
    alarms = {
        case: (record.summary, record.error)
        for case, record in records.items()
        if record.verdict is not Verdict.MATCH
    }
    assert alarms == {}
    assert code == 0
    assert set(records) == {case.id for case in CASES.values() if case.on("cpu").against_itself}


def test_other_orders_neighbours_and_chunks_were_run(run: tuple[int, dict[str, Record]]) -> None:
    _, records = run
    seeded = {
        case.id
        for case in CASES.values()
        if any(isinstance(event, Add) and event.seed is not None for event in case.workload())
    }
    for schedule in noise.SCHEDULES:
        ran = {case for case, record in records.items() if f"forced, {schedule}" in record.modes}
        assert ran >= set(records) - seeded
    assert len(seeded) < len(records) / 2


def test_every_pass_compared_something(run: tuple[int, dict[str, Record]]) -> None:
    _, records = run
    for record in records.values():
        assert len(record.modes) >= 3
        assert all(agreement.compared for agreement in record.agreements.values())
        assert record.request_steps >= len(record.modes) * 20
