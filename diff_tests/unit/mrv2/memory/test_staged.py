"""Staged writes: what lands where, in which order, at what cost, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrv2.errors import CapacityError, ConfigError
from mrv2.memory import staged
from mrv2.memory.staged import StagedWriteTensor
from mrv2.memory.transfers import Transfers, queue_copy

SENTINEL = -77
NUM_ROWS, NUM_COLUMNS = 5, 9


class Counter:
    """Counts what is queued: copies by `copy`, kernels by taking the place of the op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_copies = 0
        self.num_kernels = 0
        self._op = staged.staged_write
        monkeypatch.setattr(staged, "staged_write", self._kernel)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        queue_copy(destination, source)

    def _kernel(self, *args: Any) -> None:
        self.num_kernels += 1
        self._op(*args)


def made(
    dtype: torch.dtype = torch.int32, size: tuple[int, ...] = (NUM_ROWS, NUM_COLUMNS)
) -> StagedWriteTensor:
    tensor = StagedWriteTensor(size, dtype, "cpu")
    tensor.tensor.fill_(SENTINEL)
    return tensor


def test_the_example_of_the_design() -> None:
    state = StagedWriteTensor(size=(1024, 1000), dtype=torch.int32, device="cpu")

    # Write [3, 1, 2] into row 2, starting at index 3
    state.stage_write(row=2, start=3, value=[3, 1, 2])

    # Write [-1, -2, -5] into row 0, starting at index 1
    state.stage_write(row=0, start=1, value=[-1, -2, -5])

    # Apply staged changes
    state.apply_write()

    expected = torch.zeros(1024, 1000, dtype=torch.int32)
    expected[2, 3:6] = torch.tensor([3, 1, 2])
    expected[0, 1:4] = torch.tensor([-1, -2, -5])
    assert torch.equal(state.tensor, expected)


WRITES = st.lists(
    st.tuples(
        st.integers(0, NUM_ROWS - 1),
        st.integers(0, NUM_COLUMNS).flatmap(
            lambda start: st.tuples(
                st.just(start),
                st.lists(st.integers(-(2**31), 2**31 - 1), max_size=NUM_COLUMNS - start),
            )
        ),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WRITES, min_size=1, max_size=3))
def test_any_writes_act_in_the_order_in_which_they_were_staged(
    batches: list[list[tuple[int, tuple[int, list[int]]]]],
) -> None:
    tensor = made()
    expected = np.full((NUM_ROWS, NUM_COLUMNS), SENTINEL, dtype=np.int32)
    for writes in batches:
        for row, (start, value) in writes:
            tensor.stage_write(row, start, value)
            expected[row, start : start + len(value)] = value
        tensor.apply_write()
        assert tensor.num_staged == 0
        assert np.array_equal(tensor.tensor.numpy(), expected)


INTERVALS = [(start, end) for start in range(5) for end in range(start + 1, 6)]


@pytest.mark.parametrize("first", INTERVALS)
def test_two_writes_to_a_row_in_every_arrangement(first: tuple[int, int]) -> None:
    for second in INTERVALS:
        for third in ((0, 5), (1, 2), (2, 4)):
            tensor, expected = made(), [SENTINEL] * NUM_COLUMNS
            for number, (start, end) in enumerate((first, second, third)):
                value = [10 * number + column for column in range(start, end)]
                tensor.stage_write(3, start, value)
                expected[start:end] = value
            tensor.apply_write()
            assert tensor.tensor[3].tolist() == expected, (first, second, third)


@given(WRITES)
@settings(max_examples=200, deadline=None)
def test_the_kernel_is_given_writes_that_do_not_meet(
    writes: list[tuple[int, tuple[int, list[int]]]],
) -> None:
    # It runs them all at once, so which of two that meet came last would be chance.
    seen: list[Tensor] = []
    tensor = StagedWriteTensor(
        (NUM_ROWS, NUM_COLUMNS), torch.int32, "cpu", _watched(lambda source: seen.append(source))
    )
    for row, (start, value) in writes:
        tensor.stage_write(row, start, value)
    num_staged = tensor.num_staged
    tensor.apply_write()
    assert len(seen) == bool(num_staged)
    if not seen:
        return
    header_words = int(seen[0][3])  # the first write's values begin behind the headers
    cells = [
        (row, column)
        for row, start, length, _ in seen[0][:header_words].view(-1, 4).tolist()
        for column in range(start, start + length)
    ]
    assert len(cells) == len(set(cells))
    assert len(seen[0]) == header_words + len(cells)


def test_many_writes_cost_one_copy_and_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    tensor = StagedWriteTensor(
        (64, 8), torch.int32, "cpu", Transfers(torch.device("cpu"), counter.copy)
    )
    for row in range(64):
        tensor.stage_write(row, row % 4, range(row % 5))
        tensor.stage_write(row, row % 3, [row])
    tensor.apply_write()
    assert (counter.num_copies, counter.num_kernels) == (1, 1)
    assert tensor.tensor[7, :4].tolist() == [0, 7, 0, 0]


