"""Records survive the trip through their file, and a torn line is never taken for one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mrv2_diff import record as records_file
from mrv2_diff.verdict import Divergence, Verdict

MakeRecord = Callable[..., records_file.Record]
MakeCosts = Callable[..., tuple[records_file.Cost, ...]]


def test_a_record_comes_back_as_it_went(tmp_path: Path, make_record: MakeRecord) -> None:
    first = make_record()
    second = make_record(
        id="other",
        verdict=Verdict.WRONG_VALUE,
        error="a line\nand another",
        first_divergence=Divergence(
            mode="free",
            step=3,
            value="slots",
            req_id="r-1",
            index=0,
            reference="1",
            candidate="2",
            policy="exact",
        ),
    )
    path = tmp_path / "made" / "records.jsonl"
    for record in (first, second):
        records_file.append(path, record)
    assert list(records_file.read(path)) == [first, second]
    assert path.read_bytes().count(b"\n") == 2


def test_costs_and_phases_come_back(
    tmp_path: Path, make_record: MakeRecord, make_costs: MakeCosts
) -> None:
    peak = records_file.PhasePeak(
        peak_bytes=9, held_by=(records_file.HeldBy(op="aten::mm in f", bytes=9),)
    )
    plain = make_record()
    memory = {name: dataclasses.replace(item, phases={"execute": peak})
              for name, item in plain.memory.items()}  # fmt: skip
    endless = dataclasses.replace(make_costs()[0], ratio=float("inf"), low=None, high=None)
    record = make_record(memory=memory, costs=(*make_costs(Verdict.OVER_BUDGET), endless))
    records_file.append(tmp_path / "records.jsonl", record)
    assert list(records_file.read(tmp_path / "records.jsonl")) == [record]


def test_a_record_of_a_former_version_has_no_costs(make_record: MakeRecord) -> None:
    raw = msgspec.json.decode(make_record().to_json())
    del raw["costs"]
    for memory in raw["memory"].values():
        del memory["phases"]
    for latency in raw["latency"].values():
        del latency["device_us"]
        for quartiles in latency.values():
            if quartiles is not None:
                del quartiles["p90"], quartiles["p99"]
    assert records_file.decode(msgspec.json.encode(raw)) == make_record()


def test_a_torn_last_line_is_skipped_and_one_in_the_middle_is_named(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    path = tmp_path / "records.jsonl"
    line = make_record().to_json()
    path.write_bytes(line + b"\n" + line[:40])
    assert len(list(records_file.read(path))) == 1
    path.write_bytes(line[:40] + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:1 is not a record of format 1"):
        list(records_file.read(path))


def test_another_format_is_refused(make_record: MakeRecord) -> None:
    other = dataclasses.replace(make_record(), format=2).to_json()
    with pytest.raises(msgspec.ValidationError, match="format is 2, this reader knows 1"):
        records_file.decode(other)


def test_a_figure_that_is_missing_is_refused(make_record: MakeRecord) -> None:
    raw = msgspec.json.decode(make_record().to_json())
    del raw["agreements"]
    with pytest.raises(msgspec.ValidationError, match="agreements"):
        records_file.decode(msgspec.json.encode(raw))
