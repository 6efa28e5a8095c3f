"""Heads and what stands beside them: a pooler, a model cut in two, and a head that is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrv2 import (
    Arrival,
    ExtensionResources,
    GenerateHead,
    GrammarMask,
    GraphMaker,
    HeadResults,
    PendingOutput,
    RunnerConfig,
    SampledTokens,
    Step,
    StepExtension,
    relay_head,
)
from mrv2.batch.inputs import InputBatch
from mrv2.ports import ForwardInputs, ForwardOutput
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.seams.extensions import rows_of_tokens
from mrv2_diff.toy_host import Toy, Work


class SummingPooler:
    """Returns the sum of a request's hidden states over all chunks of its prompt.

    Args:
        config: Of the runner.
    """

    def __init__(self, config: RunnerConfig) -> None:
        self._sums = torch.zeros((config.num_rows, 1), dtype=torch.int64, device=config.device)
        self._prompt_lens: dict[int, int] = {}
        self._new: list[int] = []

    def admit(self, row: int, arrival: Arrival) -> None:
        """Begin a sum."""
        self._prompt_lens[row] = arrival.prompt_len
        self._new.append(row)

    def evict(self, row: int) -> None:
        """Forget a row."""
        del self._prompt_lens[row]

    def flush(self) -> None:
        """Queue zeros for the sums that begin."""
        for row in self._new:
            self._sums[row].zero_()
        self._new.clear()

    def pool(self, batch: InputBatch, output: ForwardOutput) -> Mapping[str, Tensor]:
        """Add the step's hidden states; return the sums, [1] int64, of prompts that end with it."""
        layout = batch.layout
        rows = rows_of_tokens(batch, layout.num_tokens)
        self._sums.index_add_(0, rows, output.hidden[: layout.num_tokens])
        ends = zip(layout.req_ids, layout.rows.tolist(), layout.seq_lens.tolist(), strict=True)
        return {
            req_id: self._sums[row] for req_id, row, end in ends if end == self._prompt_lens[row]
        }


class FirstPart(HashLM):
    """The first KV group of a HashLM: it hands its hidden states on."""

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return the hidden states, as `intermediate`, too."""
        hidden = self.layers(inputs, range(1))
        return ForwardOutput(hidden=hidden, intermediate={"hidden": hidden})


class LastPart(HashLM):
    """The other KV groups: they go on from what was received, at one address in every step."""

    def __init__(self, config: RunnerConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks)
        self.received = torch.zeros((config.max_num_tokens, 1), dtype=torch.int64)

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return what a whole model would."""
        received = {"hidden": self.received[: len(inputs.input_ids)]}
        inputs = replace(inputs, intermediate=received)
        groups = range(1, len(self.caches))
        return ForwardOutput(hidden=self.layers(inputs, groups, inputs.intermediate["hidden"]))


class Outbox(StepExtension):
    """Keeps what each step commits, on the device, for the ranks before this one."""

    name = "outbox"

    def __init__(self, resources: ExtensionResources) -> None:
        config = resources.config
        num_reqs, device = config.max_num_reqs, config.device
        self._token_ids = torch.zeros((num_reqs, 1), dtype=torch.int64, device=device)
        self._num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)

    def after_commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Copy the tokens; once more where they are committed anew."""
        self._token_ids[: len(sampled.token_ids)] = sampled.token_ids
        self._num_sampled[: len(sampled.num_sampled)] = sampled.num_sampled

    def receive(self, step: Step) -> SampledTokens:
        """Return what was committed last, for the requests of an earlier rank's step."""
        num_reqs = step.layout.num_reqs
        return SampledTokens(
            token_ids=self._token_ids[:num_reqs], num_sampled=self._num_sampled[:num_reqs]
        )


@dataclass(slots=True, kw_only=True)
class Relay:
    """Two runners in a row, each with a part of the model and rows of its own."""

    first: Toy
    last: Toy
    """Its host is that of both."""
    received: Tensor
    """What the last one's model goes on from."""

    def step(self, work: Work) -> PendingOutput | None:
        """Queue one step on both; return what the last one drew."""
        plan = self.last.host.plan(work)
        if not work:
            self.first.runner.update_rows(plan)
            self.last.runner.update_rows(plan)
            return None
        earlier = self.first.runner.execute(plan)
        hidden = earlier.output.intermediate["hidden"]
        self.received[: len(hidden)] = hidden
        pending = self.last.runner.sample(self.last.runner.execute(plan))
        committed = self.first.runner.sample(earlier)
        assert committed.wait().token_ids == pending.wait().token_ids
        return pending


def relay(
    configs: tuple[RunnerConfig, RunnerConfig], makers: tuple[GraphMaker | None, GraphMaker | None]
) -> Relay:
    """Return two runners in a row.

    Args:
        configs: Of each, with the same KV groups, two or more.
        makers: Capture the steps of each; None where its graphs are empty.
    """
    last_part = LastPart(configs[1], 400)
    last = Toy(configs[1], around=lambda _: last_part, graph_maker=makers[1], extensions=(Outbox,))
    outbox = last.runner.extensions.members[0]
    assert isinstance(outbox, Outbox)
    first_part = FirstPart(configs[0], 400)
    first = Toy(
        configs[0],
        around=lambda _: first_part,
        graph_maker=makers[0],
        head=relay_head(outbox.receive),
        extensions=(),
    )
    return Relay(first=first, last=last, received=last_part.received)


class FaultyHead(GenerateHead):
    """Breaks the protocol of heads in one way, where `finish` has a say."""

    name = "faulty head"
    fault = ""
    """"raises", "rows", "columns", "too many" or "none"; right at first."""

    def finish(self, step: Step, grammar: GrammarMask | None) -> HeadResults:
        """Return wrong results."""
        results = super().finish(step, grammar)
        token_ids, num_sampled = results.sampled.token_ids, results.sampled.num_sampled
        if self.fault == "raises":
            raise ZeroDivisionError("one too many")
        if self.fault == "rows":
            token_ids = token_ids[1:]
        if self.fault == "columns":
            token_ids = token_ids.expand(-1, 2)
        if self.fault == "too many":
            num_sampled = num_sampled + 1
        if self.fault == "none":
            num_sampled = torch.zeros_like(num_sampled)
        sampled = SampledTokens(token_ids=token_ids, num_sampled=num_sampled)
        return replace(results, sampled=sampled)
