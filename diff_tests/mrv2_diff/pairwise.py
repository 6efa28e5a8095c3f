"""Rows that hold every pair of values of any two factors: a covering array of strength two.

Two features of a sampler that are right alone may be wrong together. All combinations of a dozen
parameters are too many to run; all pairs fit into as few requests as one batch holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

Pair: TypeAlias = tuple[tuple[str, int], tuple[str, int]]
"""Two factors, each with the index of its value."""


def all_pairs(factors: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Return rows, one value for each factor, in which every pair of values occurs.

    Greedy: each row begins with a pair that is still missing, and takes factor by factor the value
    that adds most missing pairs, the first of equals. The same factors give the same rows.

    Args:
        factors: Values by name, at least one each.
    """
    missing = dict.fromkeys(_pairs(factors))
    rows = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name not in chosen:
                gains = [_gain(missing, chosen, name, index) for index in range(len(factors[name]))]
                chosen[name] = gains.index(max(gains))
        for pair in _pairs_of(factors, chosen):
            missing.pop(pair, None)
        rows.append({name: factors[name][chosen[name]] for name in factors})
    return rows


def uncovered(
    factors: Mapping[str, Sequence[object]], rows: Sequence[Mapping[str, object]]
) -> list[Pair]:
    """Return the pairs of values that occur in no row."""
    found = {
        pair
        for row in rows
        for pair in _pairs_of(
            factors, {name: list(factors[name]).index(row[name]) for name in factors}
        )
    }
    return [pair for pair in _pairs(factors) if pair not in found]


def _pairs(factors: Mapping[str, Sequence[object]]) -> Iterator[Pair]:
    for first, second in combinations(factors, 2):
        for index in range(len(factors[first])):
            for other in range(len(factors[second])):
                yield (first, index), (second, other)


def _pairs_of(factors: Mapping[str, Sequence[object]], chosen: Mapping[str, int]) -> Iterator[Pair]:
    for first, second in combinations(factors, 2):
        yield (first, chosen[first]), (second, chosen[second])


def _gain(missing: Mapping[Pair, None], chosen: Mapping[str, int], name: str, index: int) -> int:
    mine = (name, index)
    return sum(((other, mine) in missing) + ((mine, other) in missing) for other in chosen.items())
