"""What a head is: from hidden states to results, and to what is committed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from mrv2.batch.commit import SampledTokens
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.config import RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.output import NO_READERS, Reader
from mrv2.ports import Captures, ForwardOutput, Model
from mrv2.sampling.grammar import GrammarMask
from mrv2.sampling.logprobs import LogprobsTensors
from mrv2.state.protocol import RowState
from mrv2.state.requests import RequestColumns
from mrv2.step import Step
from mrv2.trace import StepTrace


@dataclass(slots=True, kw_only=True)
class PlainDraw:
    """What a head makes without asking any row what it wants."""

    logits: Tensor
    """[num_logits, vocab_size], the model's; of another width where a head has none."""
    token_ids: Tensor
    """[num_logits] int64."""
    sampled: SampledTokens

    def tensors(self) -> list[Tensor]:
        """Return what a replay writes."""
        return [self.logits, self.token_ids, self.sampled.token_ids, self.sampled.num_sampled]

    def over(self, tensors: Sequence[Tensor]) -> "PlainDraw":
        """Return the same over other tensors, in the order of `tensors`."""
        logits, token_ids, by_request, num_sampled = tensors
        sampled = SampledTokens(token_ids=by_request, num_sampled=num_sampled)
        return PlainDraw(logits=logits, token_ids=token_ids, sampled=sampled)


@dataclass(slots=True, kw_only=True)
class HeadResults:
    """What a head makes of a step."""

    sampled: SampledTokens
    logprobs: LogprobsTensors | None = None
    """For every logit, as many as the most demanding request asked for; None if none asked."""
    readers: Mapping[str, Reader] = field(default_factory=lambda: NO_READERS)
    """Further values for the host, by name; their copies are queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResources:
    """What a head may be built from."""

    config: RunnerConfig
    model: Model
    requests: RequestColumns
    arena: Arena
    trace: StepTrace

    @property
    def transfers(self) -> Transfers:
        """Carries what is not in the arena."""
        return self.arena.transfers


class Head(RowState, Protocol):
    """Turns hidden states into results. Nothing in it may wait for the device.

    It samples 1 to n tokens for each request that has n logits, and none for any other.
    """

    name: str
    """For messages."""
    draws: bool
    """Whether requests that have run their known tokens want logits, and get tokens."""
    captures: Captures
    """How much of a step may be captured where this is its head."""

    def plain(self, batch: InputBatch, output: ForwardOutput) -> PlainDraw:
        """Queue what is the same whatever the rows ask for; it is captured where steps are.

        Args:
            batch: The step's inputs, padded. Every request has a logit.
            output: The model's.
        """

    def is_plain(self, layout: BatchLayout) -> bool:
        """Say whether `plain` is all that the requests of a step want."""

    def finish(self, step: Step, grammar: GrammarMask | None) -> HeadResults:
        """Queue what the requests want, and return it.

        Args:
            step: Its forward is queued. If it was replayed, what `plain` drew is committed.
            grammar: What grammars allow; it masks the model's logits before anything reads them.
        """


HeadFactory: TypeAlias = Callable[[HeadResources], Head]
