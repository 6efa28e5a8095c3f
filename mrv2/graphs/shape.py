"""The shape of a step, and how it is launched. Pure host arithmetic.

Every step is launched eagerly, so the key is recorded and read by nobody: it is where captured
graphs come in.
"""

from enum import StrEnum
from typing import NamedTuple

from mrv2.batch.layout import BatchLayout


class GraphMode(StrEnum):
    """How the forward of a step reaches the device."""

    EAGER = "eager"
    """Operation by operation."""


class GraphKey(NamedTuple):
    """Identifies what a step could be captured as and replayed from."""

    mode: GraphMode
    num_tokens: int
    num_reqs: int


def choose(layout: BatchLayout) -> GraphKey:
    """Return the key of a step: its own shape, launched eagerly."""
    return GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs)
