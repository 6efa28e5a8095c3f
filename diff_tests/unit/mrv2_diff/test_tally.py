"""What counts as a difference of one kind of value, and which difference is named."""

import numpy as np
import numpy.typing as npt
import pytest

from mrv2_diff.compare.tally import Place, Tally

PLACE = Place("forced", 3)
BOUND = 4.0
OWNERS = ["a", "b"]


@pytest.fixture
def tally() -> Tally:
    return Tally({"logits": BOUND})


def _close(
    tally: Tally,
    reference: list[list[float]],
    candidate: list[list[float]],
    scale: tuple[float, ...] = (1.0, 1.0),
) -> None:
    rows = len(reference)
    tally.close(
        "logits",
        PLACE,
        OWNERS[:rows],
        np.array(reference, dtype=np.float64),
        np.array(candidate, dtype=np.float64),
        np.array(scale[:rows]),
    )


def _spacings(count: float, at: float = 1.0) -> float:
    return count * float(np.spacing(np.float32(at)))


# Integers.


def test_equal_integers_are_counted(tally: Tally) -> None:
    tally.exact("slots", PLACE, OWNERS, np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]))
    tally.exact("slots", PLACE, OWNERS, np.array([5, 6]), np.array([5, 6]))
    total = tally.totals["slots"]
    assert (total.compared, total.differing, total.required) == (6, 0, 0.0)
    assert tally.first is None


def test_a_differing_integer_is_named_by_its_place_within_its_request(tally: Tally) -> None:
    owners = ["a", "b", "b", "b"]
    tally.exact("positions", PLACE, owners, np.array([7, 0, 1, 2]), np.array([7, 0, 5, 9]))
    total = tally.totals["positions"]
    assert (total.compared, total.differing, total.max_abs_diff) == (4, 2, 7.0)
    first = tally.first
    assert first is not None
    assert (first.mode, first.step, first.value) == ("forced", 3, "positions")
    assert (first.req_id, first.index) == ("b", 1)
    assert (first.reference, first.candidate, first.policy) == ("1", "5", "exact")


def test_the_first_difference_stays_the_first(tally: Tally) -> None:
    tally.exact("slots", PLACE, OWNERS, np.array([1, 2]), np.array([1, 3]))
    tally.exact("input_ids", Place("free", 9), OWNERS, np.array([1, 2]), np.array([0, 2]))
    _close(tally, [[1.0]], [[2.0]])
    tally.structure("ledger", PLACE, 1, ["gone"])
    tally.missing(PLACE, "a step")
    assert tally.first is not None
    assert (tally.first.value, tally.first.step) == ("slots", 3)
    differing = {value: total.differing for value, total in tally.totals.items()}
    assert differing == {"slots": 1, "input_ids": 1, "logits": 1, "ledger": 1, "output": 1}


# Floats.


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_difference_up_to_the_bound_is_allowed_and_measured(tally: Tally, sign: float) -> None:
    _close(tally, [[1.0, 0.5]], [[1.0, 0.5 + sign * _spacings(BOUND)]])
    assert tally.first is None
    assert tally.totals["logits"].required == BOUND
    assert tally.step_logit_diff == BOUND
    assert tally.totals["logits"].differing == 0


def test_a_difference_above_the_bound_is_named(tally: Tally) -> None:
    _close(tally, [[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0 + _spacings(BOUND + 1)]])
    assert tally.first is not None
    assert (tally.first.req_id, tally.first.index, tally.first.value) == ("b", 1, "logits")
    assert "at most 4 spacings" in tally.first.policy
    assert tally.totals["logits"].differing == 1
    assert tally.totals["logits"].required == BOUND + 1


def test_a_spacing_is_that_of_the_rows_own_scale(tally: Tally) -> None:
    apart = _spacings(BOUND, at=1024.0)
    _close(tally, [[1024.0], [1.0]], [[1024.0 + apart], [1.0]], scale=(1024.0, 1.0))
    assert tally.first is None
    _close(tally, [[1024.0], [1.0]], [[1024.0], [1.0 + apart]], scale=(1024.0, 1.0))
    assert tally.first is not None
    assert tally.first.req_id == "b"


