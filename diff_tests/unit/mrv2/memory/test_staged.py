"""Staged writes: what lands where, in which order, at what cost, and what is refused."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrv2.errors import CapacityError, ConfigError
from mrv2.memory import arena
from mrv2.memory.arena import PIECE, Arena
from mrv2.memory.staged import StagedWriteTensor
from mrv2.memory.transfers import Transfers, queue_copy

SENTINEL = -77
NUM_ROWS, NUM_COLUMNS = 5, 9


class Counter:
    """Counts what is queued: copies by `copy`, kernels by taking the place of the op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_copies = 0
        self.num_kernels = 0
        self._op = arena.staged_write
        monkeypatch.setattr(arena, "staged_write", self._kernel)

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


def pieces_of(packed: Tensor, num_pieces: int) -> list[tuple[int, list[int]]]:
    """Return where each piece of a packed buffer starts, and its values."""
    headers = packed[: 4 * num_pieces].view(-1, 4).tolist()
    assert all(high == 0 and 0 < length <= PIECE for _, high, length, _ in headers)
    return [(low, packed[at : at + length].tolist()) for low, _, length, at in headers]


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
    seen: list[tuple[Tensor, int]] = []
    tensor = made()
    for row, (start, value) in writes:
        tensor.stage_write(row, start, value)
    num_staged = tensor.num_staged
    with patch.object(arena, "staged_write", lambda *arguments: seen.append(arguments[2:])):
        tensor.apply_write()
    assert len(seen) == bool(num_staged)
    if not seen:
        return
    cells = [
        cell for start, values in pieces_of(*seen[0]) for cell in range(start, start + len(values))
    ]
    assert len(cells) == len(set(cells))
    assert set(cells) == {
        row * NUM_COLUMNS + start + step
        for row, (start, value) in writes
        for step in range(len(value))
    }


