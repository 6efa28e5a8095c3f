"""The sampler: fold the stages over the logits, draw, and package what was asked for.

It owns the rows of every sampling feature and hands lifecycle events on to them. It knows no
feature by name. Raw logprobs are those of the logits as the model made them, a grammar's mask
applied; processed ones are those of the logits that the draw sees.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrv2.config import RunnerConfig
from mrv2.errors import CapacityError
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.gumbel import draw
from mrv2.sampling.logprobs import LogprobsTensors, SampledLogprobs
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.stage import (
    LogitsStage,
    LogitsView,
    NarrowingStage,
    StageFactory,
    StageResources,
)
from mrv2.sampling.stages import STAGES
from mrv2.state.protocol import RowState
from mrv2.state.requests import RequestColumns
from mrv2.trace import NullTrace, StepTrace


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """What one step drew, on the device. Not frozen, since one is made at every step."""

    token_ids: Tensor
    """[num_logits] int64."""
    logprobs: LogprobsTensors | None
    """For every logit, as many as the most demanding request asked for; None if none asked."""


class Sampler:
    """Draws a token for each logit; a `RowState`.

    Args:
        config: Sizes, the logprobs mode and the thinking markers.
        requests: The rows' tokens, which the runner keeps.
        arena: Memory of the rows' parameters.
        trace: Receives the processed logits and the output.
        stages: What processes the logits, in order.
    """

    def __init__(
        self,
        config: RunnerConfig,
        requests: RequestColumns,
        arena: Arena,
        trace: StepTrace,
        stages: tuple[StageFactory, ...] = STAGES,
    ) -> None:
        self._trace = trace
        self._columns = DrawColumns(config.num_rows, arena)
        resources = StageResources(
            num_rows=config.num_rows,
            vocab_size=config.vocab_size,
            arena=arena,
            columns=self._columns,
            requests=requests,
            thinking=config.thinking,
        )
        self._stages = tuple(factory(resources) for factory in stages)
        self._logprobs = SampledLogprobs(resources, config.logprobs_mode)
        features = (stage for stage in self._stages if not stage.takes_plain)
        self._features: tuple[RowState, ...] = (self._logprobs, *features)
        """They want nothing for a request that is plain, as for a row that was evicted, so they
        are told of neither."""
        self._hosts = tuple(stage for stage in self._stages if stage.takes_plain)
        """They may want something for any request."""
        self._of_plain = tuple(
            stage for stage in self._stages if stage.takes_plain or stage.is_in_plain_draw
        )
        """Those that may want something where every request is plain; no others are asked then."""
        self._demanding: set[int] = set()
        """Rows of requests that are not plain."""
        self._changed = False
        self._features_changed = True
        self._wishes: _Wishes | None = None
        device = arena.transfers.device
        self._max_num_logits = config.max_num_tokens
        self._no_division = torch.zeros(config.num_rows, dtype=torch.float32, device=device)
        self._no_cutoff = torch.full(
            (config.max_num_tokens,), -torch.inf, dtype=torch.float32, device=device
        )

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's parameters into its row.

        Raises:
            ConfigError: The request asks for what cannot be, such as a token outside the
                vocabulary. The row is as if it were evicted.
        """
        self._touch()
        try:
            self._columns.admit(row, arrival)
            for stage in self._hosts:
                stage.admit(row, arrival)
            if row in self._demanding or not arrival.sampling.is_plain:
                self._demanding.add(row)
                self._features_changed = True
                for state in self._features:
                    state.admit(row, arrival)
        except Exception:
            self.evict(row)
            raise

    def evict(self, row: int) -> None:
        """Forget a row."""
        self._touch()
        self._columns.evict(row)
        for stage in self._hosts:
            stage.evict(row)
        if row in self._demanding:
            self._demanding.remove(row)
            self._features_changed = True
            for state in self._features:
                state.evict(row)

    def flush(self) -> None:
        """Stage or queue what changed; nothing has where no request came or went."""
        if not self._changed:
            return
        self._changed = False
        self._columns.flush()
        for stage in self._hosts:
            stage.flush()
        if self._features_changed:
            self._features_changed = False
            for state in self._features:
                state.flush()

    def __call__(self, logits: Tensor, view: LogitsView) -> SamplerOutput:
        """Queue the draw of one token for each logit. Never waits for the device.

        Args:
            logits: [num_logits, vocab_size], any float dtype; float32 logits may be overwritten.
                Columns are contiguous.
            view: Whose logits these are.

        Raises:
            CapacityError: There are more logits than a step has tokens.
        """
        num_logits = logits.shape[0]
        if num_logits > self._max_num_logits:
            raise CapacityError(
                f"{num_logits} logits are to be drawn from; max_num_tokens is "
                f"{self._max_num_logits}"
            )
        wishes = self._wishes_of(view.rows_np, view.batch_id)
        wants_processed = wishes.logprobs and self._logprobs.of_processed
        is_shown = wants_processed or self._trace.wants("processed_logits")
        processed, divisor, cutoff = logits, self._no_division, self._no_cutoff
        if wishes.stages:
            narrowing = Narrowing(divisor, cutoff, num_logits)
            keep = wishes.logprobs and not wants_processed
            processed = self._process(wishes.stages, logits, view, narrowing, keep=keep)
            if narrowing.narrows and is_shown:
                processed = _writable(processed, logits if keep else None)
                narrowing.settle(processed, view.logit_rows)
            divisor, cutoff = narrowing.divisor, narrowing.cutoff
        if is_shown:
            self._trace.record("processed_logits", processed)
        token_ids = torch.empty(num_logits, dtype=torch.int64, device=logits.device)
        draw(
            token_ids,
            processed,
            view.logit_rows,
            view.positions,
            self._columns.temperature.device_tensor,
            self._columns.seed.device_tensor,
            divisor,
            cutoff,
        )
        logprobs = None
        if wishes.logprobs:
            source = processed if wants_processed else logits
            logprobs = self._logprobs.gather(source, token_ids, view)
        sampled = SamplerOutput(token_ids=token_ids, logprobs=logprobs)
        self._trace.record("sampled", sampled)
        return sampled

    def draw_plainly(self, logits: Tensor, view: LogitsView) -> Tensor:
        """Queue the draw where no stage has a say but the temperature, and nobody wants logprobs.

        It asks no row what it wants, so it can be captured in a graph and replayed for others.

        Args:
            logits: [num_logits, vocab_size], any float dtype, only read.
            view: Whose logits these are; its host rows are not looked at.

        Returns:
            [num_logits] int64.
        """
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        temperature = self._columns.temperature.device_tensor
        draw(
            token_ids,
            logits,
            view.logit_rows,
            view.positions,
            temperature,
            self._columns.seed.device_tensor,
            temperature,
            self._no_cutoff,
        )
        return token_ids

    def draws_plainly(self, rows: npt.NDArray[np.int32], batch_id: int = 0) -> bool:
        """Say whether `draw_plainly` is all that these rows want.

        Args:
            rows: [num_logits] int32.
            batch_id: As in `LogitsView`.
        """
        if not self._demanding and not self._hosts:
            return True
        return self._wishes_of(rows, batch_id).are_plain

    def drawn(self, token_ids: Tensor, logits: Tensor, view: LogitsView) -> SamplerOutput:
        """Package what `draw_plainly` drew from logits, for rows that want no more.

        Args:
            token_ids: [num_logits] int64.
            logits: [num_logits, vocab_size]; only read.
            view: Whose logits these are.
        """
        if self._trace.wants("processed_logits"):
            processed = logits.to(torch.float32, copy=True)
            narrowing = Narrowing(self._no_division, self._no_cutoff, len(logits))
            narrowing.divide_by(self._columns.temperature.device_tensor)
            narrowing.settle(processed, view.logit_rows)
            self._trace.record("processed_logits", processed)
        sampled = SamplerOutput(token_ids=token_ids, logprobs=None)
        self._trace.record("sampled", sampled)
        return sampled

    def _process(
        self,
        stages: "tuple[_Acting, ...]",
        logits: Tensor,
        view: LogitsView,
        narrowing: Narrowing,
        *,
        keep: bool,
    ) -> Tensor:
        """Return the logits that the draw reads; `logits` themselves stay if they are to be kept.

        They are copied only for a stage that rewrites them.
        """
        processed = logits
        for stage in stages:
            if stage.rewriting is not None:
                processed = _writable(processed, logits if keep else None)
                narrowing.settle(processed, view.logit_rows)
                stage.rewriting.apply(processed, view)
            elif stage.narrowing is not None:
                stage.narrowing.narrow(narrowing, processed, view)
        return processed

    def _touch(self) -> None:
        self._changed = True
        self._wishes = None

    def _wishes_of(self, rows: npt.NDArray[np.int32], batch_id: int) -> "_Wishes":
        """Return what `rows` want; a batch that only goes on keeps its id, and its answer."""
        if self._wishes is None or not batch_id or self._wishes.batch_id != batch_id:
            asked = self._stages if self._demanding else self._of_plain
            self._wishes = _Wishes(
                batch_id=batch_id,
                stages=tuple(_acting(stage) for stage in asked if stage.wants(rows)),
                logprobs=bool(self._demanding) and self._logprobs.wants(rows),
            )
        return self._wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Acting:
    """A stage that a batch wants, under what it is."""

    rewriting: LogitsStage | None = None
    narrowing: NarrowingStage | None = None
    is_in_plain_draw: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wishes:
    """What the rows of one batch want."""

    batch_id: int
    stages: tuple[_Acting, ...]
    logprobs: bool

    @property
    def are_plain(self) -> bool:
        """Whether nothing is wanted but what the plain draw does."""
        return not self.logprobs and all(stage.is_in_plain_draw for stage in self.stages)


