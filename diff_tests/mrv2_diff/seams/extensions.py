"""Extensions, each around one hook or two, and the models that read what they give."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mrv2 import (
    Arrival,
    Captures,
    ExtensionResources,
    Graph,
    PendingOutput,
    Reader,
    RunnerConfig,
    SampledTokens,
    Step,
    StepExtension,
    StepPlan,
)
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.memory.staged import StagedWriteTensor
from mrv2.ports import ForwardInputs, ForwardOutput
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.toy_host import ToyHost, Work
from mrv2_diff.toy_stories import RandomStory


def rows_of_tokens(batch: InputBatch, num_tokens: int) -> Tensor:
    """Return each token's row, [num_tokens] int32; of what pads the step, the last request's."""
    ends = batch.query_start_loc[1:]
    token_idx = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    batch_idx = torch.bucketize(token_idx, ends, right=True).clamp_(max=len(ends) - 1)
    return batch.rows.index_select(0, batch_idx)


class Salts(StepExtension):
    """Gives a further input: the salt of each token's request, from `arrival.extras["salt"]`."""

    name = "salt"
    takes_extras = True

    def __init__(self, resources: ExtensionResources) -> None:
        config, device = resources.config, resources.config.device
        self._of_row = StagedWriteTensor((config.num_rows,), torch.int64, device, resources.arena)
        self._of_token = torch.zeros(config.max_num_tokens, dtype=torch.int64, device=device)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Stage the request's salt; 0 if it has none."""
        salt = cast(int, arrival.extras.get(self.name, 0))
        self._of_row.stage_write(row, 0, np.array([salt], dtype=np.int64))

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Return [num_tokens] int64 under "salt"."""
        of_token = self._of_token[:num_tokens]
        torch.index_select(self._of_row.tensor, 0, rows_of_tokens(batch, num_tokens), out=of_token)
        return {self.name: of_token}


class SaltedHashLM(HashLM):
    """Adds the salt to each token's context."""

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return the contexts; there is a salt for each token, for what pads them, too."""
        hidden = super().forward(inputs).hidden
        return ForwardOutput(hidden=hidden + inputs.further["salt"][:, None])


class Adapters(Salts):
    """The same in two variants: a step without any salt is captured without the look-up."""

    def __init__(self, resources: ExtensionResources) -> None:
        super().__init__(resources)
        self._is_salted = np.zeros(resources.config.num_rows, dtype=np.bool_)
        self._looks_up = True

    def admit(self, row: int, arrival: Arrival) -> None:
        """Note whether the request has a salt."""
        super().admit(row, arrival)
        self._is_salted[row] = bool(arrival.extras.get(self.name))

    def evict(self, row: int) -> None:
        """Forget a row."""
        self._is_salted[row] = False

    def variants(self) -> Sequence[bool]:
        """Return both."""
        return (False, True)

    def variant(self, layout: BatchLayout) -> bool:
        """Say whether a request of the step has a salt."""
        return bool(self._is_salted[layout.rows].any())

    @contextmanager
    def capturing(self, variant: object) -> Iterator[None]:
        """Look salts up, or do not, while the step is captured."""
        before, self._looks_up = self._looks_up, bool(variant)
        yield
        self._looks_up = before

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Return the salts, or zeros at their address."""
        if self._looks_up:
            return super().extend(layout, batch, num_tokens)
        return {self.name: self._of_token[:num_tokens].zero_()}

    def baked(self, work: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
        """Return work that is done in the variant of now, as a graph has it baked in."""
        variant = self._looks_up

        def bake() -> list[Tensor]:
            with self.capturing(variant):
                return work()

        return bake


class BakingGraphMaker(PlayedGraphMaker):
    """Plays graphs in the variants of their captures."""

    adapters: Adapters

    def make(self, resources: ExtensionResources) -> Adapters:
        """Return the extension whose variants these are."""
        self.adapters = Adapters(resources)
        return self.adapters

    def capture(self, name: str, work: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        """Remember the work with its variant."""
        return super().capture(name, self.adapters.baked(work))


class Axes(Salts):
    """Takes the place of the positions: [2, num_tokens], their own and the salts."""

    def __init__(self, resources: ExtensionResources) -> None:
        super().__init__(resources)
        self._axes = torch.zeros(
            (2, resources.config.max_num_tokens), dtype=torch.int64, device=resources.config.device
        )

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Return [2, num_tokens] int64 under "positions"."""
        axes = self._axes[:, :num_tokens]
        axes[0, : len(batch.positions)] = batch.positions
        axes[1] = super().extend(layout, batch, num_tokens)[self.name]
        return {"positions": axes}


class AxesHashLM(HashLM):
    """Reads positions of two axes."""

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return the contexts with the second axis added."""
        positions, salts = inputs.positions
        hidden = super().forward(replace(inputs, positions=positions)).hidden
        return ForwardOutput(hidden=hidden + salts[:, None])


class Embeds(StepExtension):
    """Takes the place of the token ids, as images do.

    `arrival.extras["embeds"]` maps positions of the request to what stands there instead.
    """

    name = "embeds"
    takes_extras = True

    def __init__(self, resources: ExtensionResources) -> None:
        config, device = resources.config, resources.config.device
        size = (config.num_rows, config.max_model_len + 1)
        self._length = config.max_model_len
        self._of_row = StagedWriteTensor(size, torch.int32, device, resources.arena)
        self._of_token = torch.zeros((config.max_num_tokens, 1), dtype=torch.int64, device=device)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Stage what stands at each position; -1 where it is the token."""
        embeds = cast(Mapping[int, int], arrival.extras.get(self.name, {}))
        places = [embeds.get(position, -1) for position in range(self._length)]
        self._of_row.stage_write(row, 0, places)

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Return [num_tokens, 1] int64 under "inputs_embeds"."""
        own = len(batch.input_ids)
        embeds = self._of_row.tensor[rows_of_tokens(batch, own), batch.positions].long()
        self._of_token[:own, 0] = torch.where(embeds >= 0, embeds, batch.input_ids)
        return {"inputs_embeds": self._of_token[:num_tokens]}


class EmbeddingHashLM(HashLM):
    """Reads embeddings."""

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return the contexts of what was embedded."""
        assert inputs.inputs_embeds is not None
        return super().forward(replace(inputs, input_ids=inputs.inputs_embeds[:, 0]))


class LongStepsEager(StepExtension):
    """Forbids the capture of steps with a long request."""

    name = "long steps eager"
    length = 30

    def __init__(self, resources: ExtensionResources) -> None:
        pass

    def captures(self, layout: BatchLayout) -> Captures:
        """Return NONE for a layout with a request beyond the length.

        Graphs are captured over longer ones, of requests that are none.
        """
        is_long = layout.batch_id and layout.max_seq_len > self.length
        return Captures.NONE if is_long else Captures.WHOLE


class ForwardOnly(StepExtension):
    """Does between the forward and the draw what no graph may hold."""

    name = "forward only"

    def __init__(self, resources: ExtensionResources) -> None:
        pass

    def captures(self, layout: BatchLayout) -> Captures:
        """Return FORWARD."""
        return Captures.FORWARD


class Marks(StepExtension):
    """Writes into each row which step it ran last and which token it was given.

    The number of the step is staged on the host before it; the rest is done on the device behind
    its commit, in the graph where there is one. Output: (step, token) of each request.
    """

    name = "marks"

    def __init__(self, resources: ExtensionResources, calls: list[str] | None = None) -> None:
        config, device = resources.config, resources.config.device
        self.number = 0
        """Steps prepared."""
        self.calls: list[str] = [] if calls is None else calls
        """Hooks that were called on the host."""
        self.rows: dict[int, str] = {}
        self._requests, self._transfers = resources.requests, resources.transfers
        self._number = StagedWriteTensor((1,), torch.int32, device, resources.arena)
        self._marks = torch.zeros((config.num_rows, 2), dtype=torch.int32, device=device)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Note who has the row."""
        self.rows[row] = arrival.req_id

    def evict(self, row: int) -> None:
        """Forget a row."""
        del self.rows[row]

    def before_forward(self, layout: BatchLayout) -> None:
        """Stage the number of the step."""
        self.calls.append(f"{self.name} before_forward")
        self.number += 1
        self._number.stage_write(0, 0, [self.number])

    def after_commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Mark the rows of the batch; once more where it is committed anew."""
        self.calls.append(f"{self.name} after_commit")
        rows = batch.rows.long()
        progress = self._requests.num_computed_tokens.tensor[rows]
        tokens = self._requests.token_ids.tensor[rows, progress]
        self._marks[rows] = torch.stack([self._number.tensor.expand_as(tokens), tokens], dim=1)

    def outputs(self, step: Step) -> Reader:
        """Queue the copy of the marks of the step's requests."""
        self.calls.append(f"{self.name} outputs")
        marks = self._transfers.download(self._marks[step.batch.rows.long()])
        return lambda: list(map(tuple, marks.tolist()))

    def after_sample(self, step: Step, pending: PendingOutput) -> None:
        """Note the call."""
        self.calls.append(f"{self.name} after_sample")


class Faulty(StepExtension):
    """Raises in one hook, at one of its calls.

    Args:
        resources: What it is built from.
    """

    name = "faulty"
    hook = ""
    """Which hook raises; none at first."""
    at_call = 1
    """At which of its calls from now on."""

    def __init__(self, resources: ExtensionResources) -> None:
        self._device = resources.config.device
        self._input = torch.zeros(
            resources.config.max_num_tokens, dtype=torch.int64, device=self._device
        )

    def arm(self, hook: str, at_call: int = 1) -> None:
        """Raise in a hook."""
        self.hook, self.at_call = hook, at_call

    def admit(self, row: int, arrival: Arrival) -> None:
        """Raise, maybe."""
        self._pass("admit")

    def check(self, plan: StepPlan) -> None:
        """Raise, maybe."""
        self._pass("check")

    def captures(self, layout: BatchLayout) -> Captures:
        """Raise, maybe."""
        self._pass("captures")
        return Captures.WHOLE

    def variant(self, layout: BatchLayout) -> None:
        """Raise, maybe."""
        self._pass("variant")

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Raise, maybe, or give an input at another address than before."""
        self._pass("extend")
        if self.hook == "address":
            return {"unused": torch.zeros(num_tokens, dtype=torch.int64, device=self._device)}
        return {"unused": self._input[:num_tokens]}

    def before_forward(self, layout: BatchLayout) -> None:
        """Raise, maybe."""
        self._pass("before_forward")

    def after_commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Raise, maybe."""
        self._pass("after_commit")

    def outputs(self, step: Step) -> None:
        """Raise, maybe."""
        self._pass("outputs")

    def after_sample(self, step: Step, pending: PendingOutput) -> None:
        """Raise, maybe."""
        self._pass("after_sample")

    def _pass(self, hook: str) -> None:
        if hook == self.hook:
            self.at_call -= 1
            if not self.at_call:
                self.hook = ""
                raise ZeroDivisionError("one too many")


class TellingHost(ToyHost):
    """A host that tells an extension something of each request.

    Args:
        config: Of the runner.
        name: The extension's.
        told: Returns what, by the request's prompt.
    """

    def __init__(
        self, config: RunnerConfig, name: str, told: Callable[[list[int]], object]
    ) -> None:
        super().__init__(config.kv_groups, 400)
        self._name, self._told = name, told

    def plan(self, work: Work) -> StepPlan:
        """Return the plan with extras for those that arrive."""
        made = super().plan(work)
        arrivals = tuple(
            replace(each, extras={self._name: self._told(self.requests[each.req_id].prompt)})
            for each in made.arrivals
        )
        return replace(made, arrivals=arrivals)


class Unshared(RandomStory):
    """Lives of requests that share no prefix: what is cached depends on what they were told."""

    @property
    def _page(self) -> int:
        return self._config.max_model_len + 1


def salt_of(prompt: list[int]) -> int:
    """Return the salt that a host tells of a request; two of three have none."""
    return prompt[0] * 10**15 if prompt[0] % 3 == 0 else 0
