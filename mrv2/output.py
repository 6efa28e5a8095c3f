"""What a step gives back: copies under way with the event behind them, then host values."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrv2.batch.layout import BatchLayout
from mrv2.memory.transfers import Event, Transfers
from mrv2.sampling.sampler import SamplerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities on the host, a row for each logit in batch order."""

    token_ids: npt.NDArray[np.int64]
    """[num_logits, 1 + k]. The drawn token, then the k likeliest."""
    values: npt.NDArray[np.float32]
    """[num_logits, 1 + k]."""
    ranks: npt.NDArray[np.int64]
    """[num_logits]. Rank of the drawn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Host values of one step."""

    req_ids: list[str]
    token_ids: list[list[int]]
    """For each request the tokens that it drew; empty for one in the middle of its prompt."""
    logprobs: Logprobs | None
    cu_num_logits: npt.NDArray[np.int32]
    """[num_reqs + 1]. First row of each request in `logprobs`."""


class PendingOutput:
    """A step whose results are on their way to the host.

    Args:
        layout: The step's layout.
        sampled: Device results; copies are queued now.
        transfers: Carries the copies.
    """

    def __init__(self, layout: BatchLayout, sampled: SamplerOutput, transfers: Transfers) -> None:
        self._layout = layout
        self._token_ids = transfers.download(sampled.token_ids)
        self._logprobs: tuple[Tensor, Tensor, Tensor] | None = None
        if sampled.logprobs is not None:
            tensors = sampled.logprobs
            self._logprobs = (
                transfers.download(tensors.token_ids),
                transfers.download(tensors.values),
                transfers.download(tensors.ranks),
            )
        self._ready: Event | None = transfers.record()

    def wait(self) -> RunnerOutput:
        """Wait for the copies and return host values. The only call of a step that blocks."""
        if self._ready is not None:
            self._ready.synchronize()
        layout = self._layout
        return RunnerOutput(
            req_ids=layout.req_ids,
            token_ids=_split(self._token_ids.tolist(), layout),
            logprobs=self._host_logprobs(),
            cu_num_logits=layout.cu_num_logits,
        )

    def _host_logprobs(self) -> Logprobs | None:
        if self._logprobs is None:
            return None
        token_ids, values, ranks = self._logprobs
        return Logprobs(token_ids=token_ids.numpy(), values=values.numpy(), ranks=ranks.numpy())


def _split(token_ids: list[int], layout: BatchLayout) -> list[list[int]]:
    if layout.max_num_logits == 1 and layout.num_logits == layout.num_reqs:
        return [[token_id] for token_id in token_ids]
    cu_num_logits = layout.cu_num_logits.tolist()
    return [token_ids[first:end] for first, end in pairwise(cu_num_logits)]
