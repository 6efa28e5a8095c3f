"""Which operation allocated what a phase holds at its peak, from torch's own profiler.

A window is one profile over calls of several sides and phases. Each allocation in it is given to
the call that it was made in and to the outermost operation that made it; with stacks, to the
innermost function of a runner, and to the operation that this function called. Every tensor of the
window counts, however short its life.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from mrv2_diff.record import HeldBy, PhasePeak

MAX_OPS = 8
"""Of a peak that are kept, the largest first; the others are summed up."""
OTHERS = "others"

_T = TypeVar("_T")
_OURS = re.compile(r"(?:^|/)((?:mrv2|mrv2_compat|vllm)/[^(]*)\(\d+\): (.*)")
"""A frame of a runner; where its package lies is no part of its name."""
_ANY = re.compile(r"([^/(<]*)\(\d+\): (.*)")
_NOT_A_PLACE = re.compile(
    r"^<|(?:^|/)torch/|(?:^|/)mrv2_diff/(?:lockstep/|allocations|instruments)"
)

Key = tuple[str, str]
"""Side, and phase."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One allocation, or, with less than no bytes, the end of one."""

    time: int
    address: int
    num_bytes: int
    call: int | None
    """Index of the marked call; None outside of all."""
    op: str


@dataclass(slots=True)
class AllocationWatch:
    """Peaks of tensor bytes by side and phase, with what made them up.

    Bytes that a side held before a window began are not known and do not count. Those that it
    leaves in one call of a window count in the later ones.

    Args:
        device: Whose bytes are counted. Those of a CUDA device are as its allocator rounds them.
        stacks: Whether functions are told, which takes about ten times as long.
    """

    device: torch.device
    stacks: bool = True
    peaks: dict[Key, PhasePeak] = field(default_factory=dict)
    _profile: profile | None = None
    _calls: list[Key] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether a window is."""
        return self._profile is not None

    def open(self) -> None:
        """Begin a window."""
        self._calls = []
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=self.stacks
        )
        self._profile.start()

    def call(self, side: str, phase: str, call: Callable[[], _T]) -> _T:
        """Make one call of a window."""
        self._calls.append((side, phase))
        if self.stacks:  # a range would not be around what is called in it, as torch keeps them
            return _marked_call(call)
        with record_function(_marked_call.__name__):
            return call()

    def close(self) -> None:
        """End the window and add its peaks to those of the former ones."""
        ended, self._profile = self._profile, None
        assert ended is not None
        ended.stop()
        results = ended.profiler.kineto_results if ended.profiler is not None else None
        if results is None:
            raise RuntimeError("the profiler recorded nothing")
        changes, num_calls = _changes(results.experimental_event_tree(), self.device.type)
        if num_calls != len(self._calls):
            raise RuntimeError(
                f"{len(self._calls)} calls were made under the profiler, which saw {num_calls}"
            )
        for key, peak in peaks_of(changes, self._calls).items():
            former = self.peaks.get(key)
            if former is None or former.peak_bytes < peak.peak_bytes:
                self.peaks[key] = peak


def _marked_call(call: Callable[[], _T]) -> _T:
    """Call; the profiler keeps the stack, so this function's frame marks what is below it."""
    return call()


_MARK = f": {_marked_call.__name__}"


