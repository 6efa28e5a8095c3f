"""Device memory for all that the host writes, so that a step's writes travel together.

A block table or a token table is too large to copy at every step, and a step in which requests come
and go changes a dozen tensors. So all of them lie in one allocation of 4-byte words, and a write is
named by the word at which it starts. The host stages what changed; `flush` packs all of it into one
buffer, uploads that, and one kernel scatters it. Writes are irregular: any starts, any lengths.
Several writes to one place act in the order in which they were staged. The kernel runs them all at
once, so overlaps are resolved on the host first: of two writes that meet, the earlier is cut back
to what the later leaves.

The allocation is made once, when its size is known: everything that is to lie in it is reserved
before any of it is used. Its tensors then stay at their addresses.

A tensor that is large and seldom read need not take memory of the device: it may lie in a second
allocation, of pinned memory of the host, which the device reads and writes where it is. Its words
have addresses of their own in the same space, so that one upload and one kernel serve both.
"""

import math
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.errors import ConfigError
from mrv2.memory.transfers import Transfers
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp

PIECE = 512
"""Words that one program of the kernel writes at most; a longer write is cut into pieces."""
_HEADER = 4
"""Words that describe one piece in the packed buffer: its start, the low word before the high one,
its length, and the offset of its values."""
_MAPPED = 1 << 60
"""Added to the address of a word of the host's memory."""
_MAPPED_HIGH = tl.constexpr(_MAPPED >> 32)
_ALIGNMENT = 16
"""Words. Every tensor starts at a multiple of 64 bytes, as if it had been allocated alone."""


