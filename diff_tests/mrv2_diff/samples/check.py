"""Run one half of an op on guarded arguments, and say all that is not as the reference left it.

Every tensor lies in an allocation of its own with a guard before and behind, and the gaps of a
strided one are guards, too. Afterwards all of every allocation is looked at, not only the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrv2_diff.samples.sample import SENTINEL, Bound

_GUARD = 4096
"""Elements on each side. More than a kernel's block, so that a missing mask is reported rather than
crashes; and a multiple of 16 bytes, so that a tensor stays aligned as it would be alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A tensor and the whole allocation that it lies in."""

    view: Tensor
    memory: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What one argument got wrong."""

    argument: str
    fault: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.fault}"


def guard(values: Tensor, device: torch.device) -> Guarded:
    """Copy a tensor, strides and all, into a guarded allocation."""
    span = 1 + sum(
        (size - 1) * step for size, step in zip(values.shape, values.stride(), strict=True)
    )
    span = span if values.numel() else 0
    memory = torch.full((span + 2 * _GUARD,), SENTINEL, dtype=values.dtype, device=device)
    view = memory.as_strided(values.shape, values.stride(), _GUARD)
    view.copy_(values)
    return Guarded(view=view, memory=memory)


def run_guarded(
    function: Callable[..., object], arguments: Mapping[str, Any], device: torch.device
) -> dict[str, Guarded]:
    """Call the function on guarded copies, by position, and return the copies of the tensors."""
    guarded = {
        name: guard(value, device) for name, value in arguments.items() if isinstance(value, Tensor)
    }
    function(*(guarded[n].view if n in guarded else value for n, value in arguments.items()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return guarded


def changed_arguments(arguments: Mapping[str, Any], after: Mapping[str, Guarded]) -> frozenset[str]:
    """Return the names of the tensors whose memory a run changed, even by a bit."""
    before = {name: guard(arguments[name], torch.device("cpu")).memory for name in after}
    return frozenset(
        name
        for name, guarded in after.items()
        if not torch.equal(before[name].view(torch.uint8), guarded.memory.cpu().view(torch.uint8))
    )


def written_outside(arguments: Mapping[str, Any], after: Mapping[str, Guarded]) -> list[Difference]:
    """Return the tensors around which a run changed memory."""
    before = {name: guard(arguments[name], torch.device("cpu")) for name in after}
    faults = {name: _guard_fault(after[name], before[name]) for name in after}
    return [Difference(argument=name, fault=fault) for name, fault in faults.items() if fault]


def differences(
    expected: Mapping[str, Guarded],
    actual: Mapping[str, Guarded],
    bounds: Mapping[str, Bound],
) -> list[Difference]:
    """Compare all memory of two runs: values by their bound, and everything around them exactly."""
    found = []
    for name, theirs in expected.items():
        ours = actual[name]
        fault = _value_fault(ours.view.cpu(), theirs.view.cpu(), bounds.get(name))
        fault = fault or _guard_fault(ours, theirs)
        if fault:
            found.append(Difference(argument=name, fault=fault))
    return found


def _value_fault(ours: Tensor, theirs: Tensor, bound: Bound | None) -> str | None:
    if bound is None:
        # Bit for bit, but a NaN may carry other bits: IEEE 754 leaves them open.
        wrong = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    else:
        close = torch.isclose(ours, theirs, rtol=bound.rtol, atol=bound.atol, equal_nan=True)
        wrong = ~close
    count = int(wrong.sum())
    if not count:
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{count} of {wrong.numel()} values differ, the first at {list(first)}: "
        f"{ours[first].item()}, the reference has {theirs[first].item()}"
    )


def _guard_fault(ours: Guarded, theirs: Guarded) -> str | None:
    outside = torch.ones_like(theirs.memory, dtype=torch.bool, device="cpu")
    outside.as_strided(theirs.view.shape, theirs.view.stride(), _GUARD).fill_(False)
    cells = outside & (ours.memory.cpu() != theirs.memory.cpu())
    if not bool(cells.any()):
        return None
    return f"wrote outside, at element {int(cells.nonzero()[0]) - _GUARD} of its memory"
