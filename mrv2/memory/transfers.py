"""Every copy between host and device, and why none of them can race.

Host state is never pinned and never a copy's source. `upload` first copies the host's values into a
staging buffer that belongs to the step being built, and the device reads only that. A step's
staging buffer is written again at the earliest in the second step after it that uploads anything,
and only if the device has passed a point that was recorded behind the step; otherwise a fresh
buffer joins the ring.
So a host write after a step was queued cannot change that step, and nothing here blocks.

On a CPU the path is the same, without pinning and without events, unless the caller brings a stream
of its own.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Copy: TypeAlias = Callable[[Tensor, Tensor], None]
"""`copy(destination, source)`, queued on the current stream. Tests pass a late one on purpose."""


class Event(Protocol):
    """A point in a stream's order; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Say whether the stream has passed it, without waiting."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""


_ALIGNMENT = 64
"""Bytes. Keeps each value of a packed buffer aligned for any dtype."""
_FIRST_CHUNK = 1 << 12
"""Bytes of a staging buffer's first chunk; it grows to what a step needs."""


def queue_copy(destination: Tensor, source: Tensor) -> None:
    """Copy without waiting, in the order of the current stream."""
    destination.copy_(source, non_blocking=True)


class CudaEvents:
    """Events on the current stream of the GPU, used again: making one costs as much as a launch."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def record(self) -> Event:
        """Return an event behind everything queued so far."""
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record()
        return event

    def give_back(self, event: Event) -> None:
        """Take an event that nobody will ask about any more."""
        if isinstance(event, torch.cuda.Event):
            self._spare.append(event)


class _Chunk:
    """Host bytes with their views as numpy arrays and as tensors.

    The views are made once, since making one costs more than a small copy.
    """

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._views: dict[np.dtype[Any], tuple[npt.NDArray[Any], Tensor]] = {}

    def views(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Tensor]:
        """Return the whole chunk as an array and as a tensor of a type."""
        if dtype not in self._views:
            array = self._bytes.numpy().view(dtype)
            self._views[dtype] = array, torch.from_numpy(array)
        return self._views[dtype]


class _StagingBuffer:
    """Host bytes of one step: handed out from the front, and taken back all at once."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks = [_Chunk(_FIRST_CHUNK, pinned)]
        self._used = 0
        self.released: Event | None = None

    def reset(self) -> None:
        """Take every byte back; several chunks become one that is large enough for all."""
        if len(self._chunks) > 1:
            total = sum(chunk.num_bytes for chunk in self._chunks)
            self._chunks = [_Chunk(total, self._pinned)]
        self._used = 0

    def take(self, values: npt.NDArray[Any]) -> Tensor:
        """Return a host tensor of the values' dtype and shape that holds a copy of them."""
        num_bytes = values.nbytes
        if self._used + num_bytes > self._chunks[-1].num_bytes:
            larger = max(num_bytes, 2 * self._chunks[-1].num_bytes)
            self._chunks.append(_Chunk(-(-larger // _ALIGNMENT) * _ALIGNMENT, self._pinned))
            self._used = 0
        array, tensor = self._chunks[-1].views(values.dtype)
        start = self._used // values.itemsize
        end = start + values.size
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        array[start:end] = values.reshape(-1)
        taken = tensor[start:end]
        return taken if values.ndim == 1 else taken.view(values.shape)


class Transfers:
    """Uploads and downloads of one runner, with a staging buffer for each step in flight.

    Args:
        device: Where the tensors live.
        copy: How bytes are moved.
        record: Returns an event behind everything queued so far. By default CUDA's on a GPU; on a
            CPU there is none, since all is done as it is queued.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Copy = queue_copy,
        record: Callable[[], Event] | None = None,
    ) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._copy = copy
        self._events = CudaEvents()
        self._record = self._events.record if record is None and self._pinned else record
        self._ring = [_StagingBuffer(self._pinned) for _ in range(2)]
        self._current = 0
        self._is_new_step = False

    def begin_step(self) -> None:
        """Have the next upload start a staging buffer that the device no longer reads.

        A step that uploads nothing costs nothing.
        """
        self._is_new_step = True

    def _move_on(self) -> None:
        self._is_new_step = False
        if self._record is not None:
            # Behind more than the last upload by now, which is as good.
            self._ring[self._current].released = self._record()
        following = (self._current + 1) % len(self._ring)
        released = self._ring[following].released
        if released is not None:
            if released.query():
                self.give_back(released)
                self._ring[following].released = None
            else:
                following = self._current + 1
                self._ring.insert(following, _StagingBuffer(self._pinned))
        self._ring[following].reset()
        self._current = following

    def upload(self, values: npt.NDArray[Any], out: Tensor | None = None) -> Tensor:
        """Queue a copy of host values to the device.

        Args:
            values: Host values; they may change as soon as this returns.
            out: Device tensor of the same shape and dtype to copy into; a fresh one by default.

        Returns:
            The device tensor.
        """
        if self._is_new_step:
            self._move_on()
        staged = self._ring[self._current].take(values)
        if out is None:
            out = torch.empty(staged.shape, dtype=staged.dtype, device=self.device)
        self._copy(out, staged)
        return out

    def download(self, values: Tensor) -> Tensor:
        """Queue a copy of a device tensor to fresh host memory.

        It is valid once an event that was recorded after it has passed.
        """
        out = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned)
        self._copy(out, values)
        return out

    def host_array(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return fresh host memory that `download_into` can copy to without waiting."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def download_into(self, out: Tensor, values: Tensor) -> None:
        """Queue a copy of a device tensor into host memory that is there already.

        It is valid once an event that was recorded after it has passed, and nobody writes it until
        then.

        Args:
            out: Part of a `host_array`, of the same shape and dtype.
            values: Device tensor.
        """
        self._copy(out, values)

    def record(self) -> Event | None:
        """Return an event behind everything queued so far; None where nothing is ever late."""
        return None if self._record is None else self._record()

    def give_back(self, event: Event) -> None:
        """Let an event that `record` returned be used again; nobody may ask about it any more."""
        self._events.give_back(event)