@triton.jit
def _staged_write_kernel(
    target_ptr: tl.tensor,
    mapped_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    header = packed_ptr + tl.program_id(0) * 4
    low = tl.load(header).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(header + 1)
    start = ((high & (_MAPPED_HIGH - 1)).to(tl.int64) << 32) | low
    length = tl.load(header + 2)
    source = tl.load(header + 3).to(tl.int64)
    step = tl.arange(0, PIECE)
    mask = step < length
    value = tl.load(packed_ptr + source + step, mask=mask)
    if high >= _MAPPED_HIGH:
        tl.store(mapped_ptr + start + step, value, mask=mask)
    else:
        tl.store(target_ptr + start + step, value, mask=mask)


def _staged_write_launch(target: Tensor, mapped: Tensor, packed: Tensor, num_pieces: int) -> Launch:
    args = (target, mapped, packed)
    return Launch(_staged_write_kernel, (num_pieces,), args, {"PIECE": PIECE})


def _staged_write_reference(
    target: Tensor, mapped: Tensor, packed: Tensor, num_pieces: int
) -> None:
    """Write packed values into words of `target` and of `mapped`, in place.

    Args:
        target: [num_words] int32, contiguous. May have more than 2**31 words.
        mapped: [num_words] int32, contiguous. As `target`, of pinned memory of the host.
        packed: [num_packed] int32. `num_pieces` headers of start (64 bits, the low word first),
            length and offset into `packed`; then the values. At most `PIECE` words of each piece
            are written. No two pieces meet. A start of 2**60 or more is one in `mapped`, by so much
            larger.
        num_pieces: Headers in `packed`.
    """
    headers = packed[: num_pieces * _HEADER].view(num_pieces, _HEADER).long()
    low, high, length, offset = headers.unbind(1)
    length = length.clamp(0, PIECE)
    piece = torch.repeat_interleave(length)
    step = torch.arange(piece.numel()) - (length.cumsum(0) - length)[piece]
    start = (high << 32) | (low & 0xFFFFFFFF)
    word, value = start[piece] + step, packed[offset[piece] + step]
    is_mapped = word >= _MAPPED
    if is_mapped.any():
        mapped[word[is_mapped] - _MAPPED] = value[is_mapped]
        word, value = word[~is_mapped], value[~is_mapped]
    target[word] = value


staged_write = TwinOp(
    "memory.staged_write",
    reference=_staged_write_reference,
    launch=_staged_write_launch,
    mutates=frozenset({"target", "mapped"}),
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a tensor lies in an arena."""

    start: int
    """Address of its first word."""
    size: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """One allocation of words on the device, and what the host has staged for it.

    Args:
        transfers: Carries the packed writes; tells the device.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self._num_words = {False: 0, True: 0}
        self._words: dict[bool, Tensor] = {}
        self._stage_anew()

    def reserve(
        self, size: tuple[int, ...], dtype: torch.dtype, *, is_mapped: bool = False
    ) -> Region:
        """Keep room for a tensor.

        Args:
            size: Its size.
            dtype: A type of 4 or 8 bytes.
            is_mapped: Whether it lies in memory of the host, which the device reaches.

        Raises:
            ConfigError: The dtype has neither 4 nor 8 bytes, or the memory was allocated already.
        """
        if dtype.itemsize not in (4, 8):
            raise ConfigError(
                f"dtype is {dtype}, of {dtype.itemsize} bytes; staged writes move words of 4 or 8"
            )
        if self._words:
            raise ConfigError(
                f"room for a tensor of size {size} is reserved after the "
                f"{sum(self._num_words.values())} words of this arena were allocated: "
                "make all state before using any of it"
            )
        start = self._num_words[is_mapped]
        num_words = math.prod(size) * dtype.itemsize // 4
        self._num_words[is_mapped] += -(-num_words // _ALIGNMENT) * _ALIGNMENT
        return Region(start=start + _MAPPED * is_mapped, size=size, dtype=dtype)

    def allocate(self) -> None:
        """Allocate all words, as zeros, unless they are there."""
        if not self._words:
            device = self.transfers.device
            mapped = torch.zeros(
                self._num_words[True], dtype=torch.int32, pin_memory=device.type == "cuda"
            )
            words = torch.zeros(self._num_words[False], dtype=torch.int32, device=device)
            # Where nothing is mapped, its place is taken by what a kernel can be given.
            self._words = {False: words, True: mapped if len(mapped) else words}

    def view(self, region: Region) -> Tensor:
        """Return the tensor of a region; it stays at its address."""
        self.allocate()
        num_words = math.prod(region.size) * region.dtype.itemsize // 4
        is_mapped = region.start >= _MAPPED
        start = region.start - _MAPPED * is_mapped
        words = self._words[is_mapped][start : start + num_words]
        return words.view(region.dtype).view(region.size)

    def stage(self, start: int, words: Int32) -> None:
        """Remember to write `words`, copied now, from word `start` on.

        The caller sees to it that they lie in its region.
        """
        self._values.frombytes(words.view(np.uint8).data)
        self._starts.append(start)
        self._lengths.append(len(words))

    def stage_list(self, start: int, words: list[int]) -> None:
        """As `stage`, of words in a list; a short one is not worth an array."""
        self._values.fromlist(words)
        self._starts.append(start)
        self._lengths.append(len(words))

    def flush(self) -> None:
        """Queue everything staged: one packed buffer, one copy, one kernel.

        Nothing staged queues nothing.
        """
        if not self._starts:
            return
        packed, num_pieces = _pack(
            np.frombuffer(self._starts, dtype=np.int64),
            np.frombuffer(self._lengths, dtype=np.int64),
            np.frombuffer(self._values, dtype=np.int32),
        )
        self._stage_anew()
        self.allocate()
        uploaded = self.transfers.upload(packed)
        staged_write(self._words[False], self._words[True], uploaded, num_pieces)

    @property
    def num_staged(self) -> int:
        """Writes that wait for `flush`."""
        return len(self._starts)

    def _stage_anew(self) -> None:
        self._starts = array("q")
        self._lengths = array("q")
        self._values = array("i")


def _pack(starts: Int64, lengths: Int64, values: Int32) -> tuple[Int32, int]:
    """Return the packed buffer of some writes, and how many pieces it has.

    Args:
        starts: [num_writes]. First word of each write.
        lengths: [num_writes]. At least 1.
        values: The writes' words, one write after the other.
    """
    offsets = np.cumsum(lengths) - lengths
    starts, lengths, offsets = _without_overlaps(starts, lengths, offsets)
    if lengths.max() > PIECE:
        starts, lengths, offsets = _cut(starts, lengths, offsets)
    num_pieces = len(starts)
    packed = np.empty(num_pieces * _HEADER + len(values), dtype=np.int32)
    header = packed[: num_pieces * _HEADER].reshape(num_pieces, _HEADER)
    header[:, 0] = starts & 0xFFFFFFFF
    header[:, 1] = starts >> 32
    header[:, 2] = lengths
    header[:, 3] = offsets + num_pieces * _HEADER
    packed[num_pieces * _HEADER :] = values
    return packed, num_pieces


def _cut(starts: Int64, lengths: Int64, offsets: Int64) -> tuple[Int64, Int64, Int64]:
    """Cut writes into pieces."""
    counts = -(-lengths // PIECE)
    write = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    begins = (np.arange(len(write)) - first[write]) * PIECE
    return (
        starts[write] + begins,
        np.minimum(lengths[write] - begins, PIECE),
        offsets[write] + begins,
    )


def _without_overlaps(starts: Int64, lengths: Int64, offsets: Int64) -> tuple[Int64, Int64, Int64]:
    """Return writes that do not meet and leave the same words as the given ones in their order.

    The values of what is cut away stay in the buffer, and nothing names them.
    """
    order = np.argsort(starts)
    sorted_starts, ends = starts[order], (starts + lengths)[order]
    if (sorted_starts[1:] >= ends[:-1]).all():
        return starts, lengths, offsets
    # Writes are in one cluster if they meet, or meet others of it; only those are compared.
    cluster = np.zeros(len(starts), dtype=np.int64)
    cluster[order[1:]] = np.cumsum(sorted_starts[1:] >= np.maximum.accumulate(ends)[:-1])
    writes = zip(cluster.tolist(), starts.tolist(), lengths.tolist(), offsets.tolist(), strict=True)
    kept: list[tuple[int, int, int]] = []
    covered: dict[int, list[tuple[int, int]]] = {}
    for index, start, length, offset in reversed(list(writes)):
        taken = covered.setdefault(index, [])
        kept.extend(
            (left, right - left, offset + left - start)
            for left, right in _gaps(start, start + length, taken)
        )
        taken.append((start, start + length))
    kept_starts, kept_lengths, kept_offsets = np.array(kept, dtype=np.int64).T
    return kept_starts, kept_lengths, kept_offsets


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
