"""Faults of lifecycles and of lateness, put into the runner from outside, one at a time.

Each names the check that must find it:

- `late`: on a device that is late, what a story leaves behind differs from what it leaves on a
  prompt one. On the prompt one the fault does not show at all.
- `replayed`: where decode steps are replayed from graphs, a story's results are not those of eager
  steps.
- `rows`, `counters`, `idle`, `staged`, `freed`, `bounded`, `device`: an invariant of
  `mrv2_diff.invariants`, the first that breaks.
- `alone`: requests at random temperatures draw other tokens together than alone.
- `undrafted`: requests draw other tokens where they run drafts than where they run none.
- `variants`: replayed steps are not those of the variant that their requests need.
- `oracle`: a story's tokens are not those of the model, or it ends in an error of the runner.

The runner has no switch for any of this: a fault replaces a method for as long as it is applied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mrv2 import RunnerOutput, runner
from mrv2.batch.commit import commit_step
from mrv2.batch.inputs import InputBuffers
from mrv2.batch.layout import BatchLayout, Int32, is_next_decode, lay_out_next_decode
from mrv2.execute.executor import ExecutedStep, Executor
from mrv2.execute.shape import WHOLE, GraphKey
from mrv2.execute.whole import ReplayedStep, StepGraphs
from mrv2.extension import Extensions, Variant
from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.ring import ResultRing, Slot
from mrv2.memory.transfers import Transfers
from mrv2.output import HostTokens, PendingOutput
from mrv2.plan import Arrival, NextDecode, Scheduled, StepPlan
from mrv2.sampling import logprobs
from mrv2.sampling.gumbel import draw
from mrv2.sampling.logprobs import LogprobsTensors
from mrv2.sampling.sampler import Sampler
from mrv2.state.block_tables import BlockTables
from mrv2.state.lifecycle import Lifecycle
from mrv2.state.progress import Progress
from mrv2.state.requests import RequestColumns
from mrv2.state.rows import RowTable
from mrv2_diff.race_lane import LateEvent

Patch = Callable[[], AbstractContextManager[object]]

_KINDS = {
    "late": "asynchronous steps",
    "rows": "rows",
    "freed": "rows",
    "bounded": "memory",
    "staged": "staged writes",
    "counters": "block tables",
    "device": "staged writes",
    "oracle": "order of events",
    "alone": "draws",
    "undrafted": "drafts",
    "variants": "extensions",
}
"""Of a fault, by the check that finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFault:
    """One fault."""

    id: str
    title: str
    found_by: str
    """The check that must find it."""
    apply: Patch
    """Makes a context in which the runner has the fault."""
    replays: bool = False
    """Whether it can show only where decode steps are replayed."""

    @property
    def kind(self) -> str:
        """What kind of fault it is."""
        return "replayed steps" if self.replays else _KINDS[self.found_by]


# What shows only where the device is late.


def _one_staging_buffer() -> AbstractContextManager[object]:
    def faulty(self: Transfers) -> None:
        self._ring[self._current].reset()

    return patch.object(Transfers, "begin_step", faulty)


def _staging_buffer_taken_back_early() -> AbstractContextManager[object]:
    return patch.object(LateEvent, "query", lambda self: True)


def _output_not_waited_for() -> AbstractContextManager[object]:
    return patch.object(LateEvent, "synchronize", lambda self: None)


@contextmanager
def _event_before_the_copies() -> Iterator[None]:
    init = PendingOutput.__init__

    def faulty(
        self: PendingOutput,
        layout: BatchLayout,
        tokens: HostTokens,
        logprobs: LogprobsTensors | None,
        transfers: Transfers,
        *further: Any,
    ) -> None:
        ready = transfers.record()
        init(self, layout, tokens, logprobs, transfers, *further)
        self._ready = ready

    with patch.object(PendingOutput, "__init__", faulty):
        yield


