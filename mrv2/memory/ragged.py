"""Lists that the host writes and the device reads, of any length, for few of the rows.

Token ids with a bias, allowed tokens, bad words: most rows have none, some have thousands. The host
keeps one array a row; `flush` packs all of them and carries them over whole, in steps that changed
one. Rows without a list cost nothing but their offset.

Lists stand apart from the arena, where every tensor has its size and its address for good: they may
be of any length. A step that changes some costs two uploads more for each feature. That is rare,
since few requests have any.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrv2.memory.transfers import Transfers


class MirroredLists:
    """One list of int32 words a row; the host's copy is the authority.

    Args:
        num_rows: Rows.
        transfers: Carries the packed lists.
    """

    def __init__(self, num_rows: int, transfers: Transfers) -> None:
        self.bounds = torch.zeros(num_rows + 1, dtype=torch.int32, device=transfers.device)
        """[num_rows + 1] int32. Row r holds words[bounds[r]:bounds[r + 1]]."""
        self.words: Tensor = torch.zeros(1, dtype=torch.int32, device=transfers.device)
        """[num_words] int32, a fresh tensor whenever a list changed; at least one word."""
        self.is_set = np.zeros(num_rows, dtype=np.bool_)
        """[num_rows], host. Which rows hold a list that is not empty."""
        self._lists: dict[int, npt.NDArray[np.int32]] = {}
        self._num_rows = num_rows
        self._transfers = transfers
        self._dirty = False

    def set(self, row: int, words: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Give a row a list, copied now; an empty one clears it."""
        if len(words) == 0:
            self.clear(row)
            return
        self._lists[row] = np.array(words, dtype=np.int32)
        self.is_set[row] = True
        self._dirty = True

    def clear(self, row: int) -> None:
        """Leave a row without a list."""
        if self._lists.pop(row, None) is not None:
            self.is_set[row] = False
            self._dirty = True

    def flush(self) -> None:
        """Queue the copy if the host has written since the last one."""
        if not self._dirty:
            return
        self._dirty = False
        lengths = np.zeros(self._num_rows, dtype=np.int32)
        rows = sorted(self._lists)
        for row in rows:
            lengths[row] = len(self._lists[row])
        bounds = np.zeros(self._num_rows + 1, dtype=np.int32)
        np.cumsum(lengths, out=bounds[1:])
        self._transfers.upload(bounds, out=self.bounds)
        if rows:
            packed = np.concatenate([self._lists[row] for row in rows])
            self.words = self._transfers.upload(packed)


def places_of(bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find every word of some rows' lists, for references that take all lists at once.

    Args:
        bounds: [num_rows + 1] int32, as `MirroredLists.bounds`.
        rows: [n] int32, in any order; a row may be named more than once.

    Returns:
        For each word of each list, the lists in the order of `rows`: the index of its row in
        `rows`, and its index in `MirroredLists.words`; both [total] int64.
    """
    starts = bounds[rows.long()].long()
    lengths = bounds[rows.long() + 1].long() - starts
    owners = torch.repeat_interleave(lengths)
    before = lengths.cumsum(0) - lengths
    return owners, torch.arange(len(owners), device=owners.device) + (starts - before)[owners]