def _changes(tree: list[Any], device_type: str) -> tuple[list[_Change], int]:
    """Return a profile's changes of a device's memory in order, and how many calls it saw."""
    found: list[tuple[_Change, int | None]] = []
    marks: list[tuple[int, int]] = []
    """Time of each marked call, with the identity that its changes have until all are known."""
    waiting: list[tuple[Any, int | None, str, str]] = [(event, None, "", "") for event in tree]
    while waiting:
        event, mark, place, op = waiting.pop()
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == device_type:
                fields, name = event.extra_fields, (op or "a tensor") + (place and f" in {place}")
                size, when = int(fields.alloc_size), int(event.start_time_ns)
                found.append((_Change(when, int(fields.ptr or 0), size, None, name), mark))
            continue
        if event.tag == _EventType.PyCall:
            name = str(event.name)
            if name.endswith(_MARK):
                mark, place, op = len(marks), "", ""
                marks.append((int(event.start_time_ns), mark))
            elif (inner := _place(name)) is not None:
                place, op = inner, ""
        elif event.tag == _EventType.TorchOp and not op:
            op = str(event.name)
            if op == _marked_call.__name__:
                mark, op = len(marks), ""
                marks.append((int(event.start_time_ns), mark))
        waiting.extend((child, mark, place, op) for child in event.children)
    order = {mark: index for index, (_, mark) in enumerate(sorted(marks))}
    changes = [
        _Change(each.time, each.address, each.num_bytes, None if mark is None else order[mark],
                each.op)
        for each, mark in found
    ]  # fmt: skip
    return sorted(changes, key=lambda change: change.time), len(marks)


@cache  # there are few, and each is on the stack many times
def _place(frame: str) -> str | None:
    """Return a frame as `file: function` without where the file lies; None for torch's own."""
    if _NOT_A_PLACE.search(frame):
        return None
    found = _OURS.search(frame) or _ANY.search(frame)
    return None if found is None else f"{found[1]}: {found[2]}"


def peaks_of(changes: list[_Change], calls: list[Key]) -> dict[Key, PhasePeak]:
    """Return each side's peak in each of its phases.

    Args:
        changes: Of one window, in order.
        calls: Side and phase of each call, in order.
    """
    held: dict[str, int] = defaultdict(int)
    owners: dict[int, tuple[str, int, str]] = {}
    """By address: side, bytes and operation."""
    highest: dict[Key, tuple[int, int]] = dict.fromkeys(calls, (0, -1))
    """Bytes, and the index of the change that led to them."""
    for index, change in enumerate(changes):
        side = _apply(change, calls, owners, held)
        if side is not None and change.call is not None:
            key = calls[change.call]
            if key[0] == side and held[side] > highest[key][0]:
                highest[key] = held[side], index
    return _with_ops(changes, calls, highest)


def _apply(
    change: _Change, calls: list[Key], owners: dict[int, tuple[str, int, str]], held: dict[str, int]
) -> str | None:
    """Follow one change; return the side whose bytes it changed."""
    former = owners.pop(change.address, None)
    if former is not None:
        held[former[0]] -= former[1]
    if change.num_bytes > 0 and change.call is not None:
        side = calls[change.call][0]
        owners[change.address] = side, change.num_bytes, change.op
        held[side] += change.num_bytes
        return side
    return former[0] if former is not None else None


def _with_ops(
    changes: list[_Change], calls: list[Key], highest: dict[Key, tuple[int, int]]
) -> dict[Key, PhasePeak]:
    """Return the peaks with what was held at each, which takes going through all once more."""
    wanted: dict[int, list[Key]] = defaultdict(list)
    for key, (_, index) in highest.items():
        wanted[index].append(key)
    owners: dict[int, tuple[str, int, str]] = {}
    held: dict[str, int] = defaultdict(int)
    peaks = {key: PhasePeak(peak_bytes=0, held_by=()) for key in wanted.pop(-1, [])}
    for index, change in enumerate(changes):
        _apply(change, calls, owners, held)
        for key in wanted.get(index, ()):
            by_op: dict[str, int] = defaultdict(int)
            for side, num_bytes, op in owners.values():
                if side == key[0]:
                    by_op[op] += num_bytes
            peaks[key] = PhasePeak(peak_bytes=highest[key][0], held_by=_largest(by_op))
    return peaks


def _largest(by_op: dict[str, int]) -> tuple[HeldBy, ...]:
    ordered = sorted(by_op.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(num_bytes for _, num_bytes in ordered[MAX_OPS:])
    kept = [HeldBy(op=op, bytes=num_bytes) for op, num_bytes in ordered[:MAX_OPS]]
    return (*kept, *([HeldBy(op=OTHERS, bytes=rest)] if rest else []))
