"""A step that was queued operation by operation."""

from collections.abc import Callable

from torch import Tensor

from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.execute.shape import GraphKey
from mrv2.head.protocol import Head
from mrv2.output import HostTokens
from mrv2.ports import ForwardOutput
from mrv2.step import Draws


class EagerStep:
    """Up to its hidden states; see `mrv2.step.Step`.

    Args:
        number: Counts steps.
        layout: The step's.
        key: Its mode and padded shape.
        batch: Its inputs.
        output: The model's, where it was padded with what pads it.
    """

    __slots__ = ("batch", "key", "layout", "number", "output")

    def __init__(
        self,
        number: int,
        layout: BatchLayout,
        key: GraphKey,
        batch: InputBatch,
        output: ForwardOutput,
    ) -> None:
        self.number = number
        self.layout = layout
        self.key = key
        self.batch = batch
        self.output = output

    def draws(self, compute_logits: Callable[[Tensor], Tensor]) -> Draws:
        """Compute the logits of whoever wants any."""
        batch, hidden = self.batch, self.output.hidden
        if not batch.has_all_logits:
            hidden = hidden.index_select(0, batch.logits_indices)
        elif hidden.shape[0] != self.layout.num_tokens:
            hidden = hidden[: self.layout.num_tokens]
        return Draws(
            logits=compute_logits(hidden),
            view=batch.logits_view,
            cu_num_logits=batch.cu_num_logits,
            token_ids=None,
        )

    def tokens(self, head: Head) -> HostTokens | None:
        """Return None: nothing was drawn yet."""
        return None
