"""The head of a model that reads: a vector, or several, for each request whose prompt has run."""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mrv2.batch.commit import SampledTokens
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.errors import ConfigError, ExtensionError
from mrv2.head.protocol import HeadFactory, HeadResources, HeadResults, PlainDraw
from mrv2.plan import Arrival
from mrv2.ports import Captures, ForwardOutput
from mrv2.sampling.grammar import GrammarMask
from mrv2.state.protocol import RowState
from mrv2.step import Step

POOLED = "pooled"
"""The head's key in `RunnerOutput.extras`: by id, a tensor on the host for each request that got
its values in this step."""


class Pooler(RowState, Protocol):
    """Makes values of hidden states; a port of the host."""

    def pool(self, batch: InputBatch, output: ForwardOutput) -> Mapping[str, Tensor]:
        """Return the values of requests by id, those whose prompts go on left out.

        Args:
            batch: The step's inputs.
            output: The model's.
        """


class PoolHead:
    """Pools, and draws nothing; a row advances by what it ran.

    Args:
        resources: What it is built from.
        pooler: Makes the values.

    Raises:
        ConfigError: Steps may have drafts.
    """

    name = "pool"
    draws = False
    captures = Captures.FORWARD

    def __init__(self, resources: HeadResources, pooler: Pooler) -> None:
        if resources.config.max_drafts:
            raise ConfigError(
                f"max_drafts is {resources.config.max_drafts}, and a pooling head draws nothing: "
                "leave it at 0"
            )
        self._pooler = pooler
        self._transfers = resources.transfers
        device = resources.config.device
        self._nothing = torch.zeros(
            (resources.config.max_num_reqs, 1), dtype=torch.int64, device=device
        )

    def admit(self, row: int, arrival: Arrival) -> None:
        """Tell the pooler of a request."""
        self._pooler.admit(row, arrival)

    def evict(self, row: int) -> None:
        """Tell the pooler that a row is free."""
        self._pooler.evict(row)

    def flush(self) -> None:
        """Let the pooler stage what changed."""
        self._pooler.flush()

    def plain(self, batch: InputBatch, output: ForwardOutput) -> PlainDraw:
        """Refuse: what a pooler does depends on its requests.

        Raises:
            ExtensionError: Always; `captures` says so beforehand.
        """
        raise ExtensionError("a pooling head is not captured; keep its captures at FORWARD")

    def is_plain(self, layout: BatchLayout) -> bool:
        """Return False."""
        return False

    def finish(self, step: Step, grammar: GrammarMask | None) -> HeadResults:
        """Queue the pooling and the copies of its values.

        Raises:
            ExtensionError: The pooler gives values for a request that is not in the step.
        """
        num_reqs = step.layout.num_reqs
        pooled = self._pooler.pool(step.batch, step.output)
        strangers = sorted(set(pooled).difference(step.layout.req_ids))
        if strangers:
            raise ExtensionError(
                f"the pooler gives values for {strangers}, which are not in the step: leave them "
                "out"
            )
        copies = {req_id: self._transfers.download(each) for req_id, each in pooled.items()}
        return HeadResults(
            sampled=SampledTokens(
                token_ids=self._nothing[:num_reqs], num_sampled=step.batch.num_logits
            ),
            readers={POOLED: lambda: copies},
        )


def pool_head(pooler: Pooler) -> HeadFactory:
    """Return what makes a `PoolHead` around a pooler."""
    return partial(PoolHead, pooler=pooler)
