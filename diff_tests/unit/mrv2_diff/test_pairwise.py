"""Every pair of values occurs, in few rows, the same at every call."""

from itertools import product

import pytest

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
