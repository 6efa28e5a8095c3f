"""Whole steps as graphs: from the rows of a batch to the tokens in them.

A graph is captured for each shape, over requests that are none, and holds the step's inputs, the
attention metadata, the forward, the head's plain draw and the commit. All that a replay needs of
the host is which rows run, how many tokens each, and that only where it changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from mrv2.batch.commit import commit_step
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout, Int32, pack_mixed, pack_uniform
from mrv2.execute.capture import Graph, GraphMaker
from mrv2.execute.parts import StepParts
from mrv2.execute.shape import GraphKey, GraphMode
from mrv2.head.protocol import Head, PlainDraw
from mrv2.memory.ring import Slot
from mrv2.output import HostTokens
from mrv2.ports import ForwardInputs, ForwardOutput
from mrv2.sampling.stage import LogitsView
from mrv2.step import Draws


@dataclass(slots=True, kw_only=True)
class WholeStep:
    """A step up to its commit, in which every request has a logit."""

    batch: InputBatch
    inputs: ForwardInputs
    output: ForwardOutput
    plain: PlainDraw


class StepGraphs:
    """The captured steps of a runner, one for each padded shape and variant.

    Args:
        parts: What a step is made of.
        maker: Captures.
    """

    def __init__(self, parts: StepParts, maker: GraphMaker) -> None:
        self.requests = parts.requests
        """Tokens of the rows; a step's drafts are among them until its commit."""
        self.transfers = parts.arena.transfers
        self._idle_row = parts.config.idle_row
        self._maker = maker
        self._captured: dict[GraphKey, tuple[Graph, WholeStep]] = {}
        self._cut: WholeStep | None = None
        self._cut_of: tuple[GraphKey, int, int] | None = None

    def capture(self, key: GraphKey, work: Callable[[], WholeStep]) -> None:
        """Capture a step.

        Args:
            key: Its shape.
            work: Queues the step over rows that are on the device already, and idle.

        Raises:
            CaptureError: It cannot be captured. Nothing that was captured is left.
        """
        made: list[WholeStep] = []

        def queue() -> list[Tensor]:
            made[:] = [work()]
            return _tensors(made[0])

        try:
            graph, tensors = self._maker.capture(_name(key), queue)
        except Exception:
            self.release()
            raise
        self._captured[key] = graph, _over(made[0], tensors)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def packed(self, layout: BatchLayout, key: GraphKey) -> Int32:
        """Return the `packed` of a layout padded to a captured shape."""
        if key.mode is GraphMode.MIXED:
            return pack_mixed(layout, key.num_reqs, self._idle_row)
        if layout.num_reqs == key.num_reqs:
            return layout.packed
        return pack_uniform(layout, key.num_reqs, self._idle_row)

    def replay(self, key: GraphKey) -> None:
        """Queue the step whose padded rows are on the device.

        Args:
            key: The captured shape that it was padded to.
        """
        self._captured[key][0].replay()

    def values(self, layout: BatchLayout, key: GraphKey) -> WholeStep:
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
        batch.logits_view = replace(
            batch.logits_view, rows_np=layout.logit_rows, batch_id=layout.batch_id
        )
        return self._cut

    def release(self) -> None:
        """Forget every graph and give its memory back."""
        self._captured.clear()
        self._cut = None
        self._maker.release()