def test_many_writes_cost_one_copy_and_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    tensor = StagedWriteTensor(
        (64, 8), torch.int32, "cpu", Arena(Transfers(torch.device("cpu"), counter.copy))
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
        (4, 4), torch.int32, "cpu", Arena(Transfers(torch.device("cpu"), counter.copy))
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 32_768])
def test_a_long_write_is_cut_into_pieces(
    dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, int]] = []
    op = arena.staged_write

    def watch(target: Tensor, mapped: Tensor, packed: Tensor, num_pieces: int) -> None:
        seen.append((packed, num_pieces))
        op(target, mapped, packed, num_pieces)

    monkeypatch.setattr(arena, "staged_write", watch)
    tensor = made(dtype, (3, length + 2))
    tensor.stage_write(2, 1, np.arange(length))
    tensor.stage_write(0, 0, [7])
    tensor.stage_write(2, 5, [-5, -6])
    tensor.apply_write()
    expected = np.arange(length)
    expected[4:6] = -5, -6
    assert tensor.tensor[2].tolist() == [SENTINEL, *expected.tolist(), SENTINEL]
    assert tensor.tensor[0].tolist() == [7] + [SENTINEL] * (length + 1)
    assert max(len(values) for _, values in pieces_of(*seen[0])) <= PIECE
    words = length * dtype.itemsize // 4
    assert seen[0][1] <= 3 + 2 + -(-words // PIECE)


def test_a_list_that_holds_no_word_is_refused_when_it_is_staged() -> None:
    tensor = made()
    with pytest.raises(OverflowError):
        tensor.stage_write(0, 0, [1, 2**31])
    assert tensor.num_staged == 0
    tensor.stage_write(0, 0, [5])
    tensor.apply_write()
    assert tensor.tensor[0, :2].tolist() == [5, SENTINEL]


# Several tensors in one arena.


def test_the_tensors_of_an_arena_are_written_by_one_copy_and_one_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Counter(monkeypatch)
    shared = Arena(Transfers(torch.device("cpu"), counter.copy))
    sizes = (((5, 9), torch.int32), ((7,), torch.float32), ((3, 3), torch.int64))
    tensors = [StagedWriteTensor(size, dtype, "cpu", shared) for size, dtype in sizes]
    addresses = [tensor.tensor.data_ptr() for tensor in tensors]
    assert all(address % 64 == 0 for address in addresses)
    for tensor in tensors:
        tensor.tensor.fill_(SENTINEL)
    tensors[2].stage_write(2, 1, [2**40, -1])
    tensors[0].stage_write(4, 8, [1])
    tensors[0].stage_write(0, 0, [2, 3])
    tensors[1].stage_write(6, 0, [0.5])
    assert shared.num_staged == 4
    tensors[0].apply_write()
    assert (counter.num_copies, counter.num_kernels) == (1, 1)
    assert shared.num_staged == 0
    assert tensors[0].tensor[0].tolist() == [2, 3] + [SENTINEL] * 7
    assert tensors[0].tensor[4].tolist() == [SENTINEL] * 8 + [1]
    assert tensors[1].tensor.tolist() == [SENTINEL] * 6 + [0.5]
    assert tensors[2].tensor.flatten().tolist() == [SENTINEL] * 7 + [2**40, -1]
    assert [tensor.tensor.data_ptr() for tensor in tensors] == addresses


def test_an_arena_takes_no_more_than_its_tensors_and_their_alignment() -> None:
    shared = Arena(Transfers(torch.device("cpu")))
    sizes = ((5, 9), (7,), (1,))
    tensors = [StagedWriteTensor(size, torch.int32, "cpu", shared) for size in sizes]
    storages = [tensor.tensor.untyped_storage() for tensor in tensors]
    assert storages[0].nbytes() == 4 * (48 + 16 + 16)
    assert len({storage.data_ptr() for storage in storages}) == 1
    with pytest.raises(ConfigError, match=r"\(2, 2\) is reserved after the 80 words"):
        StagedWriteTensor((2, 2), torch.int32, "cpu", shared)


def test_mapped_tensors_have_an_allocation_of_their_own_and_share_the_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = Counter(monkeypatch)
    shared = Arena(Transfers(torch.device("cpu"), counter.copy))
    tensors = [
        StagedWriteTensor(size, dtype, "cpu", shared, is_mapped=is_mapped)
        for size, dtype, is_mapped in (
            ((5, 9), torch.int32, True),
            ((5, 9), torch.int32, False),
            ((3, 3), torch.int64, True),
        )
    ]
    mapped, device, other = (tensor.tensor for tensor in tensors)
    assert mapped.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert mapped.untyped_storage().data_ptr() != device.untyped_storage().data_ptr()
    for row in range(5):
        tensors[0].stage_write(row, 0, [row] * 9)
        tensors[1].stage_write(row, 0, [-row] * 9)
    tensors[0].stage_write(3, 4, [70, 71])
    tensors[2].stage_write(2, 1, [2**40, -1])
    shared.flush()
    assert (counter.num_copies, counter.num_kernels) == (1, 1)
    expected = torch.arange(5, dtype=torch.int32).unsqueeze(1).repeat(1, 9)
    assert device.tolist() == (-expected).tolist()
    expected[3, 4:6] = torch.tensor([70, 71])
    assert mapped.tolist() == expected.tolist()
    assert other.flatten().tolist() == [0] * 7 + [2**40, -1]


@pytest.mark.gpu
def test_a_mapped_tensor_is_written_by_the_gpu_where_it_lies() -> None:
    shared = Arena(Transfers(torch.device("cuda")))
    mapped = StagedWriteTensor((4, 1000), torch.int32, "cuda", shared, is_mapped=True)
    device = StagedWriteTensor((4, 1000), torch.int32, "cuda", shared)
    mapped.stage_write(3, 1, list(range(999)))
    device.stage_write(0, 0, [5])
    shared.flush()
    torch.cuda.synchronize()
    assert mapped.tensor.is_pinned()
    assert mapped.tensor[3].tolist() == [0, *range(999)]
    assert mapped.tensor[:3].count_nonzero() == 0
    assert device.tensor.is_cuda
    assert device.tensor[0, 0].item() == 5


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
