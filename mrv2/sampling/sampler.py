"""The sampler: fold the stages over the logits, draw, and package what was asked for.

It owns the rows of every sampling feature and hands lifecycle events on to them. It knows no
feature by name. Logprobs are those of the logits as the model made them, before any stage.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrv2.errors import ConfigError
from mrv2.memory.transfers import Transfers
from mrv2.plan import ALL_LOGPROBS, Arrival
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.gumbel import draw
from mrv2.sampling.logprobs import LogprobsTensors, gather_logprobs
from mrv2.sampling.stage import LogitsView, StageResources
from mrv2.sampling.stages import STAGES
from mrv2.state.protocol import RowState
from mrv2.trace import StepTrace

_NO_LOGPROBS = -1
"""In the host column of counts, where `ALL_LOGPROBS` stands as the size of the vocabulary: so the
largest count of a batch is the one to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """What one step drew, on the device."""

    token_ids: Tensor
    """[num_logits] int64."""
    logprobs: LogprobsTensors | None
    """For every logit, as many as the most demanding request asked for; None if none asked."""


class Sampler:
    """Draws a token for each logit; a `RowState`.

    Args:
        max_num_reqs: State rows.
        vocab_size: Columns of the logits.
        transfers: Carries the rows' parameters to the device.
        trace: Receives the processed logits and the output.
    """

    def __init__(
        self, max_num_reqs: int, vocab_size: int, transfers: Transfers, trace: StepTrace
    ) -> None:
        self._vocab_size = vocab_size
        self._trace = trace
        self._columns = DrawColumns(max_num_reqs, transfers)
        resources = StageResources(
            max_num_reqs=max_num_reqs,
            vocab_size=vocab_size,
            transfers=transfers,
            columns=self._columns,
        )
        self._stages = tuple(factory(resources) for factory in STAGES)
        self._states: tuple[RowState, ...] = (self._columns, *self._stages)
        self._num_logprobs = np.full(max_num_reqs, _NO_LOGPROBS, dtype=np.int32)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's parameters into its row.

        Raises:
            ConfigError: More logprobs are asked for than there are tokens in the vocabulary.
        """
        self._num_logprobs[row] = self._count(arrival.sampling.num_logprobs)
        for state in self._states:
            state.admit(row, arrival)

    def evict(self, row: int) -> None:
        """Forget a row."""
        self._num_logprobs[row] = _NO_LOGPROBS
        for state in self._states:
            state.evict(row)

    def flush(self) -> None:
        """Queue what changed to the device."""
        for state in self._states:
            state.flush()

    def __call__(self, logits: Tensor, view: LogitsView) -> SamplerOutput:
        """Queue the draw of one token for each logit. Never waits for the device.

        Args:
            logits: [num_logits, vocab_size], any float dtype; float32 logits may be overwritten.
                Columns are contiguous.
            view: Whose logits these are.
        """
        raw = logits.float()
        num_logprobs = self._largest_count(view.rows_np)
        processed = self._process(raw, view, keep_raw=num_logprobs != _NO_LOGPROBS)
        self._trace.record("processed_logits", processed)
        token_ids = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
        draw(
            token_ids,
            processed,
            view.logit_rows,
            view.positions,
            self._columns.temperature.device_tensor,
            self._columns.seed.device_tensor,
        )
        logprobs = None
        if num_logprobs != _NO_LOGPROBS:
            logprobs = gather_logprobs(raw, token_ids, num_logprobs)
        sampled = SamplerOutput(token_ids=token_ids, logprobs=logprobs)
        self._trace.record("sampled", sampled)
        return sampled

    def _process(self, raw: Tensor, view: LogitsView, *, keep_raw: bool) -> Tensor:
        stages = [stage for stage in self._stages if stage.wants(view.rows_np)]
        logits = raw.clone() if stages and keep_raw else raw
        for stage in stages:
            stage.apply(logits, view)
        return logits

    def _largest_count(self, rows: npt.NDArray[np.int32]) -> int:
        return int(self._num_logprobs[rows].max(initial=_NO_LOGPROBS))

    def _count(self, num_logprobs: int | None) -> int:
        if num_logprobs is None:
            return _NO_LOGPROBS
        if num_logprobs > self._vocab_size:
            raise ConfigError(
                f"num_logprobs is {num_logprobs}, more than the vocabulary's {self._vocab_size} "
                f"tokens; ask for fewer, or for {ALL_LOGPROBS} (all)"
            )
        return self._vocab_size if num_logprobs == ALL_LOGPROBS else num_logprobs