class ReplayedStep:
    """A step that a graph ran to its committed tokens; see `mrv2.step.Step`.

    Args:
        number: Counts steps.
        layout: The step's.
        key: The captured shape that it was padded to.
        graphs: Hold its values until the next replay.
        slot: Where it writes its tokens on the host.
    """

    __slots__ = ("_graphs", "key", "layout", "number", "slot")

    def __init__(
        self, number: int, layout: BatchLayout, key: GraphKey, graphs: StepGraphs, slot: Slot
    ) -> None:
        self.number = number
        self.layout = layout
        self.key = key
        self.slot = slot
        self._graphs = graphs

    @property
    def values(self) -> WholeStep:
        """All that the graph made, without what pads it."""
        return self._graphs.values(self.layout, self.key)

    @property
    def batch(self) -> InputBatch:
        """Its inputs."""
        return self.values.batch

    @property
    def output(self) -> ForwardOutput:
        """What the model returned."""
        return self.values.output

    def draws(self, compute_logits: Callable[[Tensor], Tensor]) -> Draws:
        """Return the graph's logits, those of requests that draw nothing left out."""
        layout, values = self.layout, self.values
        if layout.max_num_logits > 1:
            self._put_drafts_back()
        batch, plain, view = values.batch, values.plain, values.batch.logits_view
        if layout.num_logits == len(plain.token_ids):
            return Draws(
                logits=plain.logits,
                view=view,
                cu_num_logits=batch.cu_num_logits,
                token_ids=plain.token_ids,
            )
        draws = self._graphs.transfers.upload(layout.draws)
        return Draws(
            logits=plain.logits.index_select(0, draws),
            view=LogitsView(
                logit_rows=view.logit_rows.index_select(0, draws),
                positions=view.positions.index_select(0, draws),
                rows_np=layout.logit_rows,
                batch_id=layout.batch_id,
            ),
            cu_num_logits=self._graphs.transfers.upload(layout.cu_num_logits),
            token_ids=plain.token_ids.index_select(0, draws),
        )

    def tokens(self, head: Head) -> HostTokens | None:
        """Return where it writes its tokens; None where its requests want more than these."""
        return self.slot if head.is_plain(self.layout) else None

    def _put_drafts_back(self) -> None:
        """Queue the drafts' return to their rows, where the commit put drawn tokens over them.

        They are the history of the logits behind them, for whoever draws once more. Until that is
        committed, the rows are as if all drafts had been accepted.
        """
        batch, requests = self.batch, self._graphs.requests
        drafts = batch.input_ids.view(self.layout.num_reqs, -1)[:, 1:].long()
        commit_step(
            batch.rows,
            batch.seq_lens,
            batch.num_logits,
            drafts,
            batch.num_logits - 1,
            requests.token_ids.tensor,
            requests.num_computed_tokens.tensor,
        )


def _name(key: GraphKey) -> str:
    of_variant = f", variant {key.variant}" if key.variant else ""
    if key.mode is GraphMode.MIXED:
        return f"a step of {key.num_tokens} tokens and up to {key.num_reqs} requests{of_variant}"
    with_drafts = f" with {key.query_len - 1} drafts each" if key.query_len > 1 else ""
    return f"a decode step of {key.num_reqs} requests{with_drafts}{of_variant}"


def _tensors(step: WholeStep) -> list[Tensor]:
    """Return what a replay writes and the host may read."""
    output = step.output
    return [
        output.hidden,
        *output.auxiliary,
        *output.intermediate.values(),
        *step.plain.tensors(),
    ]


def _over(step: WholeStep, tensors: list[Tensor]) -> WholeStep:
    """Return a step over other tensors, in the order of `_tensors`."""
    hidden, *rest = tensors
    output, num_auxiliary = step.output, len(step.output.auxiliary)
    auxiliary, rest = rest[:num_auxiliary], rest[num_auxiliary:]
    intermediate = dict(zip(output.intermediate, rest, strict=False))
    return WholeStep(
        batch=step.batch,
        inputs=step.inputs,
        output=ForwardOutput(hidden=hidden, auxiliary=tuple(auxiliary), intermediate=intermediate),
        plain=step.plain.over(rest[len(intermediate) :]),
    )


def _cut(step: WholeStep, layout: BatchLayout) -> WholeStep:
    """Return the views of a padded step's values that belong to a layout's requests."""
    num_reqs, num_tokens, batch = layout.num_reqs, layout.num_tokens, step.batch
    num_logits = num_tokens if batch.has_all_logits else num_reqs
    inputs, output, plain = step.inputs, step.output, step.plain
    return WholeStep(
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
            num_logits=batch.num_logits[:num_reqs],
            logits_indices=batch.logits_indices[:num_logits],
            has_all_logits=batch.has_all_logits,
            logits_view=LogitsView(
                logit_rows=batch.logits_view.logit_rows[:num_logits],
                positions=batch.logits_view.positions[:num_logits],
                rows_np=layout.logit_rows,
                batch_id=layout.batch_id,
            ),
        ),
        inputs=replace(
            inputs,
            input_ids=inputs.input_ids[:num_tokens],
            positions=inputs.positions[..., :num_tokens],
        ),
        output=ForwardOutput(
            hidden=output.hidden[:num_tokens],
            auxiliary=tuple(each[:num_tokens] for each in output.auxiliary),
            intermediate={name: each[:num_tokens] for name, each in output.intermediate.items()},
        ),
        plain=plain.over(
            [
                plain.logits[:num_logits],
                plain.token_ids[:num_logits],
                plain.sampled.token_ids[:num_reqs],
                plain.sampled.num_sampled[:num_reqs],
            ]
        ),
    )