def _copy_of_live_memory() -> AbstractContextManager[object]:
    def faulty(self: MirroredTensor) -> None:
        if self._first < self._end:
            column = self._arena.view(self._region)
            self._arena.transfers._copy(column, torch.from_numpy(self.host))
            self._first, self._end = len(self.host), 0

    return patch.object(MirroredTensor, "flush", faulty)


# What shows wherever it is looked for.


@contextmanager
def _row_freed_one_step_early() -> Iterator[None]:
    apply = Lifecycle.apply

    def faulty(self: Lifecycle, plan: StepPlan) -> None:
        apply(self, plan)
        idle = [name for name in self.rows._row_of if name not in plan.scheduled.req_ids]
        for name in idle:
            self._leave(name)

    with patch.object(Lifecycle, "apply", faulty):
        yield


@contextmanager
def _row_freed_one_step_late() -> Iterator[None]:
    apply = Lifecycle.apply
    postponed: list[str] = []

    def faulty(self: Lifecycle, plan: StepPlan) -> None:
        arriving = {arrival.req_id for arrival in plan.arrivals}
        now = [name for name in plan.departed if name in arriving]
        later = [name for name in plan.departed if name not in arriving]
        departed = (*postponed, *now)
        postponed[:] = later
        apply(self, _replace(plan, departed=departed))

    with patch.object(Lifecycle, "apply", faulty):
        yield


def _replace(plan: StepPlan, *, departed: tuple[str, ...]) -> StepPlan:
    return StepPlan(
        departed=departed,
        arrivals=plan.arrivals,
        continuations=plan.continuations,
        scheduled=plan.scheduled,
    )


def _blocks_of_a_departed_row_kept() -> AbstractContextManager[object]:
    return patch.object(BlockTables, "evict", lambda self, row: None)


def _sampler_row_kept() -> AbstractContextManager[object]:
    return patch.object(Sampler, "evict", lambda self, row: None)


def _progress_not_told_again() -> AbstractContextManager[object]:
    def faulty(self: RequestColumns, rows: Int32, num_computed_tokens: Int32) -> None:
        self.progress.upper[rows] = num_computed_tokens

    return patch.object(RequestColumns, "agree", faulty)


@contextmanager
def _arrivals_before_departures() -> Iterator[None]:
    apply = Lifecycle.apply

    def faulty(self: Lifecycle, plan: StepPlan) -> None:
        scheduled = plan.scheduled
        apply(self, StepPlan(arrivals=plan.arrivals, scheduled=scheduled))
        apply(
            self,
            StepPlan(departed=plan.departed, continuations=plan.continuations, scheduled=scheduled),
        )

    with patch.object(Lifecycle, "apply", faulty):
        yield


@contextmanager
def _outputs_share_memory() -> Iterator[None]:
    buffers: dict[torch.dtype, Tensor] = {}

    def faulty(self: Transfers, values: Tensor) -> Tensor:
        buffer = buffers.setdefault(values.dtype, torch.empty(4096, dtype=values.dtype))
        out = buffer[: values.numel()].view(values.shape)
        self._copy(out, values)
        return out

    with patch.object(Transfers, "download", faulty):
        yield


@contextmanager
def _next_decode_in_another_order() -> Iterator[None]:
    def in_any_order(layout: BatchLayout, scheduled: Scheduled | NextDecode) -> bool:
        if is_next_decode(layout, scheduled):
            return True
        work = zip(
            scheduled.req_ids,
            scheduled.num_tokens,
            scheduled.num_computed_tokens,
            scheduled.num_known_tokens,
            strict=True,
        )
        ends = zip(layout.req_ids, layout.seq_lens.tolist(), strict=True)
        return layout.is_decode and sorted(work) == sorted(
            (name, 1, end, end + 1) for name, end in ends
        )

    def laid_out(layout: BatchLayout, scheduled: Scheduled | NextDecode) -> BatchLayout:
        return replace(lay_out_next_decode(layout, scheduled), req_ids=scheduled.req_ids)

    with (
        patch.object(runner, "is_next_decode", in_any_order),
        patch.object(runner, "lay_out_next_decode", laid_out),
    ):
        yield


