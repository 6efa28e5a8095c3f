"""Instruments for one runner's part of a step: bytes that it allocates, and bytes that it keeps."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from mrv2_diff.record import Latency, Memory, Quartiles


@dataclass(slots=True)
class MemoryMeter:
    """Peaks over the calls that were wrapped, by side.

    Tensor bytes come from torch's allocation events, so that a temporary that lives for a
    microsecond counts; on a CUDA device they are the device's, from the counters of torch's
    allocator, which rounds up. A replayed graph allocates nothing: what it uses is held. Python's
    come from tracemalloc, which sees numpy's arrays too. All slow a step down manyfold: never time
    with this in place.
    """

    every: int
    """Measure every n-th step; the instruments cost milliseconds."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Whose bytes are counted."""
    tensor_peak: dict[str, int] = field(default_factory=dict)
    python_peak: dict[str, int] = field(default_factory=dict)
    _held: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By side: the step that was measured last, and the tensor bytes that it still held."""

    def __call__(self, side: str, step: int, call: Callable[[], Any]) -> Any:
        """Run one part of a step under the instruments, if it is the step's turn.

        What execute leaves for sample, such as logits, counts in both.
        """
        if step % self.every:
            return call()
        last, held = self._held.get(side, (step, 0))
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        watch = _of_allocator if self.device.type == "cuda" else _of_events
        result, python_peak, peak, held = watch(self.device, call, held if last == step else 0)
        self._held[side] = step, held
        self.python_peak[side] = max(self.python_peak.get(side, 0), python_peak - before)
        self.tensor_peak[side] = max(self.tensor_peak.get(side, 0), peak)
        return result

    def __enter__(self) -> "MemoryMeter":
        """Start to trace Python's allocations."""
        tracemalloc.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop tracing."""
        tracemalloc.stop()

    def memory(self, side: str, held_bytes: int) -> Memory:
        """Return the peaks of one side as a record keeps them."""
        return Memory(
            step_peak_tensor_bytes=self.tensor_peak[side],
            step_peak_python_bytes=self.python_peak[side],
            state_held_bytes=held_bytes,
        )


def _of_events(
    _device: torch.device, call: Callable[[], Any], held: int
) -> tuple[Any, int, int, int]:
    """Return a call's result, Python's peak in it, and what `tensor_bytes` makes of its events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
        _, python_peak = tracemalloc.get_traced_memory()
    return result, python_peak, *tensor_bytes(profiler, held)


def _of_allocator(
    device: torch.device, call: Callable[[], Any], held: int
) -> tuple[Any, int, int, int]:
    """Return the same as `_of_events`, counted by the allocator of a CUDA device."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    _, python_peak = tracemalloc.get_traced_memory()
    peak = held + torch.cuda.max_memory_allocated(device) - before
    return result, python_peak, peak, held + torch.cuda.memory_allocated(device) - before


def tensor_bytes(profiler: profile, held: int) -> tuple[int, int]:
    """Return the largest sum of tensor bytes held at once in a profile, and the sum at its end.

    Args:
        profiler: Ended, with memory events.
        held: Bytes held when it began.
    """
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise RuntimeError("the profiler recorded nothing; was it stopped?")
    events: list[Any] = sorted(
        (event for event in results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    peak = held
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


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


def latency(execute: list[float], sample: list[float]) -> Latency:
    """Return the quartiles of one runner's step times.

    On a worker without async scheduling a runner returns its output from `sample`, so that waiting
    for it is part of that.

    Args:
        execute: Seconds in execute, for each step.
        sample: Seconds in sample, for each step.
    """
    total = [first + second for first, second in zip(execute, sample, strict=True)]
    return Latency(
        execute_us=quartiles(execute),
        sample_us=quartiles(sample),
        output_us=None,
        total_us=quartiles(total),
    )


def quartiles(seconds: list[float]) -> Quartiles:
    """Return quartiles in microseconds; at least one value."""
    q1, median, q3 = (float(value) * 1e6 for value in np.percentile(seconds, (25, 50, 75)))
    return Quartiles(q1=q1, median=median, q3=q3, count=len(seconds))


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
