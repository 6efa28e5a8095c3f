"""What the runner needs from its host: a model, and attention metadata for it.

`mrv2_compat` implements these over vLLM; tests implement them with a model of a few lines. Every
call queues work on the current stream and returns without waiting.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout

NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class Captures(IntEnum):
    """How much of a step may be captured in a graph; of several answers the least decides."""

    NONE = 0
    FORWARD = 1
    """The forward alone, by the model itself."""
    WHOLE = 2
    """All of it, from its inputs to its committed tokens."""


@dataclass(slots=True, kw_only=True)
class ForwardInputs:
    """Exactly what the model is given. Not frozen, since one is made at every step."""

    input_ids: Tensor
    """[num_tokens] int32. Where the step was padded, more; what pads it has no meaning."""
    positions: Tensor
    """[num_tokens] int64, or [d, num_tokens] where positions have several dimensions; padded as
    `input_ids`."""
    attention: object
    """What `AttentionPlanner.plan` made, not padded; only the host's model knows its type. None
    where a forward is only captured."""
    inputs_embeds: Tensor | None = None
    """[num_tokens, hidden_size], padded; given to the model in the place of `input_ids`."""
    further: Mapping[str, Tensor] = field(default_factory=lambda: NO_TENSORS)
    """Inputs by the model's own names, as extensions give them; each at the same address in every
    step."""
    intermediate: Mapping[str, Tensor] = field(default_factory=lambda: NO_TENSORS)
    """What an earlier part of the model computed, where it is cut into parts; by name."""
    replays: bool = False
    """Whether the model is to replay what it captured for so many tokens. It captures at the first
    such call, whose inputs are at the addresses of all later ones."""


@dataclass(slots=True, kw_only=True)
class ForwardOutput:
    """What the model returns. Not frozen, since one is made at every step."""

    hidden: Tensor
    """[num_tokens, hidden_size]. Of padded inputs it may be as many as there are."""
    auxiliary: tuple[Tensor, ...] = ()
    """Hidden states of layers that somebody asked the model for, each as `hidden`."""
    intermediate: Mapping[str, Tensor] = field(default_factory=lambda: NO_TENSORS)
    """What the model's next part goes on from, where it is cut into parts; by name."""


class AttentionPlanner(ABC):
    """Turns a batch into the metadata that the host's attention layers read; a base to inherit.

    Three kinds of backend are told apart. Where `captures` is WHOLE, metadata is made on the device
    inside the step's graph. Where `plans_replays` is set, too, the host plans before each replay.
    Where `captures` is less, steps are not replayed whole.
    """

    captures: Captures = Captures.WHOLE
    plans_replays: bool = False
    """Whether `plan_replay` is to be called before each replay of a whole step."""
    needs_exact_lengths: bool = False
    """Whether `plan` or `plan_replay` reads the layout's lengths on the host and must not be given
    bounds. While drafts are in flight, the runner then waits for them."""
    decode_threshold: int | None = None
    """Tokens of the longest query that counts as a decode, where the batch is to have its decodes
    first; None takes it in the host's order."""

    @abstractmethod
    def plan(self, batch: InputBatch) -> object:
        """Return the metadata of one step.

        A call may be captured in a CUDA graph, with what it queues: then the lengths of the batch's
        layout are the longest that can be, and those on the device change with each replay.

        Args:
            batch: Inputs of the step, with a block table and a slot mapping for each KV group.
        """

    def plan_replay(  # noqa: B027 - nothing is to be done where metadata is made in the graph
        self, layout: BatchLayout, num_reqs: int, num_tokens: int
    ) -> None:
        """Plan on the host what a captured step is about to read.

        Args:
            layout: The step's own requests.
            num_reqs: Requests of the captured step; those behind the layout's have no token.
            num_tokens: Tokens of the captured step.
        """


class Model(Protocol):
    """The network, from token ids to logits."""

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return hidden states, and write the KV of every token."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [num_logits, vocab_size], of hidden [num_logits, hidden_size]."""
