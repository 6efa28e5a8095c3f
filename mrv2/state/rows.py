"""Which request owns which row."""

from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from mrv2.errors import CapacityError, ProtocolError


class RowTable:
    """Request id to row, and the rows that are free.

    The row that was freed last is claimed first, so stale state shows early.

    Args:
        num_rows: Rows in all.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._row_of: dict[str, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def claim(self, req_id: str) -> int:
        """Give a request a row.

        Raises:
            ProtocolError: The request has one already.
            CapacityError: Every row is taken.
        """
        if req_id in self._row_of:
            raise ProtocolError(f"request {req_id!r} arrived twice; let it depart first")
        if not self._free:
            raise CapacityError(
                f"all {self._num_rows} rows are taken (max_num_reqs); {req_id!r} has none"
            )
        row = self._free.pop()
        self._row_of[req_id] = row
        return row

    def release(self, req_id: str) -> int | None:
        """Free the row of a request and return it; None if the request has no row."""
        row = self._row_of.pop(req_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def row(self, req_id: str) -> int:
        """Return the row of a request.

        Raises:
            ProtocolError: The request has no row.
        """
        try:
            return self._row_of[req_id]
        except KeyError:
            raise ProtocolError(
                f"request {req_id!r} has no row; it must arrive before it runs"
            ) from None

    def rows(self, req_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the rows of many requests, [num_reqs] int32.

        Raises:
            ProtocolError: One of them has no row.
        """
        try:
            return np.fromiter(map(self._row_of.__getitem__, req_ids), np.int32, len(req_ids))
        except KeyError as missing:
            raise ProtocolError(
                f"request {missing.args[0]!r} is scheduled but has no row"
            ) from None

    def rows_if_live(self, req_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the rows of many requests, [num_reqs] int32; -1 for those that have none."""
        return np.fromiter(map(self._row_of.get, req_ids, repeat(-1)), np.int32, len(req_ids))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._row_of
