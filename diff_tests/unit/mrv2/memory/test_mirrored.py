"""Mirrored columns: copied whole, and only when the host wrote."""

import torch
from torch import Tensor

from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.transfers import Transfers, queue_copy


def test_a_flush_carries_the_column_over_only_if_the_host_wrote() -> None:
    copies: list[int] = []

    def copy(destination: Tensor, source: Tensor) -> None:
        copies.append(destination.numel())
        queue_copy(destination, source)

    column = MirroredTensor(5, torch.float32, Transfers(torch.device("cpu"), copy))
    column.flush()
    assert copies == []
    column.set(3, 0.25)
    column.set(1, 2.0)
    assert column.device_tensor.tolist() == [0.0] * 5
    column.flush()
    column.flush()
    assert copies == [5]
    assert column.device_tensor.tolist() == [0.0, 2.0, 0.0, 0.25, 0.0]
    assert column.host.tolist() == column.device_tensor.tolist()


def test_a_write_after_the_flush_waits_for_the_next_one() -> None:
    column = MirroredTensor(3, torch.int64, Transfers(torch.device("cpu")))
    column.set(0, -(2**63))
    column.flush()
    column.set(0, 7)
    assert column.device_tensor.tolist() == [-(2**63), 0, 0]
    column.flush()
    assert column.device_tensor.tolist() == [7, 0, 0]
