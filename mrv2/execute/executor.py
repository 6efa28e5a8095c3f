"""Brings a laid out step to the device: as a graph where one fits, or operation by operation.

It owns what a step's way needs and no request does: graphs, the ring that replays write to, the
staging of a layout, and steps of requests that are none.
"""

from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mrv2.batch.commit import SampledTokens
from mrv2.batch.inputs import prepare_inputs, prepare_mixed_inputs
from mrv2.batch.layout import BatchLayout, idle_decode, idle_mixed, layout_batch
from mrv2.errors import CapacityError
from mrv2.execute.capture import GraphMaker
from mrv2.execute.eager import EagerStep
from mrv2.execute.parts import StepParts
from mrv2.execute.shape import WHOLE, GraphKey, GraphMode, GraphShapes
from mrv2.execute.whole import ReplayedStep, StepGraphs, WholeStep
from mrv2.head.check import check_form
from mrv2.memory.ring import ResultRing, publish
from mrv2.plan import Scheduled
from mrv2.ports import Captures

ExecutedStep: TypeAlias = EagerStep | ReplayedStep


class Executor:
    """Runs steps up to what the host has to say about their tokens.

    Args:
        parts: What a step is made of.
        graph_maker: Captures whole steps; None where there is no such thing.
    """

    def __init__(self, parts: StepParts, graph_maker: GraphMaker | None) -> None:
        config = parts.config
        self._parts = parts
        self._transfers = parts.arena.transfers
        self._shapes = GraphShapes(config.graphs, config.max_num_reqs, config.max_num_tokens)
        self._graphs = None if graph_maker is None else StepGraphs(parts, graph_maker)
        self.ring = ResultRing(config.max_num_reqs * (1 + config.max_drafts), config.device)
        """Where replayed steps write their tokens."""
        self._most = min(parts.head.captures, parts.attention.captures)
        """How much may be captured of any step."""
        self._captured = Captures.NONE
        """How much was."""
        self._staged: tuple[int, GraphKey] | None = None
        """Batch and shape of the layout that is on the device."""
        self._chosen: tuple[int, GraphKey] | None = None
        """A batch and the key of its steps, where no extension decides it anew for each."""
        self.num_steps: dict[GraphMode, int] = dict.fromkeys(GraphMode, 0)
        """How many steps reached the device in each mode."""

    def run(self, layout: BatchLayout, number: int) -> ExecutedStep:
        """Queue a step; the ring has room for it.

        Args:
            layout: The step's; its rows have taken what its plan says.
            number: Counts steps.

        Raises:
            ExtensionError: An extension broke its protocol or raised.
        """
        parts, key = self._parts, self._choose(layout)
        self._transfers.begin_step()
        parts.extensions.before_forward(layout)
        self._flush(layout, key)
        parts.trace.record("graph_key", key)
        if key.mode in WHOLE:
            step: ExecutedStep = self._replay(layout, key, number)
        else:
            step = self._run_eagerly(layout, key, number)
        self.num_steps[key.mode] += 1
        return step

    def run_idle(self, num_reqs: int) -> Tensor:
        """Queue a decode step of requests that are none, as a real one would be; no row changes.

        Args:
            num_reqs: How many; at most `max_num_reqs`.

        Returns:
            Hidden states, [num_reqs, hidden_size].

        Raises:
            CapacityError: There are more requests than rows.
        """
        config = self._parts.config
        most = min(config.max_num_reqs, config.max_num_tokens)
        if not 1 <= num_reqs <= most:
            raise CapacityError(
                f"{num_reqs} idle requests are to run; max_num_reqs is {config.max_num_reqs} and "
                f"max_num_tokens {config.max_num_tokens}: run 1 to {most}"
            )
        layout = idle_decode(num_reqs, config.idle_row, 1)
        key = self._choose(layout)
        if key.mode is not GraphMode.DECODE:
            # Steps with prompts do not know the idle row: in them a request that is none has no
            # token.
            key = GraphKey(GraphMode.EAGER, num_reqs, num_reqs)
        self._transfers.begin_step()
        self._parts.extensions.before_forward(layout)
        self._flush(layout, key)
        if key.mode is GraphMode.DECODE:
            return self._replay(layout, key, 0).output.hidden
        if self._parts.head.draws:
            return self._queue_whole(layout, GraphMode.DECODE).output.hidden
        return self._run_eagerly(layout, key, 0).output.hidden

    def warm_up(self) -> None:
        """Run the kernels around the forward over requests that are none, so that all are compiled.

        Those of sampling features are `draw_unattached`'s. No row is changed.
        """
        parts, config = self._parts, self._parts.config
        rows = np.array([config.idle_row], dtype=np.int32)
        # The decode comes last: it knows the idle row, whose progress its commit leaves at 0.
        for query_len in (min(2, config.max_num_tokens, config.max_model_len), 1):
            scheduled = Scheduled(
                req_ids=[""],
                num_tokens=[query_len],
                num_computed_tokens=[0],
                num_known_tokens=[query_len],
            )
            layout = layout_batch(scheduled, rows)
            self._transfers.begin_step()
            self._flush(layout, GraphKey(GraphMode.EAGER, query_len, 1))
            batch = prepare_inputs(layout, parts.requests, parts.block_tables, parts.buffers)
        token_ids = torch.zeros((1, 1), dtype=torch.int64, device=config.device)
        parts.commit(batch, SampledTokens(token_ids=token_ids, num_sampled=batch.num_logits))

    def capture(self) -> None:
        """Capture every size of `config.graphs`; steps are replayed from then on.

        Raises:
            CaptureError: A step cannot be captured. All steps stay eager.
        """
        self.ring.read_all()
        self.release()
        config = self._parts.config
        if self._most is not Captures.NONE:
            for num_tokens in sorted(config.graphs.forwards, reverse=True):
                self._capture_forward(num_tokens)
        if self._most is Captures.WHOLE:
            length = config.max_model_len
            for num_tokens in sorted(config.graphs.mixed, reverse=True):
                key = self._shapes.mixed(num_tokens)
                self._capture(key, idle_mixed(num_tokens, key.num_reqs, config.idle_row, length))
            for key in self._shapes.uniform():
                layout = idle_decode(key.num_reqs, config.idle_row, length, key.query_len)
                self._capture(key, layout)
        self.ring.restart()
        self._captured = self._most

    def release(self) -> None:
        """Let go of what `capture` made; steps run eagerly until it is called again."""
        self._captured, self._chosen = Captures.NONE, None
        if self._graphs is not None:
            self._graphs.release()

    def _choose(self, layout: BatchLayout) -> GraphKey:
        chosen, batch_id = self._chosen, layout.batch_id
        if chosen is not None and chosen[0] == batch_id:
            return chosen[1]
        captures, extensions = self._captured, self._parts.extensions
        if captures is Captures.NONE:
            return GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs)
        captures = min(captures, extensions.captures(layout))
        key = self._shapes.choose(layout, captures, extensions.variant(layout))
        if key.mode in WHOLE and key not in self._whole:
            key = self._shapes.choose(layout, Captures.FORWARD)
        self._chosen = (batch_id, key) if batch_id and extensions.leave_the_key else None
        return key

    def _capture_forward(self, num_tokens: int) -> None:
        """Let the model capture a forward over tokens that are nobody's."""
        parts, config = self._parts, self._parts.config
        key = self._shapes.mixed(num_tokens)
        layout = idle_mixed(num_tokens, key.num_reqs, config.idle_row, config.max_model_len)
        self._begin(layout)
        batch = prepare_mixed_inputs(layout, parts.requests, parts.block_tables, parts.buffers)
        for replays in (False, True):  # what a first run allocates is not captured
            parts.model.forward(parts.inputs(batch, num_tokens, replays=replays, plans=False))

    def _capture(self, key: GraphKey, layout: BatchLayout) -> None:
        """Capture a step in every variant."""
        extensions = self._parts.extensions
        if extensions.captures(layout) is not Captures.WHOLE:
            return
        for variant in extensions.variants():
            own = key._replace(variant=variant)
            self._begin(layout)
            with extensions.capturing(variant):
                self._whole.capture(own, partial(self._queue_to_the_end, layout, key.mode))

    def _run_eagerly(self, layout: BatchLayout, key: GraphKey, number: int) -> EagerStep:
        """Queue a step up to its hidden states, operation by operation."""
        parts, trace = self._parts, self._parts.trace
        batch = prepare_inputs(layout, parts.requests, parts.block_tables, parts.buffers)
        trace.record("batch", batch)
        inputs = parts.inputs(batch, key.num_tokens, replays=key.mode is GraphMode.FORWARD)
        trace.record("forward_inputs", inputs)
        output = parts.model.forward(inputs)
        trace.record("hidden", output.hidden)
        return EagerStep(number, layout, key, batch, output)

    def _replay(self, layout: BatchLayout, key: GraphKey, number: int) -> ReplayedStep:
        """Queue a whole step, its commit included, in one launch."""
        parts, trace = self._parts, self._parts.trace
        if parts.attention.plans_replays:
            parts.attention.plan_replay(layout, key.num_reqs, key.num_tokens)
        width = max(layout.max_num_logits, 1)
        slot = self.ring.begin(layout.num_reqs * width, may_reject=width > 1)
        self._whole.replay(key)
        step = ReplayedStep(number, layout, key, self._whole, slot)
        if trace.wants("batch"):
            trace.record("batch", step.batch)
            trace.record("forward_inputs", step.values.inputs)
            trace.record("hidden", step.output.hidden)
        return step

    def _queue_to_the_end(self, layout: BatchLayout, mode: GraphMode) -> WholeStep:
        """Queue a step to its very end: its tokens are written into the host's memory."""
        step = self._queue_whole(layout, mode)
        sampled, ring = step.plain.sampled, self.ring
        check_form(sampled, layout.num_reqs, layout.max_num_logits, self._parts.head)
        publish(sampled.token_ids, sampled.num_sampled, ring.cursor, ring.values)
        return step

    def _queue_whole(self, layout: BatchLayout, mode: GraphMode) -> WholeStep:
        """Queue a step with a plain draw and its commit.

        Args:
            layout: Of requests that are none; its packed values are on the device.
            mode: Which kind of whole step it is.
        """
        parts = self._parts
        prepare = prepare_mixed_inputs if mode is GraphMode.MIXED else prepare_inputs
        batch = prepare(layout, parts.requests, parts.block_tables, parts.buffers)
        inputs = parts.inputs(batch, layout.num_tokens)
        output = parts.model.forward(inputs)
        plain = parts.head.plain(batch, output)
        parts.commit(batch, plain.sampled)
        return WholeStep(batch=batch, inputs=inputs, output=output, plain=plain)

    def _begin(self, layout: BatchLayout) -> None:
        """Put a layout that is captured over on the device."""
        self._transfers.begin_step()
        self._flush(layout, GraphKey(GraphMode.EAGER, layout.num_tokens, layout.num_reqs))

    def _flush(self, layout: BatchLayout, key: GraphKey) -> None:
        """Queue what changed since the last step, the layout included: one upload and one kernel.

        Nothing changed queues nothing.
        """
        self._parts.lifecycle.flush()
        staged = self._staged
        if staged is None or staged[0] != layout.batch_id or staged[1] != key or not staged[0]:
            packed = self._whole.packed(layout, key) if key.mode in WHOLE else layout.packed
            self._parts.buffers.stage(packed)
            self._staged = layout.batch_id, key
        self._parts.arena.flush()

    @property
    def _whole(self) -> StepGraphs:
        assert self._graphs is not None, "the runner refuses sizes that nothing can capture"
        return self._graphs
