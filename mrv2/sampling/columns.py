"""What the draw knows about each row: temperature and seed.

The columns stand apart from the stages because two readers share them: the temperature stage
divides by one, and the draw asks it which rows are greedy. There is one copy of each.
"""

import torch

from mrv2.memory.arena import Arena
from mrv2.memory.mirrored import MirroredTensor
from mrv2.plan import Arrival

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy. V1 draws the line here; dividing by less soon overflows."""


class DrawColumns:
    """Temperature and seed of every row, host-authoritative; a `RowState`.

    Args:
        num_rows: Rows.
        arena: Memory of the columns.
    """

    def __init__(self, num_rows: int, arena: Arena) -> None:
        self.temperature = MirroredTensor(num_rows, torch.float32, arena)
        self.seed = MirroredTensor(num_rows, torch.int64, arena)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's parameters into its row."""
        sampling = arrival.sampling
        greedy = sampling.temperature < GREEDY_BELOW
        self.temperature.set(row, 0.0 if greedy else sampling.temperature)
        self.seed.set(row, _signed(sampling.seed))

    def evict(self, row: int) -> None:
        """Make the row greedy, so that a freed row asks for no work."""
        self.temperature.set(row, 0.0)
        self.seed.set(row, 0)

    def flush(self) -> None:
        """Stage what changed."""
        self.temperature.flush()
        self.seed.flush()


def _signed(seed: int) -> int:
    """Return the int64 with the same 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed
