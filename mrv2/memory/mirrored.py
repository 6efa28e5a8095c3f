"""A column that the host writes and the device reads, one value for each row."""

import numpy as np
import torch

from mrv2.memory.transfers import Transfers


class MirroredTensor:
    """One value a row; the host's copy is the authority, and `flush` carries it over whole.

    Right for small columns that change when requests come and go: one copy of a few KiB, and only
    in steps that changed it.

    Args:
        num_rows: Length of the column.
        dtype: Of both copies.
        transfers: Carries the copy.
    """

    def __init__(self, num_rows: int, dtype: torch.dtype, transfers: Transfers) -> None:
        self.device_tensor = torch.zeros(num_rows, dtype=dtype, device=transfers.device)
        self.host = np.zeros(num_rows, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
        self._transfers = transfers
        self._dirty = False

    def set(self, row: int, value: float) -> None:
        """Write one row on the host. A value that stands there already costs no copy."""
        if self.host[row] != value:
            self.host[row] = value
            self._dirty = True

    def flush(self) -> None:
        """Queue the copy if the host has written since the last one."""
        if self._dirty:
            self._transfers.upload(self.host, out=self.device_tensor)
            self._dirty = False
