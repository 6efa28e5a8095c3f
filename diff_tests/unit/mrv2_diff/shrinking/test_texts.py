"""A short case as a script and as a test that makes the same case."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff import case, verdict
from mrv2_diff.case import Abort, Add, Case, EngineSpec
from mrv2_diff.catalog import CASES
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.shrinking.texts import pytest_module, script, source

NAMES: dict[str, Any] = vars(case) | vars(verdict) | {"ModelSpec": ModelSpec}


@pytest.mark.parametrize("case_id", CASES)
def test_source_makes_the_same_values(case_id: str) -> None:
    whole = CASES[case_id]
    for value in (whole.engine, whole.departure, *whole.workload()):
        assert eval(source(value), NAMES) == value


def test_source_has_infinities() -> None:
    assert eval(source((float("inf"), -float("inf")))) == (float("inf"), -float("inf"))


def _short() -> Case:
    events = (
        Add(step=0, req_id="a", prompt=(1, 2, 3, 4), max_tokens=2),
        Abort(step=1, req_id="a"),
        Add(step=1, req_id="b", prompt=tuple(range(50, 90)), max_tokens=1, temperature=0.5,
            seed=3, options=(("top_k", 4),)),
    )  # fmt: skip
    return Case(
        id="area.one.short",
        area="area",
        feature="one",
        title="A title",
        engine=EngineSpec(model=ModelSpec(layers=3), num_blocks=17),
        workload=lambda: events,
        fault="stale-row",
    )


def test_a_script_has_a_line_for_each_event() -> None:
    lines = script(_short(), ("v1", "mrv2"), "WRONG_VALUE: slots").splitlines()
    assert lines[1] == "# v1 and mrv2; engine: model ModelSpec(layers=3), num_blocks 17"
    assert lines[2] == "# with the planted fault stale-row"
    assert lines[3] == "step 0   add   a: prompt 1..4, max_tokens 2, greedy"
    assert lines[4] == "step 1   abort a"
    assert lines[5].endswith("and 16 more, max_tokens 1, temperature 0.5, seed 3, top_k 4")
    assert lines[6] == "=> WRONG_VALUE: slots"


@pytest.mark.parametrize("departs", [False, True])
def test_a_module_for_pytest_makes_the_same_case(tmp_path: Path, departs: bool) -> None:
    departure = next(one.departure for one in CASES.values() if one.departure is not None)
    whole = replace(_short(), departure=departure if departs else None)
    file = tmp_path / "made.py"
    text = pytest_module(whole, ("v1", "mrv2"), 'it is "wrong"')
    start, _, rest = text.partition("from mrv2_diff.run import")  # which imports vLLM
    file.write_text(start + "# " + rest)
    made = runpy.run_path(str(file))
    assert made["EVENTS"] == whole.workload()
    assert replace(made["CASE"], workload=whole.workload) == whole
    assert "def test_area_one_short() -> None:" in text
