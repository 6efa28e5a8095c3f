"""A large tensor that stays on the device, and host writes packed into one copy and one kernel.

A block table or a token table is too large to copy at every step. The host stages what changed;
`apply_write` packs all of it into one buffer, uploads that, and one kernel scatters it. Writes are
irregular: any rows, any starts, any lengths. Several writes to one place act in the order in which
they were staged. The kernel runs them all at once, so overlaps are resolved on the host first: of
two writes that meet, the earlier is cut back to what the later leaves.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.errors import CapacityError, ConfigError
from mrv2.memory.transfers import Transfers
from mrv2.ops.launch import Launch, cdiv
from mrv2.ops.twin import TwinOp

_HEADER = 4
"""Words that describe one write in the packed buffer: row, start, length, offset of its values."""


@triton.jit
def _staged_write_kernel(
    target_ptr: tl.tensor,
    target_stride: tl.tensor,
    packed_ptr: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    header = packed_ptr + tl.program_id(0) * 4
    row = tl.load(header).to(tl.int64)
    start = tl.load(header + 1).to(tl.int64)
    length = tl.load(header + 2).to(tl.int64)
    source = tl.load(header + 3).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < length
    value = tl.load(packed_ptr + source + column, mask=mask)
    tl.store(target_ptr + row * target_stride + start + column, value, mask=mask)


def _staged_write_launch(
    target: Tensor, packed: Tensor, num_writes: int, max_length: int
) -> Launch:
    block = 256
    grid = (num_writes, cdiv(max_length, block))
    return Launch(_staged_write_kernel, grid, (target, target.stride(0), packed), {"BLOCK": block})


def _staged_write_reference(
    target: Tensor, packed: Tensor, num_writes: int, max_length: int
) -> None:
    """Write packed values into rows of `target`, in place.

    Args:
        target: [num_rows, num_columns] int32 or int64. Rows may be strided, columns are contiguous.
        packed: [num_words], dtype of `target`. `num_writes` headers of row, start, length and
            offset into `packed`, then the values. No two writes meet.
        num_writes: Headers in `packed`.
        max_length: Length of the longest write.
    """
    if num_writes == 0 or max_length == 0:
        return
    row, start, length, offset = (
        packed[: num_writes * _HEADER].view(num_writes, _HEADER).long().unbind(1)
    )
    write = torch.repeat_interleave(length)
    step = torch.arange(write.numel()) - (length.cumsum(0) - length)[write]
    target[row[write], start[write] + step] = packed[offset[write] + step]


staged_write = TwinOp(
    "memory.staged_write",
    reference=_staged_write_reference,
    launch=_staged_write_launch,
    mutates=frozenset({"target"}),
)

_Write = tuple[int, int, npt.NDArray[np.generic]]


class StagedWriteTensor:
    """A device tensor with host writes that are staged, then applied together.

    Args:
        size: [num_rows, num_columns], or [num_rows] for one value a row.
        dtype: A type of 4 or 8 bytes.
        device: Where the tensor lives.
        transfers: Carries the packed writes. Made for `device` if not given, for use outside a
            runner.

    Raises:
        ConfigError: The dtype has neither 4 nor 8 bytes, or the size has neither one nor two axes.
    """

    def __init__(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        transfers: Transfers | None = None,
    ) -> None:
        if dtype.itemsize not in (4, 8):
            raise ConfigError(
                f"dtype is {dtype}, of {dtype.itemsize} bytes; staged writes move words of 4 or 8"
            )
        if len(size) not in (1, 2):
            raise ConfigError(f"size is {size}; a staged tensor has one or two axes")
        self.tensor = torch.zeros(size, dtype=dtype, device=device)
        self._num_rows, self._num_columns = size if len(size) == 2 else (size[0], 1)
        self._words = self.tensor.view(self._num_rows, self._num_columns).view(_word(dtype))
        self._value_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._word_dtype = torch.empty(0, dtype=_word(dtype)).numpy().dtype
        self._transfers = transfers or Transfers(torch.device(device))
        self._owns_transfers = transfers is None
        self._staged: list[_Write] = []

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
        if not 0 <= row < self._num_rows:
            raise CapacityError(f"row {row} is outside the {self._num_rows} rows of this tensor")
        if start < 0 or end > self._num_columns:
            raise CapacityError(
                f"columns {start}..{end} of row {row} are outside "
                f"the {self._num_columns} columns of this tensor"
            )
        if end > start:
            self._staged.append(
                (row, start, np.array(value, dtype=self._value_dtype).view(self._word_dtype))
            )

    def apply_write(self) -> None:
        """Queue everything staged: one packed buffer, one copy, one kernel.

        Nothing staged queues nothing.
        """
        if not self._staged:
            return
        if self._owns_transfers:
            self._transfers.begin_step()
        writes = _without_overlaps(self._staged)
        self._staged = []
        packed, max_length = _pack(writes, self._word_dtype)
        staged_write(self._words, self._transfers.upload(packed), len(writes), max_length)

    @property
    def num_staged(self) -> int:
        """Writes that wait for `apply_write`."""
        return len(self._staged)


def _word(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int64


def _pack(writes: list[_Write], dtype: np.dtype[np.generic]) -> tuple[npt.NDArray[np.generic], int]:
    rows, starts, values = zip(*writes, strict=True)
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(writes))
    ends = np.cumsum(lengths) + len(writes) * _HEADER
    packed = np.empty(int(ends[-1]), dtype=dtype)
    header = packed[: len(writes) * _HEADER].reshape(len(writes), _HEADER)
    for column, field in enumerate((rows, starts, lengths, ends - lengths)):
        header[:, column] = field
    np.concatenate(values, out=packed[len(writes) * _HEADER :])
    return packed, int(lengths.max())


def _without_overlaps(writes: list[_Write]) -> list[_Write]:
    """Return writes that do not meet and leave the same tensor as the given ones in their order."""
    if len({row for row, _, _ in writes}) == len(writes):
        return writes
    kept: list[_Write] = []
    covered: dict[int, list[tuple[int, int]]] = {}
    for row, start, value in reversed(writes):
        taken = covered.setdefault(row, [])
        kept.extend(
            (row, left, value[left - start : right - start])
            for left, right in _gaps(start, start + len(value), taken)
        )
        taken.append((start, start + len(value)))
    kept.reverse()
    return kept


def _gaps(start: int, end: int, taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of [start, end) outside every interval of `taken`."""
    gaps = []
    for left, right in sorted(taken):
        if left >= end:
            break
        if left > start:
            gaps.append((start, left))
        start = max(start, right)
    if start < end:
        gaps.append((start, end))
    return gaps
