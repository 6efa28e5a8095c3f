"""Whole steps as graphs: from the rows of a batch to the tokens in them.

A graph is captured for each shape, over requests that are none, and holds the step's inputs, the
attention metadata, the forward, the logits, the plain draw and the commit. All that a replay needs
of the host is which rows run, how many tokens each, and that only where it changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout, Int32, pack_decode, pack_mixed
from mrv2.graphs.capture import Graph, GraphMaker
from mrv2.graphs.shape import GraphKey, GraphMode
from mrv2.ports import ForwardInputs
from mrv2.sampling.stage import LogitsView


@dataclass(slots=True, kw_only=True)
class DrawnStep:
    """A step up to its commit, in which every request has a logit."""

    batch: InputBatch
    inputs: ForwardInputs
    hidden: Tensor
    """[num_tokens, hidden_size]."""
    logits: Tensor
    """[num_reqs, vocab_size], the model's."""
    token_ids: Tensor
    """[num_reqs] int64. Drawn plainly, and committed. Without meaning where nothing is drawn."""


class StepGraphs:
    """The captured steps of a runner, one for each padded shape.

    Args:
        idle_row: The row that pads a batch.
        maker: Captures.
    """

    def __init__(self, idle_row: int, maker: GraphMaker) -> None:
        self._idle_row = idle_row
        self._maker = maker
        self._captured: dict[GraphKey, tuple[Graph, DrawnStep]] = {}
        self._packed: Int32 | None = None
        self._packed_from: object = None
        self._cut: DrawnStep | None = None
        self._cut_of: tuple[GraphKey, int, int] | None = None

    def capture(self, key: GraphKey, work: Callable[[], DrawnStep]) -> None:
        """Capture a step.

        Args:
            key: Its shape.
            work: Queues the step over rows that are on the device already, and idle.

        Raises:
            CaptureError: It cannot be captured. Nothing that was captured is left.
        """
        made: list[DrawnStep] = []

        def queue() -> list[Tensor]:
            made[:] = [work()]
            return [made[0].hidden, made[0].logits, made[0].token_ids]

        try:
            graph, (hidden, logits, token_ids) = self._maker.capture(_name(key), queue)
        except Exception:
            self.release()
            raise
        self._captured[key] = (
            graph,
            DrawnStep(
                batch=made[0].batch,
                inputs=made[0].inputs,
                hidden=hidden,
                logits=logits,
                token_ids=token_ids,
            ),
        )

    def packed(self, layout: BatchLayout, key: GraphKey) -> Int32:
        """Return the `packed` of a layout padded to a captured shape.

        It is the last one again while the rows stay.
        """
        if self._packed_from is not layout.packed or self._packed is None:
            self._packed_from = layout.packed
            self._packed = self._pack(layout, key)
        return self._packed

    def _pack(self, layout: BatchLayout, key: GraphKey) -> Int32:
        if key.mode is GraphMode.MIXED:
            return pack_mixed(layout, key.num_reqs, self._idle_row)
        if layout.num_reqs == key.num_reqs:
            return layout.packed
        return pack_decode(layout, key.num_reqs, self._idle_row)

    def replay(self, key: GraphKey) -> None:
        """Queue the step whose padded rows are on the device.

        Args:
            key: The captured shape that it was padded to.
        """
        self._captured[key][0].replay()

    def values(self, layout: BatchLayout, key: GraphKey) -> DrawnStep:
        """Return the values of the step that was replayed last, without what pads it.

        They hold until the next replay. Most steps go without: to cut two dozen tensors costs more
        than to launch the step.

        Args:
            layout: The step's, not padded.
            key: The captured shape that it was padded to.
        """
        shape = key, layout.num_reqs, layout.num_tokens
        if self._cut is None or self._cut_of != shape:
            self._cut, self._cut_of = _cut(self._captured[key][1], layout), shape
        # The views are those of the last step of this shape, which nobody looks at any more.
        batch = self._cut.batch
        batch.layout = layout
        if batch.logits_view.rows_np is not layout.logit_rows:
            batch.logits_view = replace(batch.logits_view, rows_np=layout.logit_rows)
        return self._cut

    def release(self) -> None:
        """Forget every graph and give its memory back."""
        self._captured.clear()
        self._cut = self._packed = None
        self._maker.release()


def _name(key: GraphKey) -> str:
    if key.mode is GraphMode.DECODE:
        return f"a decode step of {key.num_reqs} requests"
    return f"a step of {key.num_tokens} tokens and up to {key.num_reqs} requests"


def _cut(step: DrawnStep, layout: BatchLayout) -> DrawnStep:
    """Return the views of a padded step's values that belong to a layout's requests."""
    num_reqs, num_tokens, batch = layout.num_reqs, layout.num_tokens, step.batch
    return DrawnStep(
        batch=InputBatch(
            layout=layout,
            rows=batch.rows[:num_reqs],
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            cu_num_logits=batch.cu_num_logits[: num_reqs + 1],
            input_ids=batch.input_ids[:num_tokens],
            positions=batch.positions[:num_tokens],
            seq_lens=batch.seq_lens[:num_reqs],
            block_tables=tuple(table[:num_reqs] for table in batch.block_tables),
            slots=tuple(slots[:num_tokens] for slots in batch.slots),
            logits_indices=batch.logits_indices[:num_reqs],
            logits_view=LogitsView(
                logit_rows=batch.logits_view.logit_rows[:num_reqs],
                positions=batch.logits_view.positions[:num_reqs],
                rows_np=layout.logit_rows,
            ),
        ),
        inputs=ForwardInputs(
            input_ids=step.inputs.input_ids[:num_tokens],
            positions=step.inputs.positions[:num_tokens],
            attention=step.inputs.attention,
        ),
        hidden=step.hidden[:num_tokens],
        logits=step.logits[:num_reqs],
        token_ids=step.token_ids[:num_reqs],
    )
