"""Arguments for every op of the runner, keyed by op name: what its two halves are compared on."""

from __future__ import annotations

import importlib
import pkgutil
import zlib

import torch

import mrv2
from mrv2.ops.twin import TwinOp, registered_ops
from mrv2_diff.samples.sample import Bound, OpSamples, Sample

__all__ = ["SAMPLES", "Bound", "OpSamples", "Sample", "all_ops", "samples_of"]

SAMPLES: dict[str, OpSamples] = {
    name: samples
    for info in pkgutil.iter_modules(__path__, f"{__name__}.")
    for name, samples in getattr(importlib.import_module(info.name), "SAMPLES", {}).items()
}


def all_ops() -> list[TwinOp[...]]:
    """Import every module of the runner, so that each op has registered itself, and return them."""
    for module in pkgutil.walk_packages(mrv2.__path__, "mrv2."):
        importlib.import_module(module.name)
    return list(registered_ops())


def samples_of(op_name: str) -> list[Sample]:
    """Return the op's samples, the same ones every time: the generator is seeded by the name.

    Raises:
        KeyError: The op has none.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(op_name.encode()))
    return list(SAMPLES[op_name].generate(generator))