def test_without_bounds_differences_are_measured_alone() -> None:
    tally = Tally(None)
    _close(tally, [[1.0]], [[1.0 + _spacings(1000)]])
    _close(tally, [[1.0]], [[1.0]])
    assert tally.first is None
    assert tally.totals["logits"].required == 1000
    assert tally.totals["logits"].agreement().policy == "measured only"
    assert tally.step_logit_diff == 0.0, "of the last step"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (float("nan"), 1.0),
        (float("inf"), 1.0),
        (float("-inf"), 1.0),
        (float("inf"), float("-inf")),
        (float("nan"), float("inf")),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_not_finite_on_one_side_differs_without_end(
    tally: Tally, one: float, other: float, swapped: bool
) -> None:
    sides = ([[1.0, other]], [[1.0, one]]) if swapped else ([[1.0, one]], [[1.0, other]])
    _close(tally, *sides)
    assert tally.first is not None
    assert tally.first.index == 1
    assert tally.totals["logits"].required == float("inf")
    measuring = Tally(None)
    _close(measuring, *sides)
    assert measuring.totals["logits"].required == float("inf")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_same_on_both_sides_does_not_differ(tally: Tally, value: float) -> None:
    _close(tally, [[1.0, value]], [[1.0, value]])
    assert tally.first is None
    assert tally.totals["logits"].required == 0.0


# Shapes, structures and what is missing.


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [(np.zeros((2, 3)), np.zeros((2, 4))), (np.zeros((2, 3)), np.zeros((1, 3))),
     (np.zeros((2, 3)), np.zeros((0, 3)))],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["exact", "close"])
def test_another_shape_differs_as_a_whole(
    tally: Tally,
    kind: str,
    reference: npt.NDArray[np.float64],
    candidate: npt.NDArray[np.float64],
) -> None:
    if kind == "exact":
        tally.exact("slots", PLACE, OWNERS, reference, candidate)
    else:
        tally.close("logits", PLACE, OWNERS, reference, candidate, np.ones(2))
    first = tally.first
    assert first is not None
    assert first.policy == "same shape"
    assert first.reference == f"shape {reference.shape}"
    assert first.candidate == f"shape {candidate.shape}"
    assert tally.totals[first.value].differing == max(reference.size, candidate.size)


def test_a_structure_is_counted_and_its_first_difference_told(tally: Tally) -> None:
    tally.structure("output", PLACE, 4, [])
    assert tally.first is None
    tally.structure("output", PLACE, 4, ["one", "two"])
    assert tally.first is not None
    assert tally.first.candidate == "one"
    assert (tally.totals["output"].compared, tally.totals["output"].differing) == (8, 2)


def test_what_one_side_lacks_is_named_as_such(tally: Tally) -> None:
    tally.missing(PLACE, "only V1 ran this step")
    assert tally.first is not None
    assert (tally.first.policy, tally.first.candidate) == ("present", "only V1 ran this step")
    assert tally.totals["output"].compared == 0


# What is kept around a divergence.


def test_the_values_around_a_divergence_are_those_of_its_request(tally: Tally) -> None:
    owners = ["a", *["b"] * 8]
    reference = np.array([9, 0, 1, 2, 3, 4, 5, 6, 7])
    tally.exact("positions", PLACE, owners, reference, reference + np.eye(9, dtype=int)[2])
    first = tally.first
    assert first is not None
    assert [near.index for near in first.around] == [0, 1, 2, 3, 4]
    assert [near.reference for near in first.around] == ["0", "1", "2", "3", "4"]
    assert [near.candidate for near in first.around] == ["0", "2", "2", "3", "4"]
    assert first.around_lines(("v1", "mrv2")) == [
        "at  v1  mrv2",
        " 0   0     0",
        " 1   1     2  <",
        " 2   2     2",
        " 3   3     3",
        " 4   4     4",
    ]


def test_the_values_around_a_logit_are_those_of_its_row(tally: Tally) -> None:
    row = [float(value) for value in range(12)]
    changed = [*row[:10], 99.0, row[11]]
    _close(tally, [row, row], [row, changed])
    first = tally.first
    assert first is not None
    assert [near.index for near in first.around] == [7, 8, 9, 10, 11]
    assert first.around[3].candidate == "99.0"
