"""How a step reaches the device, and the shape that it is padded to. Pure host arithmetic."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from enum import StrEnum
from typing import NamedTuple

from mrv2.batch.layout import BatchLayout
from mrv2.config import GraphSizes
from mrv2.ports import Captures


class GraphMode(StrEnum):
    """How a step reaches the device."""

    EAGER = "eager"
    """Operation by operation."""
    FORWARD = "forward"
    """Operation by operation, but in the forward the model replays what it captured itself."""
    DECODE = "decode"
    """Every request runs equally many tokens and wants a logit of each: one token, and as many
    drafts. All in one launch, to the committed tokens."""
    MIXED = "mixed"
    """Prompts are among the requests: in one launch, too."""


WHOLE = frozenset({GraphMode.DECODE, GraphMode.MIXED})
"""Modes in which a whole step is one launch."""


class GraphKey(NamedTuple):
    """The mode of a step, its padded shape, and which variant of it."""

    mode: GraphMode
    num_tokens: int
    num_reqs: int
    variant: tuple[Hashable, ...] = ()
    """What extensions say of the step; graphs of different variants are different graphs."""

    @property
    def query_len(self) -> int:
        """Tokens of each request, of a uniform step."""
        return self.num_tokens // self.num_reqs


class GraphShapes:
    """Decides the mode and the padded shape of each step. The only place that does.

    Args:
        sizes: What may be padded to.
        max_num_reqs: Requests of the largest step.
        max_num_tokens: Tokens of the largest step.
    """

    def __init__(self, sizes: GraphSizes, max_num_reqs: int, max_num_tokens: int) -> None:
        self._max_num_reqs = max_num_reqs
        self._decodes = tuple(
            [n for n in sorted(sizes.decodes) if n * query_len <= max_num_tokens]
            if query_len in sizes.query_lens
            else []
            for query_len in range(1 + max(sizes.query_lens))
        )
        """Sizes by the tokens of each request."""
        self._mixed = sorted(sizes.mixed)
        self._forwards = sorted(sizes.forwards)

    def choose(
        self, layout: BatchLayout, captures: Captures, variant: tuple[Hashable, ...] = ()
    ) -> GraphKey:
        """Return the key of a step.

        What fits is replayed whole. What does not is padded for the model's own graphs where it
        fits those, and runs in its own shape otherwise.

        Args:
            layout: The step's.
            captures: How much of it may be replayed; NONE until something was captured.
            variant: Which variant of a whole step it needs.
        """
        if captures is Captures.NONE:
            return GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs)
        if captures is Captures.WHOLE:
            key = self._whole(layout, variant)
            if key is not None:
                return key
        if self._forwards:
            size = _least(self._forwards, layout.num_tokens)
            if size is not None:
                return GraphKey(GraphMode.FORWARD, size, layout.num_reqs)
        return GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs)

    def uniform(self) -> list[GraphKey]:
        """Return the keys of all uniform steps that are captured, the largest first."""
        keys = [
            GraphKey(GraphMode.DECODE, size * query_len, size)
            for query_len, sizes in enumerate(self._decodes)
            for size in sizes
        ]
        return sorted(keys, key=lambda key: key.num_tokens, reverse=True)

    def mixed(self, num_tokens: int) -> GraphKey:
        """Return the key of a captured step of so many tokens: as many requests as there can be."""
        return GraphKey(GraphMode.MIXED, num_tokens, min(num_tokens, self._max_num_reqs))

    def _whole(self, layout: BatchLayout, variant: tuple[Hashable, ...]) -> GraphKey | None:
        if layout.is_uniform and layout.max_query_len < len(self._decodes):
            size = _least(self._decodes[layout.max_query_len], layout.num_reqs)
            if size is not None:
                num_tokens = size * layout.max_query_len
                return GraphKey(GraphMode.DECODE, num_tokens, size, variant)
        size = _least(self._mixed, layout.num_tokens)
        if size is None or layout.max_num_logits > 1:  # it has one logit for each request
            return None
        return self.mixed(size)._replace(variant=variant)


def _least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the least of the ascending sizes that is at least what is wanted."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