def test_nothing_staged_queues_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    tensor = StagedWriteTensor(
        (4, 4), torch.int32, "cpu", Transfers(torch.device("cpu"), counter.copy)
    )
    tensor.apply_write()
    tensor.stage_write(1, 4, [])
    assert tensor.num_staged == 0
    tensor.apply_write()
    tensor.stage_write(1, 1, [5])
    tensor.apply_write()
    tensor.apply_write()
    assert (counter.num_copies, counter.num_kernels) == (1, 1)


@pytest.mark.parametrize(
    ("row", "start", "length", "message"),
    [
        (5, 0, 1, "row 5 is outside the 5 rows"),
        (-1, 0, 1, "row -1 is outside the 5 rows"),
        (2, 0, 10, r"columns 0\.\.10 of row 2 are outside the 9 columns"),
        (2, 9, 1, r"columns 9\.\.10 of row 2 are outside the 9 columns"),
        (2, -1, 1, r"columns -1\.\.0 of row 2 are outside the 9 columns"),
    ],
)
def test_a_write_outside_is_refused_and_nothing_of_it_is_staged(
    row: int, start: int, length: int, message: str
) -> None:
    tensor = made()
    tensor.stage_write(0, 0, [1])
    with pytest.raises(CapacityError, match=message):
        tensor.stage_write(row, start, [7] * length)
    assert tensor.num_staged == 1
    tensor.apply_write()
    assert tensor.tensor.flatten().tolist() == [1] + [SENTINEL] * (NUM_ROWS * NUM_COLUMNS - 1)


def test_the_edges_are_inside() -> None:
    tensor = made()
    tensor.stage_write(4, 8, [1])
    tensor.stage_write(0, 0, range(9))
    tensor.apply_write()
    assert tensor.tensor[4, 8] == 1
    assert tensor.tensor[0].tolist() == list(range(9))


def test_values_are_copied_when_they_are_staged() -> None:
    tensor = made()
    values, array = [1, 2, 3], np.array([4, 5], dtype=np.int32)
    tensor.stage_write(0, 0, values)
    tensor.stage_write(1, 0, array)
    tensor.stage_write(2, 0, array[::-1])
    values[:], array[:] = [9, 9, 9], 9
    tensor.apply_write()
    assert tensor.tensor[0, :3].tolist() == [1, 2, 3]
    assert tensor.tensor[1, :2].tolist() == [4, 5]
    assert tensor.tensor[2, :2].tolist() == [5, 4]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [0.1, float("-inf"), -0.0, 3e38]),
        (torch.int64, [2**62 + 1, -(2**63), -1, 0]),
        (torch.float64, [0.1, float("inf"), -1e-300, 2.0]),
        (torch.int32, [2**31 - 1, -(2**31), -1, 0]),
    ],
)
def test_words_of_four_and_eight_bytes_keep_every_bit(
    dtype: torch.dtype, values: list[float]
) -> None:
    tensor = made(dtype)
    tensor.stage_write(4, 2, values)
    tensor.stage_write(1, 0, values[:1])
    tensor.apply_write()
    expected = torch.full((NUM_ROWS, NUM_COLUMNS), SENTINEL, dtype=dtype)
    expected[4, 2:6] = torch.tensor(values, dtype=dtype)
    expected[1, 0] = expected[4, 2]
    integers = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(tensor.tensor.view(integers), expected.view(integers))


def test_one_value_a_row() -> None:
    tensor = made(size=(NUM_ROWS,))
    for value in (1, 2, 3):
        tensor.stage_write(3, 0, [value])
    tensor.stage_write(0, 0, (9,))
    tensor.apply_write()
    assert tensor.tensor.tolist() == [9, SENTINEL, SENTINEL, 3, SENTINEL]
    with pytest.raises(CapacityError, match=r"columns 0\.\.2 of row 0 are outside the 1 columns"):
        tensor.stage_write(0, 0, [1, 2])


@pytest.mark.parametrize(
    ("size", "dtype", "message"),
    [
        ((4, 4), torch.int16, "int16, of 2 bytes"),
        ((4, 4), torch.bool, "bool, of 1 bytes"),
        ((4, 4, 4), torch.int32, "one or two axes"),
        ((), torch.int32, "one or two axes"),
    ],
)
def test_a_tensor_that_cannot_be_staged_is_refused(
    size: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StagedWriteTensor(size, dtype, "cpu")


@pytest.mark.gpu
def test_the_example_of_the_design_on_a_gpu() -> None:
    state = StagedWriteTensor(size=(1024, 1000), dtype=torch.int32, device="cuda")
    state.stage_write(row=2, start=3, value=[3, 1, 2])
    state.stage_write(row=0, start=1, value=[-1, -2, -5])
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.apply_write()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = torch.zeros(1024, 1000, dtype=torch.int32)
    expected[2, 3:6] = torch.tensor([3, 1, 2])
    expected[0, 1:4] = torch.tensor([-1, -2, -5])
    assert torch.equal(state.tensor.cpu(), expected)


def _watched(watch: Any) -> Transfers:
    def copy(destination: Tensor, source: Tensor) -> None:
        watch(source)
        queue_copy(destination, source)

    return Transfers(torch.device("cpu"), copy)
