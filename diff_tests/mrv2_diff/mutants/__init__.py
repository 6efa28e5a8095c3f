"""Faults that are put into the runner from outside, one at a time, to see whether they are found.

Each names beforehand the first value of the step chain that must differ, and a case in which it
can.
"""

from mrv2_diff import process

process.prepare()

# E402: faults of the adapter import vLLM, which reads the environment when it is imported.
from mrv2_diff.mutants import inputs, lifecycle, outputs, sampling  # noqa: E402
from mrv2_diff.mutants.mutant import Mutant, Patch  # noqa: E402

MUTANTS: tuple[Mutant, ...] = (
    *inputs.MUTANTS,
    *lifecycle.MUTANTS,
    *sampling.MUTANTS,
    *outputs.MUTANTS,
)

__all__ = ["MUTANTS", "Mutant", "Patch"]
