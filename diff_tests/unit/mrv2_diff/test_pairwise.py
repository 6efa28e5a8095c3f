"""Every pair of values occurs, in few rows, the same at every call."""

from itertools import product

import pytest

from mrv2_diff.case import Add, Case
from mrv2_diff.catalog import sampling_pairs
from mrv2_diff.pairwise import all_pairs, uncovered


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2, 2), (4, 3, 3, 2, 1), (4, *[3] * 10)])
def test_every_pair_occurs(sizes: tuple[int, ...]) -> None:
    factors = {f"factor-{number}": range(size) for number, size in enumerate(sizes)}
    rows = all_pairs(factors)
    for first, second in product(factors, factors):
        if first != second:
            found = {(row[first], row[second]) for row in rows}
            assert found == set(product(factors[first], factors[second]))
    assert len(rows) <= 2 * sorted(sizes)[-1] * sorted(sizes)[-2]
    assert rows == all_pairs(factors)
    assert uncovered(factors, rows) == []


def test_a_pair_that_is_missing_is_named() -> None:
    factors = {"a": ("x", "y"), "b": (None, 1)}
    rows = [row for row in all_pairs(factors) if row != {"a": "y", "b": 1}]
    assert uncovered(factors, rows) == [(("a", 1), ("b", 1))]


@pytest.mark.parametrize("case", sampling_pairs.CASES, ids=lambda case: case.id)
def test_every_pair_of_parameters_is_in_some_request(case: Case) -> None:
    left_out = {"thinking_token_budget"} if case.id == "sampling.pairs_strained" else set()
    factors = {
        name: values for name, values in sampling_pairs.FACTORS.items() if name not in left_out
    }
    asked = [event for event in case.workload() if isinstance(event, Add)]
    rows = [
        {"temperature": add.temperature, "logprobs": add.logprobs, **dict(add.options)}
        for add in asked
    ]
    for row in rows:
        for name in factors.keys() - row.keys():
            row[name] = next(value for value in factors[name] if value in ((), None))
    assert uncovered(factors, rows) == []
