"""V1's weights, made readable by another process.

On a CUDA device a tensor is opened in the other process through CUDA's handles, and nothing moves.
On a CPU V1's parameters are moved into shared memory once, at start.

What is no parameter cannot be shared: on a CPU vLLM packs the weight of each linear layer into
memory of oneDNN's own, which has no name by which another process could open it.
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies in the shared memory."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class SharedWeights:
    """How another process finds the parameters, by their names."""

    path: str | None = None
    """Where the other process opens the shared memory of a CPU, until `release`."""
    handle: int = -1
    """This process's own of that memory."""
    num_bytes: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    handles: dict[str, Any] = field(default_factory=dict)
    """What torch's own reduction makes of CUDA tensors."""


def share(module: nn.Module) -> SharedWeights:
    """Make a module's parameters readable by another process.

    Raises:
        OSError: There is not enough shared memory. Nothing was moved.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.numel()}
    if any(parameter.device.type == "cuda" for parameter in parameters.values()):
        from torch.multiprocessing.reductions import reduce_tensor

        return SharedWeights(
            handles={name: reduce_tensor(p.detach()) for name, p in parameters.items()}
        )
    dense = {name: p for name, p in parameters.items() if _is_dense(p)}
    weights = _plan(dense)
    # Memory without a name in any folder: nothing is left behind, however this process ends.
    weights.handle = os.memfd_create("mrv2-shadow")
    try:
        # A page that cannot be had ends the process when it is written, so it is asked for before.
        os.posix_fallocate(weights.handle, 0, weights.num_bytes)
        memory = mmap.mmap(weights.handle, weights.num_bytes)
    except OSError:
        release(weights)
        raise
    weights.path = f"/proc/{os.getpid()}/fd/{weights.handle}"
    views = {name: _view(memory, place) for name, place in weights.places.items()}
    for name, view in views.items():
        view.copy_(dense[name].data)
    for name, view in views.items():
        dense[name].data = view
    return weights


def adopt(module: nn.Module, weights: SharedWeights) -> tuple[int, int]:
    """Let a module's parameters lie where another process shares its own.

    Returns:
        How many parameters are shared, and how many remain the module's own.

    Raises:
        ValueError: A parameter has another shape or type than the one of its name.
    """
    shared = {name: rebuild(*rest) for name, (rebuild, rest) in weights.handles.items()}
    if weights.path is not None:
        handle = os.open(weights.path, os.O_RDWR)
        try:
            memory = mmap.mmap(handle, weights.num_bytes)
        finally:
            os.close(handle)
        shared = {name: _view(memory, place) for name, place in weights.places.items()}
    num_shared = num_own = 0
    for name, parameter in module.named_parameters():
        theirs = shared.get(name)
        if theirs is None:
            num_own += bool(parameter.numel())
            continue
        if (theirs.shape, theirs.dtype) != (parameter.shape, parameter.dtype):
            raise ValueError(
                f"the weight {name} is {tuple(theirs.shape)} {theirs.dtype} in V1's model and "
                f"{tuple(parameter.shape)} {parameter.dtype} in the shadow's"
            )
        parameter.data = theirs
        num_shared += 1
    return num_shared, num_own


def release(weights: SharedWeights) -> None:
    """Let no other process open the memory any more; those that have it keep it."""
    if weights.handle >= 0:
        os.close(weights.handle)
        weights.handle = -1


def _plan(parameters: Mapping[str, Tensor]) -> SharedWeights:
    weights = SharedWeights()
    end = 0
    for name, parameter in parameters.items():
        weights.places[name] = Place(
            offset=end,
            shape=tuple(parameter.shape),
            stride=parameter.stride(),
            dtype=parameter.dtype,
        )
        end += -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT
    weights.num_bytes = max(end, 1)
    return weights


def _is_dense(parameter: Tensor) -> bool:
    """Say whether a tensor's elements fill one piece of memory, in whatever order."""
    return parameter.numel() == _extent(parameter.shape, parameter.stride())


def _extent(shape: Iterable[int], stride: Iterable[int]) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _view(memory: mmap.mmap, place: Place) -> Tensor:
    count = _extent(place.shape, place.stride)
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return flat.as_strided(place.shape, place.stride)
