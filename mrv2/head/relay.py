"""The head of a rank that is not the last: it hands tensors on, and commits what another drew."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from mrv2.batch.commit import SampledTokens
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.head.protocol import HeadFactory, HeadResources, HeadResults, PlainDraw
from mrv2.plan import Arrival
from mrv2.ports import Captures, ForwardOutput
from mrv2.sampling.grammar import GrammarMask
from mrv2.step import Step

Receive: TypeAlias = Callable[[Step], SampledTokens]
"""Returns what the last rank sampled for a step, on this rank's device."""


class RelayHead:
    """Passes on what the model's next part goes on from.

    The host takes `step.output.intermediate` between the two calls of a step. Rows advance here as
    they do on the last rank, by the same tokens.

    Args:
        resources: What it is built from.
        receive: Called when the step is sampled.
    """

    name = "relay"
    draws = True
    captures = Captures.WHOLE

    def __init__(self, resources: HeadResources, receive: Receive) -> None:
        config = resources.config
        self._receive = receive
        self._none = torch.zeros(
            (config.max_num_tokens, 1), dtype=torch.int64, device=config.device
        )

    def admit(self, row: int, arrival: Arrival) -> None:
        """Nothing: the last rank knows what a request asks for."""

    def evict(self, row: int) -> None:
        """Nothing: there is no state."""

    def flush(self) -> None:
        """Nothing: there is no state."""

    def plain(self, batch: InputBatch, output: ForwardOutput) -> PlainDraw:
        """Stand in for tokens that are still to be drawn elsewhere: `finish` commits those."""
        num_reqs, num_logits = len(batch.rows), len(batch.logits_view.logit_rows)
        width = max(batch.layout.max_num_logits, 1)
        none = self._none[: num_reqs * width].view(num_reqs, width)
        return PlainDraw(
            logits=self._none[:num_logits],
            token_ids=self._none[:num_logits, 0],
            sampled=SampledTokens(token_ids=none, num_sampled=batch.num_logits),
        )

    def is_plain(self, layout: BatchLayout) -> bool:
        """Return False: each step has tokens to be received."""
        return False

    def finish(self, step: Step, grammar: GrammarMask | None) -> HeadResults:
        """Return what the last rank sampled. Grammars are its business."""
        return HeadResults(sampled=self._receive(step))


def relay_head(receive: Receive) -> HeadFactory:
    """Return what makes a `RelayHead` that receives tokens so."""
    return partial(RelayHead, receive=receive)
