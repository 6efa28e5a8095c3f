"""A tensor of an arena whose parts the host writes, by row and column."""

from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrv2.errors import CapacityError, ConfigError
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers


class StagedWriteTensor:
    """A device tensor with host writes that are staged, then applied together.

    Args:
        size: [num_rows, num_columns], or [num_rows] for one value a row.
        dtype: A type of 4 or 8 bytes.
        device: Where the tensor lives.
        arena: Memory of `device` that the tensor shares with others, which are written together
            with it. One of its own if not given, for use outside a runner.
        is_mapped: Whether it lies in pinned memory of the host, which the device reaches.

    Raises:
        ConfigError: The dtype has neither 4 nor 8 bytes, or the size has neither one nor two axes,
            or the arena was allocated already.
    """

    def __init__(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        arena: Arena | None = None,
        *,
        is_mapped: bool = False,
    ) -> None:
        if len(size) not in (1, 2):
            raise ConfigError(f"size is {size}; a staged tensor has one or two axes")
        self._arena = arena or Arena(Transfers(torch.device(device)))
        self._owns_arena = arena is None
        self._region = self._arena.reserve(size, dtype, is_mapped=is_mapped)
        self._num_rows, self._num_columns = size if len(size) == 2 else (size[0], 1)
        self._value_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._holds_words = dtype == torch.int32
        self._words_of_value = dtype.itemsize // 4

    @cached_property
    def tensor(self) -> Tensor:
        """`size`, `dtype`. At one address for good; from its first use on, so is its arena."""
        return self._arena.view(self._region)

    def stage_write(
        self, row: int, start: int, value: Sequence[float] | npt.NDArray[np.generic]
    ) -> None:
        """Remember to write `value` into `row` from column `start` on.

        Args:
            row: Row of the tensor.
            start: First column written.
            value: Values, copied now. None at all is a no-op.

        Raises:
            CapacityError: The row or the range of columns lies outside the tensor. Nothing is
                staged.
        """
        end = start + len(value)
        if not (0 <= row < self._num_rows and 0 <= start <= end <= self._num_columns):
            self._refuse(row, start, end)
        if end == start:
            return
        cell = (row * self._num_columns + start) * self._words_of_value
        if self._holds_words and isinstance(value, list):
            self._arena.stage_list(self._region.start + cell, value)
        else:
            values = np.ascontiguousarray(value, dtype=self._value_dtype)
            self._arena.stage(self._region.start + cell, values.view(np.int32))

    def _refuse(self, row: int, start: int, end: int) -> NoReturn:
        if not 0 <= row < self._num_rows:
            raise CapacityError(f"row {row} is outside the {self._num_rows} rows of this tensor")
        raise CapacityError(
            f"columns {start}..{end} of row {row} are outside "
            f"the {self._num_columns} columns of this tensor"
        )

    def apply_write(self) -> None:
        """Queue everything that is staged in the arena, for this tensor and for all others of it.

        Nothing staged queues nothing.
        """
        if self._owns_arena and self._arena.num_staged:
            self._arena.transfers.begin_step()
        self._arena.flush()

    @property
    def num_staged(self) -> int:
        """Writes that wait in the arena."""
        return self._arena.num_staged
