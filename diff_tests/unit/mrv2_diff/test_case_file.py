"""Cases as files: what is written is read back, and a file that is no case is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff import case_file
from mrv2_diff.case import Add, Budget, Case, EngineSpec
from mrv2_diff.case_file import CaseFile, Found
from mrv2_diff.catalog import CASES
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.verdict import Verdict

DEPARTURE = {"value": "logprobs", "verdict": "MATCH", "why": "", "on": [], "elsewhere": ""}
LOCKSTEP = {name: case for name, case in CASES.items() if case.apart is None}


@pytest.mark.parametrize("case_id", LOCKSTEP)
def test_a_case_is_read_back(tmp_path: Path, case_id: str) -> None:
    case = replace(LOCKSTEP[case_id], fault="stale-row")
    found = Found(verdict=Verdict.WRONG_VALUE, value="slots", summary="it is wrong")
    file = tmp_path / "new" / "case.json"
    case_file.write(CaseFile(case=case, pair=("v1", "mrv2"), found=found), file)
    read = case_file.read(file)
    assert read.case.workload() == case.workload()
    same = replace(read.case, workload=case.workload, file=None, expects=case.expects)
    assert replace(same, remark=case.remark) == case
    assert (read.pair, read.found, read.case.file) == (("v1", "mrv2"), found, "case.json")


def test_a_budget_is_read_back(tmp_path: Path) -> None:
    case = replace(LOCKSTEP["lifecycle.greedy"], budget=Budget(memory=1.5, latency=0.9))
    case_file.write(CaseFile(case=case, pair=("v1", "mrv2")), tmp_path / "case.json")
    assert case_file.read(tmp_path / "case.json").case.budget == case.budget


def test_a_case_that_runs_apart_has_no_file(tmp_path: Path) -> None:
    apart = next(case for case in CASES.values() if case.apart is not None)
    with pytest.raises(ValueError, match="only lockstep"):
        case_file.write(CaseFile(case=apart, pair=("v1", "mrv2")), tmp_path / "case.json")


def test_infinities_are_read_back(tmp_path: Path) -> None:
    options = (("logit_bias", ((3, float("inf")), (4, -float("inf")))),)
    add = Add(step=0, req_id="a", prompt=(1,), max_tokens=1, options=options)
    _write(tmp_path, add)
    (read,) = case_file.read(tmp_path / "case.json").case.workload()
    assert read == add


def _write(folder: Path, *events: Add) -> dict[str, Any]:
    case = Case(id="a.b", area="a", feature="f", title="t", engine=EngineSpec(model=ModelSpec()),
                workload=lambda: events)  # fmt: skip
    case_file.write(CaseFile(case=case, pair=("v1", "mrv2")), folder / "case.json")
    raw: dict[str, Any] = json.loads((folder / "case.json").read_text())
    return raw


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.update(format=2), "format 2; this version reads 1"),
        (lambda raw: raw.pop("format"), "format"),
        (lambda raw: raw.update(pair=["v1"]), "pair"),
        (lambda raw: raw.update(more=1), "more"),
        (lambda raw: raw["case"].update(id="../../x"), "is not made of letters"),
        (lambda raw: raw["case"].update(id=3), "id is 3"),
        (lambda raw: raw["case"].update(fault=3), "fault 3"),
        (lambda raw: raw["case"].update(more=1), "unknown: more"),
        (lambda raw: raw["case"].update(budget={"memory": 0}), "a budget is not above 0"),
        (lambda raw: raw["case"].update(budget={"time": 1}), "budget has what it cannot have"),
        (lambda raw: raw["case"].update(engine={"model": {"layers": -1}}), "layers is -1"),
        (lambda raw: raw["case"].update(engine={"model": {}, "blocks": 3}), "blocks"),
        (lambda raw: raw["case"].update(events=[]), "no request is added"),
        (lambda raw: raw["case"]["events"][0].update(do="sing"), "add or abort"),
        (lambda raw: raw["case"]["events"][0].update(prompt=[]), "no prompt"),
        (lambda raw: raw["case"]["events"][0].update(prompt=[-1]), "below 0"),
        (lambda raw: raw["case"]["events"][0].update(step=-1), "steps begin with 0"),
        (lambda raw: raw["case"]["events"][0].update(step=9), "order of their steps"),
        (lambda raw: raw["case"]["events"][0].update(top_k=3), "top_k"),
        (lambda raw: raw["case"]["events"][0].update(max_tokens=0), "less than one token"),
        (lambda raw: raw["case"]["events"][0].update(max_tokens="many"), "max_tokens"),
        (lambda raw: raw["case"]["events"][0].update(options=[["a", {"b": 1}]]), "as pairs"),
        (lambda raw: raw["case"].update(departure={"value": "logits"}), "logits"),
        (lambda raw: raw["case"].update(departure=DEPARTURE), "verdict cannot be MATCH"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Damage, message: str) -> None:
    adds = [Add(step=0, req_id=name, prompt=(1,), max_tokens=1) for name in "ab"]
    raw = _write(tmp_path, *adds)
    damage(raw)
    (tmp_path / "case.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        case_file.read(tmp_path / "case.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "case.json").write_bytes(content)
    with pytest.raises(ValueError, match="holds no case"):
        case_file.read(tmp_path / "case.json")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    with file.open("wb") as sparse:
        sparse.truncate(case_file.MAX_BYTES + 1)
    with pytest.raises(ValueError, match="more than"):
        case_file.read(file)
