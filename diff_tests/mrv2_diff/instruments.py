"""Instruments for one runner's part of a step: bytes that it allocates and keeps, and its time."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mrv2_diff.allocations import AllocationWatch
from mrv2_diff.record import Latency, Memory, PhasePeak, Quartiles

WINDOW_STEPS = 5
"""Steps of a window, one behind the other, so that what a step leaves is seen to be kept."""


@dataclass(slots=True)
class MemoryMeter:
    """Peaks over the calls that were wrapped, by side and phase.

    Tensor bytes come from torch's allocation events, so that a temporary that lives for a
    microsecond counts; on a CUDA device they are the device's, as its allocator rounds them. A
    replayed graph allocates nothing: what it uses is held. Python's come from tracemalloc, which
    sees numpy's arrays too. All slow a step down manyfold: never time with this in place.
    """

    every: int
    """Every so many windows one is measured; the instruments cost milliseconds."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Whose bytes are counted."""
    stacks: bool = False
    """Whether a peak names functions beside operations."""
    python_peak: dict[str, int] = field(default_factory=dict)
    _watch: AllocationWatch | None = None
    _window: int = -1

    def __call__(self, side: str, step: int, phase: str, call: Callable[[], Any]) -> Any:
        """Run one part of a step under the instruments, if it is the turn of the step's window.

        What a part leaves, such as logits, counts in the later ones of the window.
        """
        watch, window = self._allocations, step // WINDOW_STEPS
        if window != self._window and watch.is_open:
            watch.close()
        if window % self.every:
            return call()
        self._window = window
        if not watch.is_open:
            watch.open()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = watch.call(side, phase, call)
        _, python_peak = tracemalloc.get_traced_memory()
        self.python_peak[side] = max(self.python_peak.get(side, 0), python_peak - before)
        return result

    def __enter__(self) -> "MemoryMeter":
        """Start to trace Python's allocations."""
        tracemalloc.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop tracing."""
        if self._allocations.is_open:
            self._allocations.close()
        tracemalloc.stop()

    @property
    def _allocations(self) -> AllocationWatch:
        if self._watch is None:
            self._watch = AllocationWatch(self.device, self.stacks)
        return self._watch

    def memory(
        self, side: str, held_bytes: int, start: "dict[str, PhasePeak] | None" = None
    ) -> Memory:
        """Return the peaks of one side as a record keeps them.

        Args:
            side: As it was named in the calls.
            held_bytes: Kept between steps.
            start: Peaks of the phases of its start, where they were measured.
        """
        peaks = {
            phase: peak for (whose, phase), peak in self._allocations.peaks.items() if whose == side
        }
        return Memory(
            step_peak_tensor_bytes=max((peak.peak_bytes for peak in peaks.values()), default=0),
            step_peak_python_bytes=self.python_peak.get(side, 0),
            state_held_bytes=held_bytes,
            phases={**(start or {}), **peaks},
        )


class Timer(Protocol):
    """Takes times on a device, without waiting for it before they are read."""

    def call(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Return a call's result, and what returns its seconds on the device later."""


class CudaTimer:
    """Events of a CUDA stream before and behind a call."""

    def call(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Return a call's result, and what waits for the device and returns the seconds."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = call()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1000

        return result, seconds


@dataclass(slots=True)
class DeviceMeter:
    """Takes each part of a step on the device, from the first to the last event on its stream.

    What the device waits for in between, such as its host, counts.
    """

    timer: Timer
    _reads: dict[tuple[int, str], list[Callable[[], float]]] = field(default_factory=dict)

    def __call__(self, side: str, step: int, phase: str, call: Callable[[], Any]) -> Any:
        """Run one part of a step; nothing waits for the device here."""
        result, read = self.timer.call(call)
        self._reads.setdefault((step, side), []).append(read)
        return result

    def seconds(self, side: str, step: int) -> list[float]:
        """Return the seconds of a step's parts, once they have run."""
        return [read() for read in self._reads.get((step, side), ())]


def held_bytes(root: object, without: list[Tensor]) -> int:
    """Return the bytes of all tensors and arrays that an object reaches, each storage once.

    Args:
        root: The runner. Modules (the weights) and vLLM's config are not followed.
        without: Tensors that do not count, such as the KV cache.
    """
    storages: dict[int, int] = {}
    for value in _reachable(root):
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, np.ndarray):
            base = value
            while isinstance(base.base, np.ndarray):
                base = base.base
            storages.setdefault(base.__array_interface__["data"][0], base.nbytes)
    for tensor in without:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def latency(
    execute: list[float], sample: list[float], on_device: list[float] | None = None
) -> Latency:
    """Return the quartiles and percentiles of one runner's step times.

    On a worker without async scheduling a runner returns its output from `sample`, so that waiting
    for it is part of that.

    Args:
        execute: Seconds in execute, for each step.
        sample: Seconds in sample, for each step.
        on_device: Seconds of each whole step on the device, where they were taken.
    """
    total = [first + second for first, second in zip(execute, sample, strict=True)]
    return Latency(
        execute_us=quartiles(execute),
        sample_us=quartiles(sample),
        output_us=None,
        total_us=quartiles(total),
        device_us=quartiles(on_device) if on_device else None,
    )


def quartiles(seconds: list[float]) -> Quartiles:
    """Return quartiles and percentiles in microseconds; at least one value."""
    q1, median, q3, p90, p99 = (
        float(value) * 1e6 for value in np.percentile(seconds, (25, 50, 75, 90, 99))
    )
    return Quartiles(q1=q1, median=median, q3=q3, count=len(seconds), p90=p90, p99=p99)


_NOT_FOLLOWED = (
    nn.Module,
    type,
    ModuleType,
    str,
    bytes,
    int,
    float,
    bool,
    torch.dtype,
    torch.device,
)
_NOT_STATE = ("vllm.config", "triton")
"""Modules whose objects hold no state of a runner: configs, and kernels, whose globals are all that
there is."""


def _reachable(root: object) -> Iterator[object]:
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, _NOT_FOLLOWED) or _is_foreign(value):
            continue
        seen.add(id(value))
        yield value
        stack.extend(_parts(value))


def _is_foreign(value: object) -> bool:
    return type(value).__module__.startswith(_NOT_STATE)


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Tensor | np.ndarray):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    slotted = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*vars(value).values(), *slotted] if hasattr(value, "__dict__") else slotted
