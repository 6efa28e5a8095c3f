"""One step, from a plan to an output, in the order in which it happens.

`execute` and `sample` queue work on the current stream and return; only `PendingOutput.wait`
blocks. Rows change on the host in `_apply_events` and nowhere else, and on the device in the staged
writes that follow it, one upload in all, and in `commit_step` at the end. The next step may be
planned and queued before this one's output was waited for: nothing that it needs has to come back
to the host first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrv2.batch.commit import commit_step
from mrv2.batch.inputs import InputBatch, InputBuffers, prepare_inputs, prepare_mixed_inputs
from mrv2.batch.layout import (
    BatchLayout,
    idle_decode,
    idle_mixed,
    is_next_decode,
    lay_out_next_decode,
    layout_batch,
)
from mrv2.config import RunnerConfig
from mrv2.errors import CapacityError, ConfigError, ProtocolError
from mrv2.graphs.capture import CudaGraphMaker, GraphMaker
from mrv2.graphs.shape import WHOLE, GraphKey, GraphMode, GraphShapes
from mrv2.graphs.whole import DrawnStep, StepGraphs
from mrv2.memory.arena import Arena
from mrv2.memory.ring import ResultRing, Slot, publish
from mrv2.memory.transfers import Transfers
from mrv2.output import PendingOutput
from mrv2.plan import Scheduled, StepPlan
from mrv2.ports import AttentionPlanner, ForwardInputs, Model
from mrv2.sampling.grammar import GrammarMask
from mrv2.sampling.prompt_logprobs import PromptLogprobs, PromptScores
from mrv2.sampling.sampler import Sampler
from mrv2.sampling.stage import LogitsView, StageFactory
from mrv2.sampling.stages import STAGES
from mrv2.state.block_tables import BlockTables
from mrv2.state.check import check_blocks, check_events, check_work
from mrv2.state.protocol import RowState
from mrv2.state.requests import RequestColumns
from mrv2.state.rows import RowTable
from mrv2.trace import NullTrace, StepTrace


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step up to its hidden states."""

    batch: InputBatch
    hidden: Tensor
    """[num_tokens, hidden_size]."""


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    """A step between its forward and its sampling; the host holds it between the two calls."""

    layout: BatchLayout
    number: int
    """Counts steps, so that one is sampled once and in order."""
    launched: LaunchedStep | None = None
    """The step so far, where it was not replayed."""
    replayed: GraphKey | None = None
    """The shape that a step was replayed in, to its very end."""
    slot: Slot | None = None
    """Where a replayed step writes its tokens on the host."""