@contextmanager
def _upload_skipped_by_shape() -> Iterator[None]:
    stage = InputBuffers.stage
    shapes: dict[int, tuple[int, ...]] = {}

    def faulty(self: InputBuffers, packed: Int32) -> None:
        if shapes.get(id(self)) != packed.shape:
            stage(self, packed)
            shapes[id(self)] = packed.shape

    with patch.object(InputBuffers, "stage", faulty):
        yield


@contextmanager
def _column_not_flushed() -> Iterator[None]:
    flush = RequestColumns.flush

    def faulty(self: RequestColumns) -> None:
        with patch.object(self.prompt_len, "flush", lambda: None):
            flush(self)

    with patch.object(RequestColumns, "flush", faulty):
        yield


def _more_blocks_not_counted() -> AbstractContextManager[object]:
    def faulty(self: BlockTables, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        for index, (table, blocks) in enumerate(zip(self.tables, block_ids, strict=True)):
            held = int(self._num_blocks[index, row])
            table.stage_write(row, held, blocks)
            if not held:
                self._num_blocks[index, row] = len(blocks)

    return patch.object(BlockTables, "append", faulty)


@contextmanager
def _state_of_departed_requests_piles_up() -> Iterator[None]:
    release = RowTable.release
    freed: list[int] = []

    def faulty(self: RowTable, req_id: str) -> int | None:
        row = release(self, req_id)
        if row is not None:
            freed.append(row)
            self._num_rows_freed = freed  # type: ignore[attr-defined]  # the fault
        return row

    with patch.object(RowTable, "release", faulty):
        yield


@contextmanager
def _advances_pile_up() -> Iterator[None]:
    advance = Progress.advance
    advances: list[Int32] = []

    def faulty(self: Progress, batch_id: int, rows: Int32, num_tokens: Int32) -> None:
        advances.append(num_tokens.copy())
        self._advances = advances  # type: ignore[attr-defined]  # the fault
        advance(self, batch_id, rows, num_tokens)

    with patch.object(Progress, "advance", faulty):
        yield


@contextmanager
def _prompts_of_departed_requests_pile_up() -> Iterator[None]:
    admit = RequestColumns.admit
    prompts: dict[str, list[int]] = {}

    def faulty(self: RequestColumns, row: int, arrival: Arrival) -> None:
        prompts[arrival.req_id] = list(arrival.token_ids)
        self._prompts = prompts  # type: ignore[attr-defined]  # the fault
        admit(self, row, arrival)

    with patch.object(RequestColumns, "admit", faulty):
        yield


def _drawing(fault: Callable[[dict[str, Any]], None]) -> AbstractContextManager[object]:
    reference = draw.reference

    def faulty(*args: Any) -> None:
        arguments = dict(zip(draw.parameters, args, strict=True))
        fault(arguments)
        reference(**arguments)

    return patch.object(draw, "reference", faulty)


def _seeds_by_batch_position() -> AbstractContextManager[object]:
    def by_position(arguments: dict[str, Any]) -> None:
        seed, rows = arguments["seed"], arguments["logit_rows"].long()
        arguments["seed"] = seed.index_copy(0, rows, seed[: len(rows)])

    return _drawing(by_position)


def _noise_of_a_neighbours_position() -> AbstractContextManager[object]:
    def flip(arguments: dict[str, Any]) -> None:
        arguments["positions"] = arguments["positions"].flip(0)

    return _drawing(flip)


# What shows only where decode steps are replayed.


@contextmanager
def _slot_read_before_its_event() -> Iterator[None]:
    wait = PendingOutput.wait

    def faulty(self: PendingOutput) -> RunnerOutput:
        if isinstance(self._tokens, Slot):
            self._tokens.take()
        return wait(self)

    with patch.object(PendingOutput, "wait", faulty):
        yield


def _ring_not_restarted() -> AbstractContextManager[object]:
    def faulty(self: ResultRing) -> None:
        self._num_begun = 0
        self._owners = [None] * len(self._owners)

    return patch.object(ResultRing, "restart", faulty)


@contextmanager
def _padded_rows_kept() -> Iterator[None]:
    packed = StepGraphs.packed
    of_key: dict[GraphKey, Int32] = {}

    def faulty(self: StepGraphs, layout: BatchLayout, key: GraphKey) -> Int32:
        if key not in of_key:
            of_key[key] = packed(self, layout, key)
        return of_key[key]

    with patch.object(StepGraphs, "packed", faulty):
        yield


def _idle_row_advanced() -> AbstractContextManager[object]:
    reference = commit_step.reference

    def faulty(*args: Tensor) -> None:
        reference(*args)
        rows, seq_lens, num_computed_tokens = args[0], args[1], args[-1]
        num_computed_tokens[rows[seq_lens == 0].long()] += 1

    return patch.object(commit_step, "reference", faulty)


@contextmanager
def _logits_read_behind_the_next_replay() -> Iterator[None]:
    gather, init, wait = logprobs.gather_logprobs, PendingOutput.__init__, PendingOutput.wait
    gathered: list[Callable[[], LogprobsTensors]] = []
    postponed: dict[PendingOutput, Callable[[], LogprobsTensors]] = {}

    def remember(*args: Any, **kwargs: Any) -> LogprobsTensors:
        gathered.append(partial(gather, *args, **kwargs))
        return gather(*args, **kwargs)

    def postpone(self: PendingOutput, *args: Any) -> None:
        init(self, *args)
        if gathered:
            postponed[self] = gathered.pop()

    def gather_late(self: PendingOutput) -> RunnerOutput:
        if self in postponed:
            late = postponed.pop(self)()
            self._logprobs = late.token_ids, late.values, late.ranks
        return wait(self)

    with (
        patch.object(logprobs, "gather_logprobs", remember),
        patch.object(PendingOutput, "__init__", postpone),
        patch.object(PendingOutput, "wait", gather_late),
    ):
        yield


# What shows only where requests run drafts, or where extensions take part.


def _committing(fault: Callable[[dict[str, Tensor]], None]) -> AbstractContextManager[object]:
    reference = commit_step.reference

    def faulty(*args: Tensor) -> None:
        arguments = dict(zip(commit_step.parameters, args, strict=True))
        fault(arguments)
        reference(**arguments)

    return patch.object(commit_step, "reference", faulty)


def _rejected_tokens_committed() -> AbstractContextManager[object]:
    def accept_all(arguments: dict[str, Tensor]) -> None:
        arguments["num_sampled"] = arguments["num_logits"]

    return _committing(accept_all)


@contextmanager
def _rejected_drafts_counted_as_computed() -> Iterator[None]:
    reference = commit_step.reference

    def faulty(*args: Tensor) -> None:
        reference(*args)
        rows, seq_lens, num_computed_tokens = args[0], args[1], args[-1]
        num_computed_tokens[rows.long()] = seq_lens

    with patch.object(commit_step, "reference", faulty):
        yield


def _progress_of_the_scheduler() -> AbstractContextManager[object]:
    def faulty(self: RequestColumns, rows: Int32, num_computed_tokens: Int32) -> None:
        for row, count in zip(rows.tolist(), num_computed_tokens.tolist(), strict=True):
            self.stage_progress(row, count)

    return patch.object(RequestColumns, "agree", faulty)


def _bounds_taken_for_exact() -> AbstractContextManager[object]:
    return patch.object(Progress, "is_exact", lambda self, rows: True)


@contextmanager
def _wishes_of_another_batch() -> Iterator[None]:
    wishes_of = Sampler._wishes_of

    def faulty(self: Sampler, rows: Int32, batch_id: int) -> Any:
        return self._wishes or wishes_of(self, rows, batch_id)

    with patch.object(Sampler, "_wishes_of", faulty):
        yield


def _drafts_not_put_back() -> AbstractContextManager[object]:
    return patch.object(ReplayedStep, "_put_drafts_back", lambda self: None)


@contextmanager
def _extensions_called_behind_a_replay() -> Iterator[None]:
    run = Executor.run

    def faulty(self: Executor, layout: BatchLayout, number: int) -> ExecutedStep:
        if self._choose(layout).mode not in WHOLE:
            return run(self, layout, number)
        with patch.object(Extensions, "before_forward", lambda self, layout: None):
            step = run(self, layout, number)
        self._parts.extensions.before_forward(layout)
        return step

    with patch.object(Executor, "run", faulty):
        yield


@contextmanager
def _variant_of_the_last_step() -> Iterator[None]:
    own_variant = Extensions.variant
    last: dict[int, Variant] = {}

    def faulty(self: Extensions, layout: BatchLayout) -> Variant:
        own = own_variant(self, layout)
        stale, last[id(self)] = last.get(id(self), own), own
        return stale

    with patch.object(Extensions, "variant", faulty):
        yield


SCHEDULE_FAULTS = (
    ScheduleFault(
        id="one-staging-buffer",
        title="every step stages into the buffer that the device may still read",
        found_by="late",
        apply=_one_staging_buffer,
    ),
    ScheduleFault(
        id="staging-buffer-taken-back-early",
        title="a buffer of the ring is used again without asking whether its step has passed",
        found_by="late",
        apply=_staging_buffer_taken_back_early,
    ),
    ScheduleFault(
        id="output-not-waited-for",
        title="an output is read without waiting for its event",
        found_by="late",
        apply=_output_not_waited_for,
    ),
    ScheduleFault(
        id="event-before-the-copies",
        title="an output's event stands before the copies that it is for",
        found_by="late",
        apply=_event_before_the_copies,
    ),
    ScheduleFault(
        id="copy-of-live-memory",
        title="columns are copied from the host's own arrays, which are read when the copy acts",
        found_by="late",
        apply=_copy_of_live_memory,
    ),
    ScheduleFault(
        id="row-freed-one-step-early",
        title="a request that pauses for a step loses its row",
        found_by="rows",
        apply=_row_freed_one_step_early,
    ),
    ScheduleFault(
        id="row-freed-one-step-late",
        title="departures are applied in the step after theirs",
        found_by="rows",
        apply=_row_freed_one_step_late,
    ),
    ScheduleFault(
        id="blocks-of-a-departed-row-kept",
        title="a freed row still holds the blocks of the request that left",
        found_by="freed",
        apply=_blocks_of_a_departed_row_kept,
    ),
    ScheduleFault(
        id="sampler-row-kept",
        title="a freed row still has the sampling parameters of the request that left",
        found_by="freed",
        apply=_sampler_row_kept,
    ),
    ScheduleFault(
        id="state-of-departed-requests-piles-up",
        title="something is kept for every request that ever left",
        found_by="bounded",
        apply=_state_of_departed_requests_piles_up,
    ),
    ScheduleFault(
        id="advances-pile-up",
        title="a list of how far each step went is never emptied",
        found_by="bounded",
        apply=_advances_pile_up,
    ),
    ScheduleFault(
        id="prompts-pile-up",
        title="the prompt of every request that ever arrived is kept",
        found_by="bounded",
        apply=_prompts_of_departed_requests_pile_up,
    ),
    ScheduleFault(
        id="seeds-by-batch-position",
        title="the seed of a draw is looked up by batch position in place of the row",
        found_by="alone",
        apply=_seeds_by_batch_position,
    ),
    ScheduleFault(
        id="noise-of-a-neighbours-position",
        title="the noise of a draw is that of a neighbour's position",
        found_by="alone",
        apply=_noise_of_a_neighbours_position,
    ),
    ScheduleFault(
        id="column-not-flushed",
        title="a column that the host changed is not copied to the device",
        found_by="staged",
        apply=_column_not_flushed,
    ),
    ScheduleFault(
        id="more-blocks-not-counted",
        title="blocks of a continuation are written over by the next ones",
        found_by="counters",
        apply=_more_blocks_not_counted,
    ),
    ScheduleFault(
        id="progress-not-told-again",
        title="the device is not told of progress that was taken back",
        found_by="device",
        apply=_progress_not_told_again,
    ),
    ScheduleFault(
        id="arrivals-before-departures",
        title="arrivals are applied before the departures of their step",
        found_by="oracle",
        apply=_arrivals_before_departures,
    ),
    ScheduleFault(
        id="outputs-share-memory",
        title="every step's tokens are downloaded to the same host memory",
        found_by="oracle",
        apply=_outputs_share_memory,
    ),
    ScheduleFault(
        id="next-decode-in-another-order",
        title="a decode of the same requests in another order is laid out as the last one was",
        found_by="oracle",
        apply=_next_decode_in_another_order,
    ),
    ScheduleFault(
        id="upload-skipped-by-shape",
        title="a layout is not uploaded if the last one had its shape",
        found_by="oracle",
        apply=_upload_skipped_by_shape,
    ),
    ScheduleFault(
        id="slot-read-before-its-event",
        title="a replayed step's tokens are read from the ring before its event was waited for",
        found_by="late",
        apply=_slot_read_before_its_event,
        replays=True,
    ),
    ScheduleFault(
        id="ring-not-restarted",
        title="the device's counter of the ring keeps what the runs of the capture added to it",
        found_by="replayed",
        apply=_ring_not_restarted,
        replays=True,
    ),
    ScheduleFault(
        id="padded-rows-kept",
        title="a replay of the last one's size runs the rows of the last one",
        found_by="replayed",
        apply=_padded_rows_kept,
        replays=True,
    ),
    ScheduleFault(
        id="logits-read-behind-the-next-replay",
        title="logprobs are gathered from a graph's logits when the output is waited for",
        found_by="replayed",
        apply=_logits_read_behind_the_next_replay,
        replays=True,
    ),
    ScheduleFault(
        id="idle-row-advanced",
        title="the commit advances the row that pads a replayed step",
        found_by="idle",
        apply=_idle_row_advanced,
        replays=True,
    ),
    ScheduleFault(
        id="rejected-tokens-committed",
        title="the commit takes all of a request's drawn tokens, rejected ones among them",
        found_by="device",
        apply=_rejected_tokens_committed,
    ),
    ScheduleFault(
        id="rejected-drafts-counted",
        title="the commit counts rejected drafts as computed",
        found_by="device",
        apply=_rejected_drafts_counted_as_computed,
    ),
    ScheduleFault(
        id="progress-of-the-scheduler",
        title="the device is told the scheduler's progress while drafts are in flight",
        found_by="undrafted",
        apply=_progress_of_the_scheduler,
    ),
    ScheduleFault(
        id="bounds-taken-for-exact",
        title="a planner that needs exact lengths is given bounds while drafts are in flight",
        found_by="undrafted",
        apply=_bounds_taken_for_exact,
    ),
    ScheduleFault(
        id="wishes-of-another-batch",
        title="the sampler runs the stages that another batch wanted",
        found_by="undrafted",
        apply=_wishes_of_another_batch,
    ),
    ScheduleFault(
        id="drafts-not-put-back",
        title="a draw that follows a replay's own reads that one's tokens where the drafts were",
        found_by="undrafted",
        apply=_drafts_not_put_back,
        replays=True,
    ),
    ScheduleFault(
        id="extensions-called-behind-a-replay",
        title="extensions prepare a step on the host when its replay is queued already",
        found_by="undrafted",
        apply=_extensions_called_behind_a_replay,
        replays=True,
    ),
    ScheduleFault(
        id="variant-of-the-last-step",
        title="a step is replayed in the variant that the last one needed",
        found_by="variants",
        apply=_variant_of_the_last_step,
        replays=True,
    ),
)
