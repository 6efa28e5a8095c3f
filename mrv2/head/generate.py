"""The head of a model that writes: logits, the sampler, a token for each request."""

from functools import partial

from torch import Tensor

from mrv2.batch.commit import SampledTokens, by_request
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.errors import ConfigError
from mrv2.head.protocol import HeadFactory, HeadResources, HeadResults, PlainDraw
from mrv2.plan import Arrival
from mrv2.ports import Captures, ForwardOutput
from mrv2.sampling.grammar import GrammarMask
from mrv2.sampling.sampler import Sampler
from mrv2.sampling.stage import StageFactory
from mrv2.sampling.stages import STAGES
from mrv2.step import Step


class GenerateHead:
    """Draws a token for each logit.

    Args:
        resources: What it is built from.
        stages: What processes logits, in order; `stages_with` adds a host's own.

    Raises:
        ConfigError: Steps may have drafts, which this head cannot verify.
    """

    name = "generate"
    draws = True
    captures = Captures.WHOLE
    verifies_drafts = False
    """Whether `accept` may leave tokens out. A subclass that verifies drafts says so."""

    def __init__(self, resources: HeadResources, stages: tuple[StageFactory, ...] = STAGES) -> None:
        config = resources.config
        if config.max_drafts and not self.verifies_drafts:
            raise ConfigError(
                f"max_drafts is {config.max_drafts}, and the head {self.name!r} verifies no "
                "drafts: give one that does, or leave max_drafts at 0"
            )
        self.sampler = Sampler(config, resources.requests, resources.arena, resources.trace, stages)
        self._model = resources.model
        self._transfers = resources.transfers
        self._trace = resources.trace

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's sampling parameters into its row."""
        self.sampler.admit(row, arrival)

    def evict(self, row: int) -> None:
        """Forget a row."""
        self.sampler.evict(row)

    def flush(self) -> None:
        """Stage what changed."""
        self.sampler.flush()

    def plain(self, batch: InputBatch, output: ForwardOutput) -> PlainDraw:
        """Queue logits and a draw in which no stage has a say but the temperature."""
        hidden = output.hidden
        if not batch.has_all_logits:
            hidden = hidden.index_select(0, batch.logits_indices)
        logits = self._model.compute_logits(hidden)
        drawn = self.sampler.draw_plainly(logits, batch.logits_view)
        sampled = self.accept(batch, batch.cu_num_logits, drawn)
        return PlainDraw(logits=logits, token_ids=drawn, sampled=sampled)

    def is_plain(self, layout: BatchLayout) -> bool:
        """Say whether no row of a step asks for a stage or for logprobs."""
        return self.sampler.draws_plainly(layout.logit_rows, layout.batch_id)

    def finish(self, step: Step, grammar: GrammarMask | None) -> HeadResults:
        """Queue the draw under all that the rows ask for."""
        draws = step.draws(self._model.compute_logits)
        if grammar is not None:
            grammar.apply(draws.logits, self._transfers)
        self._trace.record("logits", draws.logits)
        if draws.token_ids is not None and grammar is None and self.is_plain(step.layout):
            output = self.sampler.drawn(draws.token_ids, draws.logits, draws.view)
        else:
            output = self.sampler(draws.logits, draws.view)
        sampled = self.accept(step.batch, draws.cu_num_logits, output.token_ids)
        return HeadResults(sampled=sampled, logprobs=output.logprobs)

    def accept(self, batch: InputBatch, cu_num_logits: Tensor, drawn: Tensor) -> SampledTokens:
        """Return which of the drawn tokens each request is given: all.

        Args:
            batch: The step's inputs; what a request ran behind its first logit are drafts.
            cu_num_logits: [num_reqs + 1] int32. First logit of each request.
            drawn: [num_logits] int64.
        """
        layout = batch.layout
        if layout.num_logits == layout.num_reqs and layout.max_num_logits == 1:
            return SampledTokens(token_ids=drawn.unsqueeze(1), num_sampled=batch.num_logits)
        return by_request(drawn, cu_num_logits, batch.num_logits, layout.max_num_logits)


def generate_head(stages: tuple[StageFactory, ...] = STAGES) -> HeadFactory:
    """Return what makes a `GenerateHead` with these stages."""
    return partial(GenerateHead, stages=stages)
