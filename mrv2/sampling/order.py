"""Floats as integers of the same order, for searches and maxima inside kernels."""

import triton
import triton.language as tl


@triton.jit
def to_ordered(value: tl.tensor) -> tl.tensor:
    """Return int32 in the order of float32 values. -0 equals 0; NaN is the caller's to place."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(ordered: tl.tensor) -> tl.tensor:
    """Return the float32 that `to_ordered` made int32 of, -0 as 0."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
