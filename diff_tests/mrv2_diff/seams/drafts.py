"""Drafts: where they come from, and a head that accepts as many of them as a script says.

`DraftTokens` takes those that the host knows, `DeviceDrafts` makes its own behind each commit, so
that a step can be planned whose drafts the host has not seen. Both put them into the token table
behind a row's known tokens, where the step finds them.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from mrv2 import (
    Arrival,
    ConfigError,
    ExtensionResources,
    GenerateHead,
    HeadResources,
    NextDecode,
    ProtocolError,
    SampledTokens,
    Scheduled,
    StepExtension,
    StepPlan,
)
from mrv2.batch.commit import by_request
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.memory.staged import StagedWriteTensor

Drafts = Mapping[str, Sequence[int]]
"""Tokens that each request runs behind its known ones."""


class ScriptedHead(GenerateHead):
    """Accepts of each request's right drafts as many as a script says, of 0 to all.

    A draft is right if the logit before it draws that token; what follows a wrong one is wrong.

    Args:
        resources: What it is built from.
    """

    name = "scripted"
    verifies_drafts = True

    def __init__(self, resources: HeadResources) -> None:
        super().__init__(resources)
        self._max_drafts = resources.config.max_drafts

    def accept(self, batch: InputBatch, cu_num_logits: Tensor, drawn: Tensor) -> SampledTokens:
        """Return each request's drawn tokens up to the first that a wrong or cut draft follows."""
        width, num_logits = batch.layout.max_num_logits, batch.num_logits
        if width <= 1:
            return super().accept(batch, cu_num_logits, drawn)
        ran = batch.input_ids
        if not batch.has_all_logits:
            ran = ran.index_select(0, batch.logits_indices)
        token_ids = by_request(drawn, cu_num_logits, num_logits, width).token_ids
        ran_by = by_request(ran.long(), cu_num_logits, num_logits, width).token_ids
        is_draft = torch.arange(1, width, device=drawn.device) < num_logits[:, None]
        is_right = is_draft & (ran_by[:, 1:] == token_ids[:, :-1])
        num_right = is_right.int().cumprod(1).sum(1)
        kept = torch.minimum(num_right, self.script(batch.rows, batch.seq_lens - num_logits))
        num_sampled = torch.minimum(1 + kept, num_logits).int()
        return SampledTokens(token_ids=token_ids, num_sampled=num_sampled)

    def script(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return how many drafts each request may keep at most, [num_reqs]: a hash of its place."""
        return ((rows.long() * 31 + positions) * 2654435761 >> 16) % (1 + self._max_drafts)


class AcceptsAll(ScriptedHead):
    """Accepts every right draft."""

    def script(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the most for each."""
        return torch.full_like(positions, self._max_drafts)


class DraftTokens(StepExtension):
    """Takes drafts of the host: `plan.extras["drafts"]`, a `Drafts`.

    A request in it has no output in flight: the place of its drafts is known to the host.
    """

    name = "drafts"
    takes_extras = True

    def __init__(self, resources: ExtensionResources) -> None:
        self._requests = resources.requests
        self._vocab_size = resources.config.vocab_size
        self._checked: tuple[Scheduled | NextDecode | None, Drafts] = None, {}
        """The work of the plan that was checked last, and its drafts."""

    def check(self, plan: StepPlan) -> None:
        """Refuse drafts that do not fit the work.

        Raises:
            ProtocolError: There are more or fewer than the request is to run behind its tokens.
            ConfigError: One is outside the vocabulary.
        """
        drafts, scheduled = cast(Drafts, plan.extras.get(self.name, {})), plan.scheduled
        self._checked = scheduled, drafts
        if not drafts:
            return
        ends = map(sum, zip(scheduled.num_computed_tokens, scheduled.num_tokens, strict=True))
        numbers = zip(scheduled.req_ids, ends, scheduled.num_known_tokens, strict=True)
        wanted = {req_id: end - num_known for req_id, end, num_known in numbers}
        for req_id, token_ids in drafts.items():
            if len(token_ids) != wanted.get(req_id, 0):
                raise ProtocolError(
                    f"request {req_id!r} is given {len(token_ids)} drafts and is to run "
                    f"{wanted.get(req_id, 0)}: give as many as it runs"
                )
            outside = [token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size]
            if outside:
                raise ConfigError(
                    f"request {req_id!r} is given drafts {outside}, outside the vocabulary of "
                    f"{self._vocab_size}: leave them out"
                )

    def before_forward(self, layout: BatchLayout) -> None:
        """Stage the drafts of the plan that this layout was made of."""
        scheduled, drafts = self._checked
        if scheduled is not layout.scheduled:
            return
        for req_id, token_ids in drafts.items():
            index = layout.req_ids.index(req_id)
            first = int(layout.seq_lens[index]) - len(token_ids)
            row = int(layout.rows[index])
            self._requests.token_ids.stage_write(row, first, list(token_ids))


class DeviceDrafts(StepExtension):
    """Proposes drafts on the device behind each commit, before the host has seen its tokens.

    What it proposes was given at the arrival: `arrival.extras["proposals"]`, a token for each
    position of the row.
    """

    name = "proposals"
    takes_extras = True

    def __init__(self, resources: ExtensionResources) -> None:
        config = resources.config
        self._requests = resources.requests
        self._end = config.max_model_len
        self._proposals = StagedWriteTensor(
            (config.num_rows, config.max_model_len + 1),
            torch.int32,
            config.device,
            resources.arena,
        )
        self._ahead = torch.arange(1, 1 + config.max_drafts, device=config.device)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Stage what is to be proposed for a request."""
        proposals = cast(list[int], arrival.extras.get(self.name, []))
        self._proposals.stage_write(row, 0, proposals)

    def after_commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Write the drafts behind the last token of each row that was given one."""
        tokens, rows = self._requests.token_ids.tensor, batch.rows.long()[:, None]
        progress = self._requests.num_computed_tokens.tensor[rows]
        positions = progress + self._ahead
        drafts = (sampled.num_sampled > 0)[:, None] & (positions < self._end)
        positions = torch.where(drafts, positions, self._end)  # the last column is no draft's
        proposals, kept = self._proposals.tensor[rows, positions], tokens[rows, self._end]
        proposed = torch.where(drafts, proposals, kept)
        tokens.index_put_((rows.expand_as(positions), positions), proposed)
