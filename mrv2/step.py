"""A step between its forward and its sampling, as heads and extensions see it.

There are two kinds, one that ran operation by operation and one that a graph replayed
(`mrv2.execute`). They answer the same questions; neither a head nor an extension asks which it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.ports import ForwardOutput
from mrv2.sampling.stage import LogitsView


@dataclass(slots=True, kw_only=True)
class Draws:
    """The logits of those requests of a step that want any."""

    logits: Tensor
    """[num_logits, vocab_size], the model's."""
    view: LogitsView
    """Whose they are."""
    cu_num_logits: Tensor
    """[num_reqs + 1] int32. First logit of each request."""
    token_ids: Tensor | None
    """[num_logits] int64. What the launch of the step drew plainly, and committed; None where it
    drew nothing."""


class Step(Protocol):
    """A step whose forward is queued."""

    number: int
    """Counts steps, so that one is sampled once and in order."""
    layout: BatchLayout

    @property
    def batch(self) -> InputBatch:
        """Its inputs, without what pads them."""

    @property
    def output(self) -> ForwardOutput:
        """What the model returned, without what pads it."""

    def draws(self, compute_logits: Callable[[Tensor], Tensor]) -> Draws:
        """Return the logits of whoever wants any.

        Args:
            compute_logits: The model's; called where they were not computed yet.
        """
