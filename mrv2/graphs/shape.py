"""How a step reaches the device, and the shape that it is padded to. Pure host arithmetic."""

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from mrv2.batch.layout import BatchLayout
from mrv2.config import GraphSizes


class GraphMode(StrEnum):
    """How a step reaches the device."""

    EAGER = "eager"
    """Operation by operation."""
    FORWARD = "forward"
    """Operation by operation, but in the forward the model replays what it captured itself."""
    DECODE = "decode"
    """Every request draws one token after another: all in one launch, to the committed tokens."""
    MIXED = "mixed"
    """Prompts are among the requests: in one launch, too."""


WHOLE = frozenset({GraphMode.DECODE, GraphMode.MIXED})
"""Modes in which a whole step is one launch."""


class GraphKey(NamedTuple):
    """The mode of a step, and its padded shape."""

    mode: GraphMode
    num_tokens: int
    num_reqs: int


class GraphShapes:
    """Decides the mode and the padded shape of each step. The only place that does.

    Args:
        sizes: What may be padded to.
        max_num_reqs: Requests of the largest step.
    """

    def __init__(self, sizes: GraphSizes, max_num_reqs: int) -> None:
        self._max_num_reqs = max_num_reqs
        self._decodes = sorted(sizes.decodes)
        self._mixed = sorted(sizes.mixed)
        self._forwards = sorted(sizes.forwards)

    def choose(self, layout: BatchLayout, *, is_captured: bool) -> GraphKey:
        """Return the key of a step.

        What fits is replayed whole. What does not is padded for the model's own graphs where it
        fits those, and runs in its own shape otherwise.

        Args:
            layout: The step's.
            is_captured: Whether there are graphs to replay. Until then every step runs eagerly.
        """
        if not is_captured:
            return GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs)
        if layout.is_decode:
            size = _least(self._decodes, layout.num_reqs)
            if size is not None:
                return GraphKey(GraphMode.DECODE, size, size)
        size = _least(self._mixed, layout.num_tokens)
        if size is not None:
            return self.mixed(size)
        size = _least(self._forwards, layout.num_tokens)
        if size is not None:
            return GraphKey(GraphMode.FORWARD, size, layout.num_reqs)
        return GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs)

    def mixed(self, num_tokens: int) -> GraphKey:
        """Return the key of a captured step of so many tokens: as many requests as there can be."""
        return GraphKey(GraphMode.MIXED, num_tokens, min(num_tokens, self._max_num_reqs))


def _least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the least of the ascending sizes that is at least what is wanted."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
