"""Faults that are put into the runner from outside, one at a time, to see whether they are found.

Each names beforehand the first value of the step chain that must differ, and a case in which it
can. Faults of the adapter import vLLM: prepare the process first.
"""

from mrv2_diff.mutants import inputs, lifecycle, outputs, sampling
from mrv2_diff.mutants.mutant import Mutant, Patch

MUTANTS: tuple[Mutant, ...] = (
    *inputs.MUTANTS,
    *lifecycle.MUTANTS,
    *sampling.MUTANTS,
    *outputs.MUTANTS,
)

__all__ = ["MUTANTS", "Mutant", "Patch"]
