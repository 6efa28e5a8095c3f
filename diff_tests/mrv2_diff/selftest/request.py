"""What is asked of a test of the harness."""

from dataclasses import dataclass

NUM_ALIKE = 2000
"""Cases in which nothing is wrong, unless something else is asked for."""
NUM_WORKERS = 2
"""Processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestRequest:
    """What to plant, and how many cases to run in which nothing is wrong."""

    only: tuple[str, ...] = ()
    """Names of faults."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults. Without these and names: all."""
    num_alike: int = NUM_ALIKE
    seed: int = 0
    plants: bool = True
    """Whether any fault is planted."""
    num_workers: int = NUM_WORKERS
