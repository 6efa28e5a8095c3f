"""Whole decode steps as graphs: from the rows of a batch to the tokens in them.

A graph is captured for each size, over requests that are none, and holds the step's inputs, the
attention metadata, the forward, the logits, the plain draw and the commit. All that a replay needs
of the host is which rows run, and that only where it changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout, pad_decode
from mrv2.graphs.capture import Graph, GraphMaker
from mrv2.ports import ForwardInputs
from mrv2.sampling.stage import LogitsView


@dataclass(slots=True, kw_only=True)
class DrawnStep:
    """A decode step up to its commit."""

    batch: InputBatch
    inputs: ForwardInputs
    hidden: Tensor
    """[num_reqs, hidden_size]."""
    logits: Tensor
    """[num_reqs, vocab_size], the model's."""
    token_ids: Tensor
    """[num_reqs] int64. Drawn plainly, and committed."""


class DecodeGraphs:
    """The captured decode steps of a runner, one for each padded number of requests.

    Args:
        idle_row: The row that pads a batch.
        maker: Captures.
    """

    def __init__(self, idle_row: int, maker: GraphMaker) -> None:
        self._idle_row = idle_row
        self._maker = maker
        self._captured: dict[int, tuple[Graph, DrawnStep]] = {}
        self._padded: BatchLayout | None = None
        self._rows_of: object = None
        self._cut: DrawnStep | None = None
        self._cut_of: tuple[int, int] = (0, 0)

    @property
    def sizes(self) -> list[int]:
        """Numbers of requests that a step was captured for."""
        return sorted(self._captured)

    def capture(self, num_reqs: int, work: Callable[[], DrawnStep]) -> None:
        """Capture a step.

        Args:
            num_reqs: Its size.
            work: Queues the step over rows that are on the device already, and idle.

        Raises:
            CaptureError: It cannot be captured. Nothing that was captured is left.
        """
        made: list[DrawnStep] = []

        def queue() -> list[Tensor]:
            made[:] = [work()]
            return [made[0].hidden, made[0].logits, made[0].token_ids]

        try:
            graph, (hidden, logits, token_ids) = self._maker.capture(
                f"a decode step of {num_reqs} requests", queue
            )
        except Exception:
            self.release()
            raise
        self._captured[num_reqs] = (
            graph,
            DrawnStep(
                batch=made[0].batch,
                inputs=made[0].inputs,
                hidden=hidden,
                logits=logits,
                token_ids=token_ids,
            ),
        )

    def padded(self, layout: BatchLayout, num_reqs: int) -> BatchLayout:
        """Return a layout padded to a captured size; the last one again while the rows stay."""
        if self._rows_of is not layout.packed or self._padded is None:
            self._rows_of = layout.packed
            self._padded = (
                layout
                if layout.num_reqs == num_reqs
                else pad_decode(layout, num_reqs, self._idle_row)
            )
        return self._padded

    def replay(self, layout: BatchLayout, num_reqs: int) -> DrawnStep:
        """Queue the step of a layout whose padded rows are on the device.

        Args:
            layout: Not padded.
            num_reqs: The captured size that it was padded to.

        Returns:
            Its values, without what pads it. They hold until the next replay.
        """
        graph, captured = self._captured[num_reqs]
        graph.replay()
        if self._cut is None or self._cut_of != (num_reqs, layout.num_reqs):
            self._cut = _cut(captured, layout)
            self._cut_of = num_reqs, layout.num_reqs
        # The views are those of the last step of this shape, which nobody looks at any more.
        batch = self._cut.batch
        batch.layout = layout
        if batch.logits_view.rows_np is not layout.logit_rows:
            batch.logits_view = replace(batch.logits_view, rows_np=layout.logit_rows)
        return self._cut

    def release(self) -> None:
        """Forget every graph and give its memory back."""
        self._captured.clear()
        self._cut = self._padded = None
        self._maker.release()


def _cut(step: DrawnStep, layout: BatchLayout) -> DrawnStep:
    """Return the views of a padded step's values that belong to a layout's requests."""
    num_reqs, batch = layout.num_reqs, step.batch
    return DrawnStep(
        batch=InputBatch(
            layout=layout,
            rows=batch.rows[:num_reqs],
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            cu_num_logits=batch.cu_num_logits[: num_reqs + 1],
            input_ids=batch.input_ids[:num_reqs],
            positions=batch.positions[:num_reqs],
            seq_lens=batch.seq_lens[:num_reqs],
            block_tables=tuple(table[:num_reqs] for table in batch.block_tables),
            slots=tuple(slots[:num_reqs] for slots in batch.slots),
            logits_indices=batch.logits_indices[:num_reqs],
            logits_view=LogitsView(
                logit_rows=batch.logits_view.logit_rows[:num_reqs],
                positions=batch.logits_view.positions[:num_reqs],
                rows_np=layout.logit_rows,
            ),
        ),
        inputs=ForwardInputs(
            input_ids=step.inputs.input_ids[:num_reqs],
            positions=step.inputs.positions[:num_reqs],
            attention=step.inputs.attention,
        ),
        hidden=step.hidden[:num_reqs],
        logits=step.logits[:num_reqs],
        token_ids=step.token_ids[:num_reqs],
    )
