"""What the runner needs from its host: a model, and attention metadata for it.

`mrv2_compat` implements these over vLLM; tests implement them with a model of a few lines. Every
call queues work on the current stream and returns without waiting.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mrv2.batch.inputs import InputBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """Exactly what the model is given."""

    input_ids: Tensor
    """[num_tokens] int32. Where the step was padded, more; what pads it has no meaning."""
    positions: Tensor
    """[num_tokens] int64, padded as `input_ids`."""
    attention: object
    """What `AttentionPlanner.plan` made, not padded; only the host's model knows its type. None
    where a forward is only captured."""
    replays: bool = False
    """Whether the model is to replay what it captured for so many tokens. It captures at the first
    such call, whose inputs are at the addresses of all later ones."""


class AttentionPlanner(Protocol):
    """Turns a batch into the metadata that the host's attention layers read."""

    def plan(self, batch: InputBatch) -> object:
        """Return the metadata of one step.

        A call may be captured in a CUDA graph, with what it queues: then the lengths of the batch's
        layout are the longest that can be, and those on the device change with each replay.

        Args:
            batch: Inputs of the step, with a block table and a slot mapping for each KV group.
        """


class Model(Protocol):
    """The network, from token ids to logits."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return hidden states, [num_tokens, hidden_size], and write the KV of every token.

        Of padded inputs it may return as many as there are.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [num_logits, vocab_size], of hidden [num_logits, hidden_size]."""
