"""What a step gives back: copies under way with the event behind them, then host values."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrv2.batch.layout import BatchLayout
from mrv2.memory.ring import Slot
from mrv2.memory.transfers import Event, Transfers
from mrv2.sampling.prompt_logprobs import PromptScores
from mrv2.sampling.sampler import SamplerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Values of tokens on the host: logprobs, or logits in the modes that return those."""

    token_ids: npt.NDArray[np.int32]
    """[num_rows, 1 + k]. The row's own token, then others: the likeliest in order, or a list. A row
    that asked for fewer than k has more of the likeliest, or token 0, behind them."""
    values: npt.NDArray[np.float32]
    """[num_rows, 1 + k]; -inf beside a token 0 that only fills the row."""
    ranks: npt.NDArray[np.int32]
    """[num_rows]. How many tokens of the vocabulary have a value at least the own token's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Host values of one step."""

    req_ids: list[str]
    token_ids: list[list[int]]
    """For each request the tokens that it drew; empty for one in the middle of its prompt."""
    logprobs: Logprobs | None
    """Of the drawn tokens, a row for each logit in batch order; None if no request asked."""
    cu_num_logits: npt.NDArray[np.int32]
    """[num_reqs + 1]. First row of each request in `logprobs`."""
    prompt_logprobs: Mapping[str, Logprobs] = field(default_factory=dict)
    """Of the prompt's tokens but the first, a row each, for each request that asked and whose
    prompt this step completed. They are given once."""


class PendingOutput:
    """A step whose results are on their way to the host.

    Args:
        layout: The step's layout.
        sampled: Device results; copies are queued now. None where the step wrote its tokens itself.
        transfers: Carries the copies.
        prompt_scores: Of the prompts that the step completes; their copies are queued already.
        slot: Where the step itself writes a token of each request on the host, also of those that
            draw none; given if `sampled` is not.
    """

    def __init__(
        self,
        layout: BatchLayout,
        sampled: SamplerOutput | None,
        transfers: Transfers,
        prompt_scores: Mapping[str, PromptScores],
        slot: Slot | None = None,
    ) -> None:
        self._layout = layout
        self._prompt_scores = prompt_scores
        self._transfers = transfers
        self._slot = slot
        self._token_ids = None if sampled is None else transfers.download(sampled.token_ids)
        self._logprobs: tuple[Tensor, Tensor, Tensor] | None = None
        if sampled is not None and sampled.logprobs is not None:
            tensors = sampled.logprobs
            self._logprobs = (
                transfers.download(tensors.token_ids),
                transfers.download(tensors.values),
                transfers.download(tensors.ranks),
            )
        self._ready: Event | None = transfers.record()
        self._lent = [] if self._ready is None else [self._ready]
        """The event until it is given back, which one of the threads that wait does."""
        if slot is not None:
            slot.ready = self._ready

    def wait(self) -> RunnerOutput:
        """Wait for the copies and return host values. The only call of a step that blocks.

        It may be called again, and by two threads at once: a host may read outputs on a thread of
        its own while a step that is being queued needs the tokens, too.
        """
        ready = self._ready
        if ready is not None:
            ready.synchronize()
            if self._slot is not None:
                self._slot.ready = None
            self._ready = None
            with suppress(IndexError):
                self._transfers.give_back(self._lent.pop())
        layout = self._layout
        return RunnerOutput(
            req_ids=layout.req_ids,
            token_ids=_split(self._drawn(), layout),
            logprobs=self._host_logprobs(),
            cu_num_logits=layout.cu_num_logits,
            prompt_logprobs=_host_scores(self._prompt_scores) if self._prompt_scores else {},
        )

    def _drawn(self) -> list[int]:
        if self._token_ids is not None:
            copied: list[int] = self._token_ids.tolist()
            return copied
        assert self._slot is not None, "what is not copied is in a slot"
        written, layout = self._slot.take(), self._layout
        if layout.num_logits == layout.num_reqs:
            return written
        return [written[index] for index in layout.draws.tolist()]

    def _host_logprobs(self) -> Logprobs | None:
        if self._logprobs is None:
            return None
        return _host(*self._logprobs)


def _host_scores(prompt_scores: Mapping[str, PromptScores]) -> dict[str, Logprobs]:
    return {
        req_id: _host(scores.token_ids, scores.values, scores.ranks)
        for req_id, scores in prompt_scores.items()
    }


def _host(token_ids: Tensor, values: Tensor, ranks: Tensor) -> Logprobs:
    return Logprobs(token_ids=token_ids.numpy(), values=values.numpy(), ranks=ranks.numpy())


def _split(token_ids: list[int], layout: BatchLayout) -> list[list[int]]:
    if layout.max_num_logits == 1 and layout.num_logits == layout.num_reqs:
        return [[token_id] for token_id in token_ids]
    cu_num_logits = layout.cu_num_logits.tolist()
    return [token_ids[first:end] for first, end in pairwise(cu_num_logits)]
