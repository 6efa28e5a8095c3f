"""One step, from a plan to an output, in the order in which it happens.

`execute` and `sample` queue work on the current stream and return; only `PendingOutput.wait`
blocks. Rows change on the host in `Lifecycle.apply` and nowhere else, and on the device in the
staged writes that follow it, one upload in all, and in the commit at the end. The next step may be
planned and queued before this one's output was waited for: nothing that it needs has to come back
to the host first.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np
from torch import Tensor

from mrv2.batch.layout import (
    BatchLayout,
    Int32,
    is_next_decode,
    lay_out_next_decode,
    layout_batch,
)
from mrv2.batch.order import decodes_first, in_order
from mrv2.config import RunnerConfig
from mrv2.errors import ConfigError, ExtensionError, Mrv2Error, ProtocolError
from mrv2.execute.capture import CudaGraphMaker, GraphMaker
from mrv2.execute.executor import ExecutedStep, Executor
from mrv2.execute.parts import HostParts, build_parts
from mrv2.execute.shape import GraphMode
from mrv2.extension import ExtensionFactory, fault_of
from mrv2.features import EXTENSIONS
from mrv2.head.check import Forced, check_forced, check_sampled, forced_tokens
from mrv2.head.generate import generate_head
from mrv2.head.protocol import HeadFactory
from mrv2.memory.transfers import Transfers
from mrv2.output import DownloadedTokens, PendingOutput
from mrv2.plan import NextDecode, Scheduled, StepPlan
from mrv2.ports import AttentionPlanner, Model
from mrv2.sampling.grammar import GrammarMask
from mrv2.state.check import check_blocks, check_events, check_work
from mrv2.trace import NullTrace, StepTrace


class Runner:
    """Runs steps of a model over permanent state rows.

    Args:
        config: Sizes and device.
        model: The network.
        attention: Makes the attention metadata.
        transfers: Carries every copy; one of its own by default.
        trace: Observes the step's values; nobody by default.
        head: Makes what turns hidden states into results; by default it draws tokens.
        extensions: Make what else takes part in a step, in this order.
        graph_maker: Captures whole steps. By default CUDA graphs on a GPU, and none elsewhere.

    Raises:
        ConfigError: Steps are to be captured, and nothing here can.
    """

    def __init__(
        self,
        config: RunnerConfig,
        model: Model,
        attention: AttentionPlanner,
        transfers: Transfers | None = None,
        trace: StepTrace | None = None,
        *,
        head: HeadFactory | None = None,
        extensions: Sequence[ExtensionFactory] = EXTENSIONS,
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
        self._parts = parts = build_parts(
            HostParts(config=config, model=model, attention=attention, trace=self.trace),
            self.transfers,
            head or generate_head(),
            extensions,
        )
        self.requests = parts.requests
        self.block_tables = parts.block_tables
        self.head = parts.head
        self.extensions = parts.extensions
        self.lifecycle = parts.lifecycle
        self.rows = parts.lifecycle.rows
        self._executor = Executor(parts, graph_maker)
        self._batch_ids = count(1)
        self._last_layout: BatchLayout | None = None
        self._room = 0
        """Tokens more that each request of the last step can run in its blocks."""
        self._num_executed = 0
        self._num_sampled = 0

    def execute(self, plan: StepPlan) -> ExecutedStep:
        """Queue one step up to the hidden states. Never blocks.

        Raises:
            CapacityError: More tokens, rows or blocks than were allocated.
            ConfigError: An arrival asks for what this runner cannot give.
            ProtocolError: The last step was not sampled, or the plan contradicts itself or the
                rows, or has extras for nobody. After any of these the rows are as they were.
            ExtensionError: An extension raised midway, or a row's state at an arrival. The rows are
                as they were, but that those of requests that departed are free.
        """
        self._check_order(plan)
        self.trace.record("plan", plan)
        layout = self._lay_out(plan)
        self.trace.record("layout", layout)
        try:
            step = self._executor.run(layout, self._num_executed + 1)
        except Exception:
            self.lifecycle.take_back(plan)
            self.extensions.give_up(layout)
            self._last_layout = None
            raise
        self.requests.progress.advance(layout.batch_id, layout.rows, layout.query_lens)
        self._num_executed += 1
        return step

    def sample(
        self,
        step: ExecutedStep,
        forced: Forced | None = None,
        grammar: GrammarMask | None = None,
    ) -> PendingOutput:
        """Queue what the head makes of a step, the copies to the host, and the commit.

        Never blocks.

        Args:
            step: What `execute` returned.
            forced: Tokens to commit in place of the sampled ones. The output still holds the
                sampled ones.
            grammar: What grammars allow; it masks the model's logits before anything reads them.

        Raises:
            ProtocolError: The step was sampled already or is not the last one, or `forced` or
                `grammar` does not fit its logits. The step can still be sampled after the latter.
            ConfigError: A forced token is outside the vocabulary. The step can still be sampled.
            ExtensionError: The head or an extension raised, or broke its protocol. After this, as
                after every error but the two above, the step is given up: the rows are as if it had
                not run, and the next one can be executed.
        """
        if not step.number == self._num_sampled + 1 == self._num_executed:
            executed = "" if self._num_sampled < self._num_executed else ", and was not executed"
            raise ProtocolError(
                f"step {step.number} cannot be sampled; "
                f"step {self._num_sampled + 1} is next{executed}"
            )
        layout = step.layout
        if forced is not None:
            check_forced(forced, layout, self.config.vocab_size)
        if grammar is not None:
            grammar.check(layout.num_logits, self.config.vocab_size)
        self._num_sampled = step.number
        try:
            return self._finish(step, forced, grammar)
        except (ProtocolError, ConfigError) as fault:
            # To the caller these two mean that the step can still be sampled.
            self._give_up(layout)
            raise ExtensionError(f"step {step.number} is given up: {fault}") from fault
        except Exception:
            self._give_up(layout)
            raise

    def _finish(
        self, step: ExecutedStep, forced: Forced | None, grammar: GrammarMask | None
    ) -> PendingOutput:
        """Queue the rest of a step; see `sample`."""
        layout, parts = step.layout, self._parts
        tokens, results = None, None
        if forced is None and grammar is None and not self.trace.wants("processed_logits"):
            tokens = step.tokens(self.head)
        if tokens is None:
            try:
                results = self.head.finish(step, grammar)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(self.head, "finish", fault) from fault
            check_sampled(results.sampled, step, self.head)
            may_reject = results.sampled.num_sampled is not step.batch.num_logits
            tokens = DownloadedTokens(results.sampled, self.transfers, may_reject=may_reject)
            committed = results.sampled
            if forced is not None:
                committed = forced_tokens(forced, layout, self.transfers)
            parts.commit(step.batch, committed)
            self.trace.record("committed", committed)
        readers, logprobs = parts.extensions.outputs(step), None
        if results is not None:
            logprobs = results.logprobs
            if results.readers:
                readers = {**readers, **results.readers}
        pending = PendingOutput(layout, tokens, logprobs, self.transfers, readers, forced)
        parts.extensions.after_sample(step, pending)
        if layout.max_num_logits > 1:
            drafts = np.maximum(layout.num_logits_of - 1, 0)
            self.requests.progress.expect_drafts(layout.rows, drafts, pending)
        return pending

    def capture(self) -> None:
        """Capture every size of `config.graphs`; steps are replayed from then on.

        Call it before the first request arrives. No row is changed by it. A second call captures
        anew.

        Raises:
            CaptureError: A step cannot be captured. All steps stay eager.
            ExtensionError: The head's plain draw is not one that can be committed.
            ProtocolError: A step was executed but not sampled, or its output is not there yet.
        """
        self._check_idle()
        self._executor.capture()

    def release_graphs(self) -> None:
        """Let go of what `capture` made; steps run eagerly until it is called again."""
        self._executor.release()

    def warm_up(self) -> None:
        """Compile the kernels around the forward; see `Executor.warm_up`. No row is changed."""
        self._check_idle()
        self._executor.warm_up()

    def run_idle(self, num_reqs: int) -> Tensor:
        """Queue a decode step of requests that are none; see `Executor.run_idle`.

        Raises:
            CapacityError: There are more requests than rows.
            ProtocolError: A step was executed but not sampled: its logits would be overwritten.
        """
        self._check_idle()
        return self._executor.run_idle(num_reqs)

    @property
    def num_steps(self) -> dict[GraphMode, int]:
        """How many steps reached the device in each mode."""
        return self._executor.num_steps

    def update_rows(self, plan: StepPlan) -> None:
        """Apply a plan's lifecycle events on the host, for a step that runs nothing.

        Raises:
            CapacityError, ConfigError, ProtocolError: As `execute`.
        """
        check_events(plan, self.config, self.rows, self.block_tables)
        self.extensions.check(plan)
        self.lifecycle.apply(plan)
        self._last_layout = None

    def check(self, plan: StepPlan) -> None:
        """Raise what `execute`, or `update_rows` for a plan without work, would; change nothing."""
        check_events(plan, self.config, self.rows, self.block_tables)
        if plan.scheduled.req_ids:
            self._check_order(plan)
            check_work(plan, self.config, self.rows, self.block_tables)
        self.extensions.check(plan)

    def _check_idle(self) -> None:
        """Refuse a step beside another one, and one whose results have no place."""
        if self._num_sampled != self._num_executed:
            raise ProtocolError(
                f"step {self._num_executed} was executed but not sampled; "
                "call sample before the next execute"
            )
        self._executor.ring.make_room()

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
            self.extensions.check(plan)
            self.lifecycle.apply(plan)
        else:
            rows, room = check_work(plan, self.config, self.rows, self.block_tables)
            self.extensions.check(plan)
            self._last_layout = None  # not this one's, should something raise from here on
            self.lifecycle.apply(plan)
            try:
                layout = self._lay_out_lists(scheduled, rows)
            except Exception:
                self.lifecycle.take_back(plan)
                raise
        self._last_layout, self._room = layout, room
        return layout

    def _lay_out_lists(self, scheduled: Scheduled | NextDecode, rows: Int32 | None) -> BatchLayout:
        """Lay work out in the order that attention wants.

        Args:
            scheduled: The work, checked.
            rows: [num_reqs]. The requests' rows in the host's order; None where they have just
                moved.
        """
        attention, progress, order = self._parts.attention, self.requests.progress, None
        if attention.decode_threshold is not None:
            order = decodes_first(scheduled, attention.decode_threshold)
        listed = scheduled if order is None else in_order(scheduled, order)
        if rows is None or order is not None:
            rows = self.rows.rows(listed.req_ids)
        layout = layout_batch(
            listed,
            rows,
            batch_id=next(self._batch_ids),
            draws=self.head.draws,
            may_draft=self.config.max_drafts > 0,
        )
        if order is not None:
            layout.scheduled, layout.order = scheduled, order
        self.requests.agree(rows, layout.num_computed_tokens)
        if not progress.is_exact(rows):
            layout.is_exact = attention.needs_exact_lengths
            if attention.needs_exact_lengths:
                layout.set_computed(progress.exact(rows))
        return layout

    def _give_up(self, layout: BatchLayout) -> None:
        """Make the rows those of before a step whose work is not to count."""
        progress = self.requests.progress
        progress.retreat(layout.rows, layout.query_lens)
        before = layout.num_computed_tokens
        if not layout.is_exact:
            before = progress.exact(layout.rows)
        for row, num_computed_tokens in zip(layout.rows.tolist(), before.tolist(), strict=True):
            # The bounds stay: the scheduler may still take drafts of an earlier step for accepted.
            self.requests.num_computed_tokens.stage_write(row, 0, [num_computed_tokens])
        self._parts.extensions.give_up(layout)
        self._last_layout = None
