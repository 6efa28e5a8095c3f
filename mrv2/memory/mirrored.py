"""A column that the host writes and the device reads, one value for each row."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mrv2.memory.arena import Arena


class MirroredTensor:
    """One value a row; the host's copy is the authority, and `flush` stages what changed of it.

    The rows from the first that changed to the last are one write, whatever lies between them: the
    host has the right values of those, too.

    Args:
        num_rows: Length of the column.
        dtype: Of both copies, of 4 or 8 bytes.
        arena: The column's memory on the device; its own flush carries the values there.
    """

    def __init__(self, num_rows: int, dtype: torch.dtype, arena: Arena) -> None:
        self.host = np.zeros(num_rows, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
        self._arena = arena
        self._region = arena.reserve((num_rows,), dtype)
        self._words = self.host.view(np.int32)
        self._words_of_row = dtype.itemsize // 4
        self._first, self._end = num_rows, 0
        """The rows that changed are among these."""

    @cached_property
    def device_tensor(self) -> Tensor:
        """[num_rows], at one address for good."""
        return self._arena.view(self._region)

    def set(self, row: int, value: float) -> None:
        """Write one row on the host. A value that stands there already costs nothing more."""
        if self.host[row] != value:
            self.host[row] = value
            self._first = min(self._first, row)
            self._end = max(self._end, row + 1)

    def flush(self) -> None:
        """Stage what the host has written since the last flush."""
        if self._first < self._end:
            first, end = self._first * self._words_of_row, self._end * self._words_of_row
            self._arena.stage(self._region.start + first, self._words[first:end])
            self._first, self._end = len(self.host), 0
