"""The measurement of the host's part by batch size: what it counts, and what it draws."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from mrv2.ops.twin import TwinOp
from mrv2_diff.host_cost import HostCost, growth, host_cost, picture, table

COSTS = [
    HostCost(
        num_reqs=num_reqs,
        steady_us=steady,
        churn_us=2 * steady,
        translated_us=steady + 10,
        translated_churn_us=3 * steady,
        output_us=5.0,
    )
    for num_reqs, steady in ((1, 50.0), (64, 60.0), (1024, 90.0))
]


@pytest.mark.vllm
def test_a_cost_is_measured_and_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*args: object) -> None:
        raise AssertionError("an op was computed")

    monkeypatch.setattr(torch, "argmax", computed)
    call = TwinOp.__call__
    cost = host_cost(num_reqs=3, num_steps=20)
    assert cost.num_reqs == 3
    assert 0 < cost.output_us < cost.steady_us < cost.churn_us
    assert cost.translated_us < cost.translated_churn_us
    assert TwinOp.__call__ is call


def test_growth_is_that_of_the_largest_batch_over_64() -> None:
    assert growth(COSTS) == (90 / 60, 100 / 70)


def test_the_table_and_the_picture_have_every_batch() -> None:
    assert table(COSTS).splitlines()[3].split() == ["64", "60", "120", "70", "180", "5"]
    drawing = ElementTree.fromstring(picture(COSTS))
    curves = [element for element in drawing if element.tag.endswith("polyline")]
    assert [len(curve.attrib["points"].split()) for curve in curves] == [3] * 5
