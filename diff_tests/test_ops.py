"""Every op of the runner: its two halves leave the same memory, and change only what they may.

Under the interpreter (`TRITON_INTERPRET=1`) and on a GPU the kernel is compared with the reference.
In every session the reference is held to its contract: it stays inside its tensors, and changes
what it declares and nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mrv2.ops.twin import INTERPRETED, TwinOp
from mrv2_diff.samples import SAMPLES, Sample, all_ops, samples_of
from mrv2_diff.samples.check import (
    changed_arguments,
    differences,
    run_guarded,
    written_outside,
)

CPU = torch.device("cpu")
OPS = all_ops()
# An op without samples has no case here and fails `test_every_op_has_samples`.
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{sample.name}")
    for op in OPS
    if op.name in SAMPLES
    for sample in samples_of(op.name)
]
each_op = pytest.mark.parametrize(
    "op", [op for op in OPS if op.name in SAMPLES], ids=lambda op: op.name
)
each_case = pytest.mark.parametrize(("op", "sample"), CASES)
# Kernels in which one program loops over a row: their grid does not depend on the block.
LOOPING = ("sampling.draw", "sampling.score_tokens")
each_looping_case = pytest.mark.parametrize(
    ("op", "sample"),
    [
        pytest.param(op, sample, id=f"{op.name}-{sample.name}")
        for op in OPS
        if op.name in LOOPING
        for sample in samples_of(op.name)
        if sample.arguments["logits"].shape[1] < 100
    ],
)


def in_order(op: TwinOp[...], sample: Sample) -> dict[str, Any]:
    """The sample's arguments in the order of the op's parameters."""
    assert set(sample.arguments) == set(op.parameters)
    return {name: sample.arguments[name] for name in op.parameters}


def assert_kernel_equals_reference(op: TwinOp[...], sample: Sample, device: torch.device) -> None:
    """Run both halves on guarded copies and compare all of their memory."""
    arguments = in_order(op, sample)
    expected = run_guarded(op.reference, arguments, CPU)
    actual = run_guarded(lambda *values: op.launch(*values).run(), arguments, device)
    faults = differences(expected, actual, SAMPLES[op.name].bounds)
    assert not faults, "; ".join(map(str, faults))


def test_every_op_has_samples() -> None:
    assert OPS
    assert {op.name for op in OPS} == set(SAMPLES)


@each_op
def test_samples_and_bounds_name_what_exists(op: TwinOp[...]) -> None:
    names = [sample.name for sample in samples_of(op.name)]
    assert names
    assert len(names) == len(set(names))
    assert set(SAMPLES[op.name].bounds) <= op.mutates


@each_op
def test_every_output_changes_in_some_sample(op: TwinOp[...]) -> None:
    changed: set[str] = set()
    for sample in samples_of(op.name):
        arguments = in_order(op, sample)
        changed |= changed_arguments(arguments, run_guarded(op.reference, arguments, CPU))
    assert changed == op.mutates


@each_case
def test_reference_changes_only_what_it_declares(op: TwinOp[...], sample: Sample) -> None:
    arguments = in_order(op, sample)
    after = run_guarded(op.reference, arguments, CPU)
    assert changed_arguments(arguments, after) <= op.mutates
    assert not written_outside(arguments, after)


def assert_same_for_any_block(op: TwinOp[...], sample: Sample, device: torch.device) -> None:
    """Run the kernel with smaller blocks: the integers that it writes may not change."""
    arguments = in_order(op, sample)
    expected = run_guarded(op.reference, arguments, CPU)
    for block in (16, 128):

        def smaller(*values: Any, block: int = block) -> None:
            launch = op.launch(*values)
            dataclasses.replace(launch, constexprs={**launch.constexprs, "BLOCK": block}).run()

        assert not differences(expected, run_guarded(smaller, arguments, device), {})


@pytest.mark.gpu
@each_looping_case
def test_compiled_kernel_is_the_same_for_any_block(op: TwinOp[...], sample: Sample) -> None:
    assert_same_for_any_block(op, sample, torch.device("cuda"))


@pytest.mark.gpu
@each_case
def test_compiled_kernel_equals_reference(op: TwinOp[...], sample: Sample) -> None:
    assert_kernel_equals_reference(op, sample, torch.device("cuda"))


if INTERPRETED:

    @each_case
    def test_interpreted_kernel_equals_reference(op: TwinOp[...], sample: Sample) -> None:
        assert_kernel_equals_reference(op, sample, CPU)

    @each_looping_case
    def test_interpreted_kernel_is_the_same_for_any_block(op: TwinOp[...], sample: Sample) -> None:
        assert_same_for_any_block(op, sample, CPU)
