"""What a step gives back: copies under way with the event behind them, then host values."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrv2.batch.commit import SampledTokens
from mrv2.batch.layout import BatchLayout
from mrv2.errors import ExtensionError
from mrv2.memory.ring import REJECTED, Slot
from mrv2.memory.transfers import Event, Transfers
from mrv2.plan import NO_EXTRAS
from mrv2.sampling.logprobs import LogprobsTensors

Int32 = npt.NDArray[np.int32]
Reader = Callable[[], object]
"""Returns a host value; called once the step has passed, maybe more than once."""
NO_READERS: Mapping[str, Reader] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Values of tokens on the host: logprobs, or logits in the modes that return those."""

    token_ids: Int32
    """[num_rows, 1 + k]. The row's own token, then others: the likeliest in order, or a list. A row
    that asked for fewer than k has more of the likeliest, or token 0, behind them."""
    values: npt.NDArray[np.float32]
    """[num_rows, 1 + k]; -inf beside a token 0 that only fills the row."""
    ranks: Int32
    """[num_rows]. How many tokens of the vocabulary have a value at least the own token's."""

    def rows(self, places: npt.NDArray[np.intp]) -> "Logprobs":
        """Return some of the rows, in the order of `places`."""
        return Logprobs(
            token_ids=self.token_ids[places],
            values=self.values[places],
            ranks=self.ranks[places],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Host values of one step, in the host's order."""

    req_ids: list[str]
    token_ids: list[list[int]]
    """For each request the tokens that it sampled; empty for one in the middle of its prompt."""
    logprobs: Logprobs | None
    """Of the sampled tokens, a row each; None if no request asked."""
    cu_num_sampled: Int32
    """[num_reqs + 1]. First row of each request in `logprobs`."""
    batch_id: int
    """The same in outputs of the same requests in the same order; 0 is the same as nothing."""
    extras: Mapping[str, object] = field(default_factory=lambda: NO_EXTRAS)
    """What extensions and the head give, by their names; who gives nothing is not in it."""


class HostTokens(Protocol):
    """A step's sampled tokens on their way to the host."""

    may_reject: bool
    """Whether a request that has a logit may have other than one token for each."""

    def take(self) -> list[int]:
        """Return [num_reqs, 1 + k] tokens one after the other, `REJECTED` behind each request's.

        The step must have passed. Unless `may_reject` is set, what a request without a logit has
        is without meaning.
        """


class DownloadedTokens:
    """Tokens that are copied to memory of their own.

    Args:
        sampled: On the device.
        transfers: Queues the copies.
        may_reject: As in `HostTokens`.
    """

    __slots__ = ("_num_sampled", "_token_ids", "may_reject")

    def __init__(self, sampled: SampledTokens, transfers: Transfers, *, may_reject: bool) -> None:
        self.may_reject = may_reject
        self._token_ids = transfers.download(sampled.token_ids)
        self._num_sampled = transfers.download(sampled.num_sampled) if may_reject else None

    def take(self) -> list[int]:
        """Return the tokens."""
        token_ids: list[int]
        if self._num_sampled is None:
            token_ids = self._token_ids.flatten().tolist()
            return token_ids
        places, counts = np.arange(self._token_ids.shape[1]), self._num_sampled.numpy()
        kept = np.where(places < counts[:, None], self._token_ids.numpy(), REJECTED)
        token_ids = kept.ravel().tolist()
        return token_ids


class PendingOutput:
    """A step whose results are on their way to the host.

    Args:
        layout: The step's layout.
        tokens: What was sampled; its copies are queued already, or the step makes them itself.
        logprobs: Device results; copies are queued now.
        transfers: Carries the copies.
        readers: Further values by name, whose copies are queued already.
        forced: For each request the tokens that were committed in place of the sampled ones; None
            where those were.
    """

    __slots__ = (
        "_counts",
        "_forced",
        "_layout",
        "_lent",
        "_logprobs",
        "_readers",
        "_ready",
        "_tokens",
        "_transfers",
    )

    def __init__(
        self,
        layout: BatchLayout,
        tokens: HostTokens,
        logprobs: LogprobsTensors | None,
        transfers: Transfers,
        readers: Mapping[str, Reader] = NO_READERS,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._layout = layout
        self._tokens = tokens
        self._readers = readers
        self._forced = forced
        self._transfers = transfers
        self._logprobs: tuple[Tensor, Tensor, Tensor] | None = None
        if logprobs is not None:
            self._logprobs = (
                transfers.download(logprobs.token_ids),
                transfers.download(logprobs.values),
                transfers.download(logprobs.ranks),
            )
        self._ready: Event | None = transfers.record()
        self._lent = [] if self._ready is None else [self._ready]
        """The event until it is given back, which one of the threads that wait does."""
        self._counts: Int32 | None = None
        if isinstance(tokens, Slot):
            tokens.ready = self._ready

    def wait(self) -> RunnerOutput:
        """Wait for the copies and return host values. The only call of a step that blocks.

        It may be called again, and by two threads at once: a host may read outputs on a thread of
        its own while a step that is being queued needs the tokens, too.

        Raises:
            ExtensionError: The head sampled more tokens for a request than it has logits, or none
                for one that has some.
        """
        self._synchronize()
        layout = self._layout
        token_ids = self._token_ids()
        extras = NO_EXTRAS
        if self._readers:
            extras = {name: read() for name, read in self._readers.items()}
        logprobs = None if self._logprobs is None else host_logprobs(*self._logprobs)
        if layout.max_num_logits <= 1 and not self._tokens.may_reject:
            cu_num_sampled = layout.cu_num_logits
        else:
            self._check(token_ids)
            cu_num_sampled, logprobs = _of_sampled(layout, token_ids, logprobs)
        output = RunnerOutput(
            req_ids=layout.req_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            cu_num_sampled=cu_num_sampled,
            batch_id=layout.batch_id,
            extras=extras,
        )
        return output if layout.order is None else _in_the_hosts_order(output, layout.order)

    def committed(self) -> list[list[int]]:
        """Wait, and return for each request, in batch order, the tokens that its row was given."""
        if self._forced is not None:
            return [list(tokens) for tokens in self._forced]
        self._synchronize()
        return self._token_ids()

    def counts(self) -> Int32 | None:
        """Return how many tokens each request was given, [num_reqs] in batch order.

        None where nobody has waited for the step yet.
        """
        if self._counts is None and self._ready is None:
            counts = np.array([len(tokens) for tokens in self.committed()], dtype=np.int32)
            # A head may have been wrong about them; what was said of rows stays within bounds.
            self._counts = np.minimum(counts, self._layout.num_logits_of)
        return self._counts

    def _synchronize(self) -> None:
        ready = self._ready
        if ready is None:
            return
        ready.synchronize()
        if isinstance(self._tokens, Slot):
            self._tokens.ready = None
        self._ready = None
        with suppress(IndexError):
            self._transfers.give_back(self._lent.pop())

    def _token_ids(self) -> list[list[int]]:
        """Return the sampled tokens of each request, in batch order."""
        layout, tokens = self._layout, self._tokens.take()
        if layout.max_num_logits <= 1 and not self._tokens.may_reject:
            if layout.num_logits == layout.num_reqs:
                return [[token_id] for token_id in tokens]
            pairs = zip(tokens, layout.num_logits_of.tolist(), strict=True)
            return [[token_id] if num_logits else [] for token_id, num_logits in pairs]
        width = len(tokens) // layout.num_reqs
        by_request = [tokens[at : at + width] for at in range(0, len(tokens), width)]
        return [[each for each in row if each != REJECTED] for row in by_request]

    def _check(self, token_ids: list[list[int]]) -> None:
        """Refuse what a head may not sample.

        Raises:
            ExtensionError: As `wait`.
        """
        layout = self._layout
        for req_id, num_logits, sampled in zip(
            layout.req_ids, layout.num_logits_of.tolist(), token_ids, strict=True
        ):
            if not min(num_logits, 1) <= len(sampled) <= num_logits:
                raise ExtensionError(
                    f"the head sampled {len(sampled)} tokens for request {req_id!r}, which has "
                    f"{num_logits} logits: sample at least one and no more than it has"
                )


def host_logprobs(token_ids: Tensor, values: Tensor, ranks: Tensor) -> Logprobs:
    """Return what was copied to the host."""
    return Logprobs(token_ids=token_ids.numpy(), values=values.numpy(), ranks=ranks.numpy())


def _of_sampled(
    layout: BatchLayout, token_ids: list[list[int]], logprobs: Logprobs | None
) -> tuple[Int32, Logprobs | None]:
    """Return the first row of each request among the sampled tokens, and the logprobs of these."""
    counts = np.array([len(tokens) for tokens in token_ids], dtype=np.int32)
    cu_num_sampled = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    if logprobs is None:
        return cu_num_sampled, None
    offsets = np.arange(layout.num_logits) - layout.cu_num_logits[:-1].repeat(layout.num_logits_of)
    return cu_num_sampled, logprobs.rows(
        np.flatnonzero(offsets < counts.repeat(layout.num_logits_of))
    )


def _in_the_hosts_order(output: RunnerOutput, order: npt.NDArray[np.int64]) -> RunnerOutput:
    """Return a batch's output with its requests where the host had them.

    Args:
        output: In batch order.
        order: [num_reqs]. Batch position -> place in the host's order.
    """
    batch_idx = order.argsort().tolist()
    spans = list(pairwise(output.cu_num_sampled.tolist()))
    counts = np.diff(output.cu_num_sampled)[batch_idx]
    logprobs = output.logprobs
    if logprobs is not None:
        places = [place for index in batch_idx for place in range(*spans[index])]
        logprobs = logprobs.rows(np.array(places, dtype=np.intp))
    return RunnerOutput(
        req_ids=[output.req_ids[index] for index in batch_idx],
        token_ids=[output.token_ids[index] for index in batch_idx],
        logprobs=logprobs,
        cu_num_sampled=np.concatenate(([0], counts.cumsum())).astype(np.int32),
        batch_id=output.batch_id,
        extras=output.extras,
    )