def _acting(stage: LogitsStage | NarrowingStage) -> _Acting:
    """Tell a stage's kind, once for a batch: to ask a protocol costs as much as a launch."""
    if isinstance(stage, LogitsStage):
        return _Acting(rewriting=stage, is_in_plain_draw=stage.is_in_plain_draw)
    return _Acting(narrowing=stage, is_in_plain_draw=stage.is_in_plain_draw)


def _writable(logits: Tensor, kept: Tensor | None) -> Tensor:
    """Return float32 logits that may be overwritten: a copy of `logits` where they must be kept."""
    if logits.dtype != torch.float32:
        return logits.float()
    return logits.clone() if logits is kept else logits


def draw_unattached(logits: Tensor) -> Tensor:
    """Draw at random from logits that belong to no request, to warm up and to measure the peak.

    Every row asks for what takes most memory, a stage that rewrites logits whose own are kept.

    Args:
        logits: [num_logits, vocab_size], any float dtype.

    Returns:
        [num_logits] int64.
    """
    num_logits, vocab_size = logits.shape
    arena = Arena(Transfers(logits.device))
    config = RunnerConfig(
        device=logits.device,
        max_num_reqs=num_logits,
        max_num_tokens=num_logits,
        max_model_len=1,
        vocab_size=vocab_size,
        kv_groups=(),
    )
    requests = RequestColumns(config.num_rows, 1, arena)
    sampler = Sampler(config, requests, arena, NullTrace())
    for row in range(num_logits):
        arrival = Arrival(
            req_id=f"unattached-{row}",
            token_ids=[0],
            prompt_len=1,
            num_computed_tokens=0,
            block_ids=(),
            sampling=Sampling(
                temperature=1.0,
                seed=row,
                top_k=50,
                frequency_penalty=0.1,
                num_logprobs=1,
            ),
        )
        requests.admit(row, arrival)
        sampler.admit(row, arrival)
    requests.flush()
    sampler.flush()
    arena.flush()
    rows = np.arange(num_logits, dtype=np.int32)
    view = LogitsView(
        logit_rows=arena.transfers.upload(rows),
        positions=torch.ones(num_logits, dtype=torch.int64, device=logits.device),
        rows_np=rows,
    )
    return sampler(logits, view).token_ids
