"""Each parameter of a request has its row in the core, in the adapter and in the harness."""

from dataclasses import fields
from typing import Any

import pytest

from mrv2 import Sampling
from mrv2_compat.vllm_v1.requests import parameters as adapter
from mrv2_compat.vllm_v1.requests import refusals
from mrv2_diff import right_values
from mrv2_diff.catalog.sampling_pairs import FACTORS
from mrv2_diff.parameters import PARAMETERS, row_name
from mrv2_diff.traces import events, saying

NAMES = [row.name for row in PARAMETERS]
ASKED = [row for row in adapter.PARAMETERS if row.served and row.ours and not row.is_plain]
"""Rows that ask for something alone, and become part of `Sampling`."""
RECORDED_OTHERWISE = {"structured_outputs"}
"""Of a grammar a trace has the masks."""


def test_every_served_parameter_has_a_row_in_the_harness_and_no_other_has() -> None:
    assert sorted(map(row_name, adapter.PARAMETERS)) == sorted(NAMES)
    attributes = {row.attribute for row in PARAMETERS} - {None}
    assert {*NAMES, *attributes} >= refusals.SERVED_BY_RUNNER


def test_every_field_of_sampling_is_one_row_of_the_adapter() -> None:
    reached = [row.ours for row in adapter.PARAMETERS if row.ours is not None]
    assert sorted(reached) == sorted(each.name for each in fields(Sampling))


@pytest.mark.parametrize("row", ASKED, ids=lambda row: row.theirs)
def test_what_asks_for_nothing_is_the_cores_default(row: adapter.Parameter) -> None:
    assert row.neutral
    for value in row.neutral:
        ours = value if row.convert is None else row.convert(value, None, 97)
        assert ours == getattr(Sampling(), str(row.ours))


@pytest.mark.vllm
@pytest.mark.parametrize("row", ASKED, ids=lambda row: row.theirs)
def test_what_vllm_has_by_default_asks_for_nothing(row: adapter.Parameter) -> None:
    from vllm import SamplingParams

    assert getattr(SamplingParams(), row.theirs) in row.neutral
    assert adapter.shaping(SamplingParams()) in adapter.SHAPES_NOTHING


class Asks:
    """vLLM's parameters of a request that asks for nothing, but for one of them."""

    def __init__(self, name: str, value: Any) -> None:
        for row in ASKED:
            setattr(self, row.theirs, row.neutral[0])
        setattr(self, name, value)


@pytest.mark.parametrize("row", ASKED, ids=lambda row: row.theirs)
def test_no_parameter_is_lost_where_a_request_asks_for_nothing_else(row: adapter.Parameter) -> None:
    assert adapter.shaping(Asks(row.theirs, row.neutral[0])) in adapter.SHAPES_NOTHING
    assert adapter.shaping(Asks(row.theirs, object())) not in adapter.SHAPES_NOTHING


@pytest.mark.vllm
def test_the_pairs_begin_with_what_vllm_has_by_default() -> None:
    from vllm import SamplingParams

    default = SamplingParams()
    assert {row.name for row in PARAMETERS if row.group} <= set(FACTORS)
    for name, (neutral, *_) in FACTORS.items():
        assert neutral == getattr(default, name) or not (neutral or getattr(default, name))


def test_every_parameter_has_a_place_in_a_trace_or_is_named_as_having_none() -> None:
    recorded = {*events.Params.__struct_fields__, *saying.UNRECORDED_OF_PARAMETERS}
    for row in PARAMETERS:
        name = (row.attribute or row.name).strip("_")
        assert name in recorded | RECORDED_OTHERWISE, row.name


def test_the_page_of_right_values_knows_every_parameter_that_changes_logits() -> None:
    known = {each.name for each in fields(right_values.Parameters)}
    assert known <= set(NAMES)
    changing = {row.name for row in PARAMETERS if row.group and row.acts_alone}
    assert changing <= known
