"""Mirrored columns: what changed is staged, and goes to the device with the arena."""

import torch
from torch import Tensor

from mrv2.memory.arena import Arena
from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.transfers import Transfers, queue_copy


def some_arena() -> Arena:
    return Arena(Transfers(torch.device("cpu")))


def test_a_flush_stages_the_rows_from_the_first_to_the_last_that_changed() -> None:
    copies: list[int] = []

    def copy(destination: Tensor, source: Tensor) -> None:
        copies.append(destination.numel())
        queue_copy(destination, source)

    arena = Arena(Transfers(torch.device("cpu"), copy))
    column = MirroredTensor(9, torch.float32, arena)
    column.flush()
    assert arena.num_staged == 0
    column.set(5, 0.25)
    column.set(3, 2.0)
    column.set(8, 0.0)  # stands there already
    assert column.device_tensor.tolist() == [0.0] * 9
    column.flush()
    column.flush()
    assert arena.num_staged == 1
    arena.flush()
    arena.flush()
    assert copies == [4 + 3]  # a header, and rows 3 to 5
    assert column.device_tensor.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0, 0.25, 0.0, 0.0, 0.0]
    assert column.host.tolist() == column.device_tensor.tolist()


def test_a_write_after_the_flush_waits_for_the_next_one() -> None:
    arena = some_arena()
    column = MirroredTensor(3, torch.int64, arena)
    column.set(0, -(2**63))
    column.flush()
    column.set(0, 7)
    arena.flush()
    assert column.device_tensor.tolist() == [-(2**63), 0, 0]
    column.flush()
    arena.flush()
    assert column.device_tensor.tolist() == [7, 0, 0]


def test_a_row_that_changes_between_two_flushes_of_one_arena_keeps_the_later_value() -> None:
    arena = some_arena()
    column = MirroredTensor(6, torch.int32, arena)
    for row, value in ((1, 5), (4, 6), (2, 7), (1, 8)):
        column.set(row, value)
        column.flush()
    arena.flush()
    assert column.device_tensor.tolist() == [0, 8, 7, 0, 6, 0]


def test_the_first_and_the_last_row_of_neighbouring_columns() -> None:
    arena = some_arena()
    columns = [
        MirroredTensor(num_rows, dtype, arena)
        for num_rows, dtype in ((17, torch.int32), (5, torch.int64), (1, torch.float32))
    ]
    for column in columns:
        column.set(0, 3)
        column.set(len(column.host) - 1, -4)
        column.flush()
    arena.flush()
    for column in columns:
        assert column.device_tensor.tolist() == column.host.tolist()
        assert column.device_tensor.data_ptr() % 64 == 0