class Runner:
    """Runs steps of a model over permanent state rows.

    Args:
        config: Sizes and device.
        model: The network.
        attention: Makes the attention metadata.
        transfers: Carries every copy; one of its own by default.
        trace: Observes the step's values; nobody by default.
        stages: What processes logits, in order; `stages_with` adds a host's own.
        graph_maker: Captures decode steps. By default CUDA graphs on a GPU, and none elsewhere.

    Raises:
        ConfigError: Decode steps are to be captured, and nothing here can.
    """

    def __init__(
        self,
        config: RunnerConfig,
        model: Model,
        attention: AttentionPlanner,
        transfers: Transfers | None = None,
        trace: StepTrace | None = None,
        stages: tuple[StageFactory, ...] = STAGES,
        graph_maker: GraphMaker | None = None,
    ) -> None:
        if graph_maker is None and config.device.type == "cuda":
            graph_maker = CudaGraphMaker(config.device)
        if graph_maker is None and (config.graphs.decodes or config.graphs.mixed):
            raise ConfigError(
                f"graphs is {config.graphs}; on {config.device.type} steps cannot be captured: "
                "leave decodes and mixed empty"
            )
        self.config = config
        self.transfers = transfers or Transfers(config.device)
        self.trace: StepTrace = trace or NullTrace()
        self.rows = RowTable(config.max_num_reqs)
        self._arena = Arena(self.transfers)
        self.requests = RequestColumns(
            config.num_rows, config.max_model_len, self._arena, maps_tokens=config.maps_tokens
        )
        self.block_tables = BlockTables(config.kv_groups, config.num_rows, self._arena)
        self.sampler = Sampler(config, self.requests, self._arena, self.trace, stages)
        self._prompt_logprobs = PromptLogprobs(config, self.requests, self.transfers)
        self._row_states: tuple[RowState, ...] = (
            self.requests,
            self.block_tables,
            self.sampler,
            self._prompt_logprobs,
        )
        self._buffers = InputBuffers(config, self._arena)
        self._arena.allocate()
        self._shapes = GraphShapes(config.graphs, config.max_num_reqs)
        self._graphs = None if graph_maker is None else StepGraphs(config.idle_row, graph_maker)
        self._ring = ResultRing(config.max_num_reqs, config.device)
        self._model = model
        self._attention = attention
        self._last_layout: BatchLayout | None = None
        self._room = 0
        """Tokens more that each request of the last step can run in its blocks."""
        self._num_executed = 0
        self._num_sampled = 0
        self._is_captured = False
        self.num_steps: dict[GraphMode, int] = dict.fromkeys(GraphMode, 0)
        """How many steps reached the device in each mode."""

    def execute(self, plan: StepPlan) -> StepInFlight:
        """Queue one step up to the hidden states. Never blocks.

        Raises:
            CapacityError: More tokens, rows or blocks than were allocated.
            ConfigError: An arrival asks for what this runner cannot give.
            ProtocolError: The last step was not sampled, or the plan contradicts itself or the
                rows. After any of these the rows are as they were.
        """
        self._check_order(plan)
        self.trace.record("plan", plan)
        layout = self._lay_out(plan)
        key = self._shapes.choose(layout, is_captured=self._is_captured)
        self.transfers.begin_step()
        self._flush(self._packed(layout, key))
        self.requests.advance(layout.rows, layout.query_lens)
        self.trace.record("layout", layout)
        self.trace.record("graph_key", key)
        step = self._replay(layout, key) if key.mode in WHOLE else self._launch(layout, key)
        self._num_executed += 1
        self.num_steps[key.mode] += 1
        return step

    def capture(self) -> None:
        """Capture every size of `config.graphs`; steps are replayed from then on.

        Call it before the first request arrives. No row is changed by it. A second call captures
        anew.

        Raises:
            CaptureError: A step cannot be captured. All steps stay eager.
        """
        self.release_graphs()
        config = self.config
        for num_tokens in sorted(config.graphs.forwards, reverse=True):
            input_ids, positions = self._buffers.padded(num_tokens)
            for replays in (False, True):  # what a first run allocates is not captured
                self._model.forward(
                    ForwardInputs(
                        input_ids=input_ids, positions=positions, attention=None, replays=replays
                    )
                )
        for num_tokens in sorted(config.graphs.mixed, reverse=True):
            key = self._shapes.mixed(num_tokens)
            layout = idle_mixed(num_tokens, key.num_reqs, config.idle_row, config.max_model_len)
            self._capture(key, layout)
        for num_reqs in sorted(config.graphs.decodes, reverse=True):
            layout = idle_decode(num_reqs, config.idle_row, config.max_model_len)
            self._capture(GraphKey(GraphMode.DECODE, num_reqs, num_reqs), layout)
        self._ring.restart()
        self._is_captured = True

    def _capture(self, key: GraphKey, layout: BatchLayout) -> None:
        assert self._graphs is not None, "the constructor refuses sizes that nothing can capture"
        self.transfers.begin_step()
        self._flush(layout.packed)
        self._graphs.capture(key, partial(self._queue_to_the_end, layout))

    def release_graphs(self) -> None:
        """Let go of what `capture` made; steps run eagerly until it is called again."""
        self._is_captured = False
        if self._graphs is not None:
            self._graphs.release()

    def warm_up(self) -> None:
        """Run the kernels around the forward over requests that are none, so that all are compiled.

        Those of sampling features are `draw_unattached`'s. No row is changed.
        """
        self._check_idle()
        rows = np.array([self.config.idle_row], dtype=np.int32)
        # The decode comes last: it knows the idle row, whose progress its commit leaves at 0.
        for query_len in (min(2, self.config.max_num_tokens, self.config.max_model_len), 1):
            scheduled = Scheduled(
                req_ids=[""],
                num_tokens=[query_len],
                num_computed_tokens=[0],
                num_known_tokens=[query_len],
            )
            layout = layout_batch(scheduled, rows)
            self.transfers.begin_step()
            self._flush(layout.packed)
            batch = prepare_inputs(layout, self.requests, self.block_tables, self._buffers)
        token_ids = torch.zeros(1, dtype=torch.int64, device=self.config.device)
        self._commit(batch, batch.logits_view, token_ids)

    def run_idle(self, num_reqs: int) -> Tensor:
        """Queue a decode step of requests that are none, as a real one would be; no row changes.

        Args:
            num_reqs: How many; at most `max_num_reqs`.

        Returns:
            Hidden states, [num_reqs, hidden_size].

        Raises:
            CapacityError: There are more requests than rows.
            ProtocolError: A step was executed but not sampled: its logits would be overwritten.
        """
        self._check_idle()
        if not 1 <= num_reqs <= self.config.max_num_reqs:
            raise CapacityError(
                f"{num_reqs} idle requests are to run; max_num_reqs is {self.config.max_num_reqs}"
            )
        layout = idle_decode(num_reqs, self.config.idle_row, 1)
        key = self._shapes.choose(layout, is_captured=self._is_captured)
        self.transfers.begin_step()
        if key.mode is GraphMode.DECODE:
            self._flush(self._packed(layout, key))
            self._replay(layout, key)
            return self._replayed.values(layout, key).hidden
        # Steps with prompts do not know the idle row: in them a request that is none has no token.
        self._flush(layout.packed)
        return self._queue_whole(layout).hidden

    def _launch(self, layout: BatchLayout, key: GraphKey) -> StepInFlight:
        """Queue a step up to its hidden states, operation by operation."""
        batch = prepare_inputs(layout, self.requests, self.block_tables, self._buffers)
        self.trace.record("batch", batch)
        input_ids, positions = self._buffers.padded(key.num_tokens)
        inputs = ForwardInputs(
            input_ids=input_ids,
            positions=positions,
            attention=self._attention.plan(batch),
            replays=key.mode is GraphMode.FORWARD,
        )
        self.trace.record("forward_inputs", inputs)
        hidden = self._model.forward(inputs)
        self.trace.record("hidden", hidden)
        return StepInFlight(
            layout=layout,
            number=self._num_executed + 1,
            launched=LaunchedStep(batch=batch, hidden=hidden),
        )

    def _replay(self, layout: BatchLayout, key: GraphKey) -> StepInFlight:
        """Queue a whole step, its commit included, in one launch."""
        graphs = self._replayed
        slot = self._ring.begin(layout.num_reqs)
        graphs.replay(key)
        if self.trace.wants("batch"):
            step = graphs.values(layout, key)
            self.trace.record("batch", step.batch)
            self.trace.record("forward_inputs", step.inputs)
            self.trace.record("hidden", step.hidden)
        return StepInFlight(layout=layout, number=self._num_executed + 1, replayed=key, slot=slot)

    def _queue_to_the_end(self, layout: BatchLayout) -> DrawnStep:
        """Queue a step to its very end: its tokens are written into the host's memory."""
        step = self._queue_whole(layout)
        publish(step.token_ids, self._ring.cursor, self._ring.values)
        return step

    def _queue_whole(self, layout: BatchLayout) -> DrawnStep:
        """Queue a step with a plain draw and its commit, over rows that are on the device already.

        Args:
            layout: Of a decode, or what `idle_mixed` made.
        """
        prepare = prepare_inputs if layout.is_decode else prepare_mixed_inputs
        batch = prepare(layout, self.requests, self.block_tables, self._buffers)
        inputs = ForwardInputs(
            input_ids=batch.input_ids,
            positions=batch.positions,
            attention=self._attention.plan(batch),
        )
        hidden = self._model.forward(inputs)
        last = hidden if layout.is_decode else hidden.index_select(0, batch.logits_indices)
        logits = self._model.compute_logits(last)
        token_ids = self.sampler.draw_plainly(logits, batch.logits_view)
        self._commit(batch, batch.logits_view, token_ids)
        return DrawnStep(
            batch=batch, inputs=inputs, hidden=hidden, logits=logits, token_ids=token_ids
        )

    def sample(
        self,
        step: StepInFlight,
        forced: Sequence[int] | None = None,
        grammar: GrammarMask | None = None,
    ) -> PendingOutput:
        """Queue sampling, the copies to the host, and the commit. Never blocks.

        Args:
            step: What `execute` returned.
            forced: One token for each logit of the step, committed in place of the drawn ones. The
                output still holds the drawn ones.
            grammar: What grammars allow; it masks the model's logits before anything reads them.

        Raises:
            ProtocolError: The step was sampled already or is not the last one, or `forced` or
                `grammar` does not fit its logits. The step can still be sampled after the latter.
            ConfigError: A forced token is outside the vocabulary. The step can still be sampled.
        """
        if not step.number == self._num_sampled + 1 == self._num_executed:
            executed = "" if self._num_sampled < self._num_executed else ", and was not executed"
            raise ProtocolError(
                f"step {step.number} cannot be sampled; "
                f"step {self._num_sampled + 1} is next{executed}"
            )
        layout = step.layout
        forced_ids = None if forced is None else self._forced_ids(layout, forced)
        if grammar is not None:
            grammar.check(layout.num_logits, self.config.vocab_size)
        self._num_sampled = step.number
        is_drawn = (
            step.replayed is not None
            and grammar is None
            and self.sampler.draws_plainly(layout.logit_rows)
        )
        if is_drawn and forced_ids is None and not self.trace.wants("processed_logits"):
            # Drawn, committed and on its way.
            scores = self._score_prompts(step)
            return PendingOutput(layout, None, self.transfers, scores, step.slot)
        batch, logits, view, token_ids = self._draws_of(step)
        if grammar is not None:
            grammar.apply(logits, self.transfers)
        self.trace.record("logits", logits)
        if is_drawn and token_ids is not None:
            sampled = self.sampler.drawn(token_ids, logits, view)
        else:
            sampled = self.sampler(logits, view)
        pending = PendingOutput(layout, sampled, self.transfers, self._score_prompts(step), None)
        committed = sampled.token_ids
        if forced_ids is not None:
            committed = self.transfers.upload(forced_ids)
        self._commit(batch, view, committed)
        self.trace.record("committed", committed)
        return pending

    def _draws_of(self, step: StepInFlight) -> tuple[InputBatch, Tensor, LogitsView, Tensor | None]:
        """Return a step's inputs, the logits of whoever draws, whose they are, and what was drawn.

        The latter by a graph; None where none was replayed.
        """
        layout, launched = step.layout, step.launched
        if launched is not None:
            logits = self._model.compute_logits(_of_logits(layout, launched))
            return launched.batch, logits, launched.batch.logits_view, None
        assert step.replayed is not None, "a step is launched or replayed"
        drawn = self._replayed.values(layout, step.replayed)
        batch, logits, token_ids = drawn.batch, drawn.logits, drawn.token_ids
        if layout.num_logits == layout.num_reqs:
            return batch, logits, batch.logits_view, token_ids
        draws = self.transfers.upload(layout.draws)
        view = LogitsView(
            logit_rows=batch.logits_view.logit_rows.index_select(0, draws),
            positions=batch.logits_view.positions.index_select(0, draws),
            rows_np=layout.logit_rows,
        )
        return batch, logits.index_select(0, draws), view, token_ids.index_select(0, draws)

    def _score_prompts(self, step: StepInFlight) -> Mapping[str, PromptScores]:
        if not self._prompt_logprobs.are_wanted:
            return {}
        layout = step.layout
        values: LaunchedStep | DrawnStep | None = step.launched
        if values is None:
            assert step.replayed is not None, "a step is launched or replayed"
            values = self._replayed.values(layout, step.replayed)
        return self._prompt_logprobs.score(
            layout.rows,
            layout.num_computed_tokens,
            layout.query_start_loc,
            values.hidden,
            self._model.compute_logits,
        )

    @property
    def _replayed(self) -> StepGraphs:
        assert self._graphs is not None, "a step is replayed only where it was captured"
        return self._graphs

    def _commit(self, batch: InputBatch, view: LogitsView, token_ids: Tensor) -> None:
        commit_step(
            batch.rows,
            batch.seq_lens,
            view.logit_rows,
            view.positions,
            token_ids,
            self.requests.token_ids.tensor,
            self.requests.num_computed_tokens.tensor,
        )

    def update_rows(self, plan: StepPlan) -> None:
        """Apply a plan's lifecycle events on the host, for a step that runs nothing.

        Raises:
            CapacityError, ConfigError, ProtocolError: As `execute`.
        """
        check_events(plan, self.config, self.rows, self.block_tables)
        self._apply_events(plan)
        self._last_layout = None

    def check(self, plan: StepPlan) -> None:
        """Raise what `execute`, or `update_rows` for a plan without work, would; change nothing."""
        check_events(plan, self.config, self.rows, self.block_tables)
        if plan.scheduled.req_ids:
            self._check_order(plan)
            check_work(plan, self.config, self.rows, self.block_tables)
            self._prompt_logprobs.check(plan)

    def _apply_events(self, plan: StepPlan) -> None:
        for req_id in plan.departed:
            row = self.rows.release(req_id)
            if row is not None:
                for state in self._row_states:
                    state.evict(row)
        for arrival in plan.arrivals:
            row = self.rows.claim(arrival.req_id)
            for state in self._row_states:
                state.admit(row, arrival)
        for continuation in plan.continuations:
            self.block_tables.append(self.rows.row(continuation.req_id), continuation.new_block_ids)

    def _packed(self, layout: BatchLayout, key: GraphKey) -> npt.NDArray[np.int32]:
        """Return the packed values of a layout, padded if a graph is replayed."""
        if key.mode not in WHOLE:
            return layout.packed
        return self._replayed.packed(layout, key)

    def _flush(self, packed: npt.NDArray[np.int32]) -> None:
        """Queue what changed since the last step, the layout included: one upload and one kernel.

        Nothing changed queues nothing.

        Args:
            packed: The layout's packed values; the same object is not staged again.
        """
        for state in self._row_states:
            state.flush()
        self._buffers.stage(packed)
        self._arena.flush()

    def _check_idle(self) -> None:
        """Refuse a step beside another one, and one whose results have no place."""
        if self._num_sampled != self._num_executed:
            raise ProtocolError(
                f"step {self._num_executed} was executed but not sampled; "
                "call sample before the next execute"
            )
        self._ring.make_room()

    def _check_order(self, plan: StepPlan) -> None:
        self._check_idle()
        if not plan.scheduled.req_ids:
            raise ProtocolError(
                "a step without scheduled requests has nothing to execute; "
                "call update_rows for its events"
            )

    def _lay_out(self, plan: StepPlan) -> BatchLayout:
        """Check a plan, apply its events, and lay its work out.

        A plain decode of the batch that ran last has its rows, its order and its counts already; it
        costs the host what changed, not what is there.
        """
        scheduled, last = plan.scheduled, self._last_layout
        check_events(plan, self.config, self.rows, self.block_tables)
        if (
            last is not None
            and not plan.departed
            and not plan.arrivals
            and last.max_seq_len < self.config.max_model_len
            and is_next_decode(last, scheduled)
        ):
            room = self._room - 1
            layout = lay_out_next_decode(last, scheduled)
            if room < 0:
                room = check_blocks(
                    plan, layout.seq_lens, layout.rows, self.rows, self.block_tables
                )
            self._apply_events(plan)
        else:
            rows, room = check_work(plan, self.config, self.rows, self.block_tables)
            self._prompt_logprobs.check(plan)
            self._apply_events(plan)
            if rows is None:
                rows = self.rows.rows(scheduled.req_ids)
            layout = layout_batch(scheduled, rows)
            self.requests.agree(layout.rows, layout.num_computed_tokens)
        self._last_layout, self._room = layout, room
        return layout

    def _forced_ids(self, layout: BatchLayout, forced: Sequence[int]) -> npt.NDArray[np.int64]:
        if len(forced) != layout.num_logits:
            raise ProtocolError(
                f"{len(forced)} tokens are forced on a step of {layout.num_logits} logits"
            )
        token_ids = np.array(forced, dtype=np.int64)
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self.config.vocab_size:
            raise ConfigError(
                f"forced tokens {list(forced)} are not all inside "
                f"the vocabulary of {self.config.vocab_size}"
            )
        return token_ids


def _of_logits(layout: BatchLayout, step: LaunchedStep) -> Tensor:
    """Return the hidden states that become logits: all as they are, if every token does."""
    if layout.num_logits == layout.num_tokens:
        return step.hidden[: layout.num_tokens]
    return step.hidden.index_select(0, step.batch.logits_indices)
