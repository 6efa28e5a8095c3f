"""The comparison of an op's halves finds every kind of fault that a kernel can have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mrv2_diff.samples.check import (
    changed_arguments,
    differences,
    run_guarded,
    written_outside,
)
from mrv2_diff.samples.sample import (
    SENTINEL,
    Bound,
    prefix_sums,
    scattered_rows,
    sentinels,
    sizes_around,
    strided,
)

CPU = torch.device("cpu")


def arguments() -> dict[str, Any]:
    return {
        "out": strided(sentinels(3, 4, dtype=torch.float32), gap=2),
        "values": torch.arange(12.0).view(3, 4),
        "scale": 2,
    }


def correct(out: Tensor, values: Tensor, scale: int) -> None:
    out.copy_(values * scale)


def memory_of(tensor: Tensor) -> Tensor:
    """All of the allocation, guards and gaps, as one row."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)


def one_past_the_end(out: Tensor, values: Tensor, scale: int) -> None:
    correct(out, values, scale)
    memory_of(out)[out.storage_offset() + 2 * out.stride(0) + 4] = 0


def one_before_the_start(out: Tensor, values: Tensor, scale: int) -> None:
    correct(out, values, scale)
    memory_of(out)[out.storage_offset() - 1] = 0


def into_the_gap(out: Tensor, values: Tensor, scale: int) -> None:
    correct(out, values, scale)
    memory_of(out)[out.storage_offset() + 4] = 0


def into_an_input(out: Tensor, values: Tensor, scale: int) -> None:
    correct(out, values, scale)
    values[1, 1] = 0


def wrong_value(out: Tensor, values: Tensor, scale: int) -> None:
    correct(out, values, scale)
    out[2, 3] += 0.5


def not_a_number(out: Tensor, values: Tensor, scale: int) -> None:
    correct(out, values, scale)
    out[0, 0] = float("nan")


def nothing_at_all(out: Tensor, values: Tensor, scale: int) -> None:
    pass


def faults(candidate: Callable[..., object], bounds: dict[str, Bound] | None = None) -> list[str]:
    expected = run_guarded(correct, arguments(), CPU)
    actual = run_guarded(candidate, arguments(), CPU)
    return [str(found) for found in differences(expected, actual, bounds or {})]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (one_past_the_end, "out: wrote outside, at element 16"),
        (one_before_the_start, "out: wrote outside, at element -1"),
        (into_the_gap, "out: wrote outside, at element 4"),
        (into_an_input, "values: 1 of 12 values differ, the first at [1, 1]: 0.0"),
        (wrong_value, "out: 1 of 12 values differ, the first at [2, 3]: 22.5"),
        (not_a_number, "out: 1 of 12 values differ, the first at [0, 0]: nan"),
        (nothing_at_all, f"out: 12 of 12 values differ, the first at [0, 0]: {SENTINEL}.0"),
    ],
)
def test_every_fault_is_named(candidate: Callable[..., object], message: str) -> None:
    found = faults(candidate)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_no_fault_is_found_in_equal_halves() -> None:
    assert faults(correct) == []


@pytest.mark.parametrize(("atol", "passes"), [(0.51, True), (0.49, False)])
def test_a_bound_is_a_bound(atol: float, passes: bool) -> None:
    bound = Bound(atol=atol, rtol=0.0, reason="test")
    assert (faults(wrong_value, {"out": bound}) == []) is passes


def test_nan_equals_nan_with_and_without_a_bound() -> None:
    values = {"out": torch.full((2,), float("nan"))}
    both = run_guarded(lambda out: None, values, CPU), run_guarded(lambda out: None, values, CPU)
    bound = Bound(atol=1.0, rtol=0.0, reason="test")
    assert differences(*both, {}) == []
    assert differences(*both, {"out": bound}) == []


@pytest.mark.parametrize(
    ("candidate", "changed"),
    [
        (correct, {"out"}),
        (into_an_input, {"out", "values"}),
        (nothing_at_all, set()),
        (into_the_gap, {"out"}),
    ],
)
def test_changed_arguments_are_all_named(
    candidate: Callable[..., object], changed: set[str]
) -> None:
    assert changed_arguments(arguments(), run_guarded(candidate, arguments(), CPU)) == changed


def test_writes_around_a_tensor_are_told_from_writes_into_it() -> None:
    assert not written_outside(arguments(), run_guarded(correct, arguments(), CPU))
    outside = written_outside(arguments(), run_guarded(into_the_gap, arguments(), CPU))
    assert [found.argument for found in outside] == ["out"]


def test_a_run_leaves_the_sample_as_it_was() -> None:
    given = arguments()
    run_guarded(into_an_input, given, CPU)
    assert torch.equal(given["values"], torch.arange(12.0).view(3, 4))


def test_strides_and_empty_tensors_survive_the_guard() -> None:
    given = {"out": strided(torch.ones(2, 3), gap=5), "empty": torch.empty(0, 4)}
    after = run_guarded(lambda *values: None, given, CPU)
    assert after["out"].view.stride() == (8, 1)
    assert after["empty"].view.shape == (0, 4)


def test_the_pieces_of_samples() -> None:
    assert sizes_around(256, 521) == (1, 255, 256, 257, 521)
    assert prefix_sums([2, 0, 3]).tolist() == [0, 2, 2, 5]
    rows = scattered_rows(5, 9, torch.Generator().manual_seed(0)).tolist()
    assert len(set(rows)) == 5
    assert 8 in rows
    assert rows != sorted(rows)
