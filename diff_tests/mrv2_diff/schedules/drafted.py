"""Random schedules with drafts: what a request returns must be what it returns without.

vLLM's scheduler schedules drafts as it does under speculative decoding, and the adapter plans them.
Where they come from and how many are accepted is the toys' (`mrv2_diff.seams.drafts`): the driver
knows what each request must return, so some drafts are right and some wrong, and a scripted head
accepts any number of the right ones. Where outputs are taken before the next step, the host
proposes; under async scheduling it says only how many there are, and the device proposes.

Two things are left out, in which vLLM's scheduler counts tokens that there are not: the drafts with
which a session's turn would go on behind its end, and a load that fails while drafts are in flight.
"""

import random
from collections.abc import Mapping
from typing import Any

from mrv2_compat.vllm_v1.features.feature import (
    ActiveFeature,
    CoreParts,
    Feature,
    FeatureContext,
)
from mrv2_compat.vllm_v1.features.registry import FEATURES
from mrv2_diff.schedules.actions import Arrive, Setup
from mrv2_diff.schedules.driver import Driver, Turn
from mrv2_diff.schedules.engine import HashEngine, HashRunner
from mrv2_diff.seams.drafts import DeviceDrafts, DraftTokens, ScriptedHead

# isort: split
# The engine's module prepares the process that this reads.
from vllm.v1.outputs import DraftTokenIds

_WRONG = 0.3
"""Part of the drafts that are not what is drawn."""


class Drafts(ActiveFeature):
    """The toys' drafts as a feature of the adapter.

    Args:
        max_drafts: Of a request in a step.
        proposals: What the device proposes for each request, by id: a token for each position.
    """

    name = DraftTokens.name

    def __init__(self, max_drafts: int, proposals: Mapping[str, list[int]] | None) -> None:
        self.max_drafts = max_drafts
        self._proposals = proposals

    def parts(self) -> CoreParts:
        """Return a head that keeps some of the drafts, and who puts them into the rows."""
        who = DraftTokens if self._proposals is None else DeviceDrafts
        return CoreParts(extensions=(who,), head=lambda stages: ScriptedHead)

    def plan_extra(self, scheduler_output: Any) -> object | None:
        """Return the drafts that vLLM schedules, where it knows them.

        It fills a step up with -1; any token will do in that place.
        """
        if self._proposals is not None:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return {name: [max(token, 0) for token in tokens] for name, tokens in drafts.items()}


class Proposals(ActiveFeature):
    """Tells the device's proposer of each request that arrives.

    Args:
        proposals: As for `Drafts`.
    """

    name = DeviceDrafts.name

    def __init__(self, proposals: Mapping[str, list[int]]) -> None:
        self._proposals = proposals

    def arrival_extra(self, request: Any) -> object:
        """Return what is proposed for a request."""
        return self._proposals[request.req_id]


class _Entry(Feature):
    """An entry of the registry that is always active."""

    def __init__(self, active: ActiveFeature) -> None:
        self.name = active.name
        self._active = active

    def load(self, context: FeatureContext) -> ActiveFeature:
        """Return the one part that there is."""
        return self._active


class DraftedDriver(Driver):
    """A driver whose requests run drafts.

    Args:
        setup: The engine.
        max_drafts: Most drafts of a request in a step.
        seed: Of what is proposed.
    """

    def __init__(self, setup: Setup, max_drafts: int, seed: int = 0) -> None:
        self._max_drafts = max_drafts
        self._draw = random.Random(f"{seed} {setup} {max_drafts}")
        self._proposals: dict[str, list[int]] = {}
        self.num_drafted, self.num_drafts = 0, 0
        """Steps with drafts, and drafts in all."""
        of_device = self._proposals if setup.is_async else None
        features: list[Feature] = [*FEATURES, _Entry(Drafts(max_drafts, of_device))]
        if of_device is not None:
            features.append(_Entry(Proposals(of_device)))

        def runner_class(config: Any, windows: tuple[int | None, ...]) -> HashRunner:
            return HashRunner(config, windows, features)

        super().__init__(setup, engine=HashEngine(setup, runner_class))
        scheduler = self.engine.scheduler
        # What a speculative configuration sets, of which nothing else is wanted here.
        scheduler.num_spec_tokens = max_drafts
        if setup.is_async:
            scheduler._spec_token_placeholders = [-1] * max_drafts

    def step(self, lag: int = 0, *, paused: bool = False) -> None:
        """Schedule and queue a step; then propose what its requests are to try next."""
        super().step(lag, paused=paused)
        if not self.setup.is_async:
            self.engine.scheduler.update_draft_token_ids(self._drafts())

    def _see(self, scheduler_output: Any) -> None:
        super()._see(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.num_drafted += bool(drafts)
        self.num_drafts += sum(map(len, drafts.values()))

    def _with_failed_load(self, scheduler_output: Any, output: Any) -> Any:
        if self._queued:
            return output
        return super()._with_failed_load(scheduler_output, output)

    def _turn(self, prompt: list[int], action: Arrive) -> Turn:
        turn = super()._turn(prompt, action)
        guesses = [self._guess(token) for token in turn.expected]
        self._proposals[action.name] = [0] * len(prompt) + guesses
        return turn

    def _drafts(self) -> DraftTokenIds:
        """Return drafts of the host for every request that has drawn a token."""
        drafts: dict[str, list[int]] = {}
        for request in self.engine.scheduler.running:
            name, account = request.request_id, self.accounts.get(request.request_id)
            if account is None or account.current >= len(account.turns):
                continue
            turn = account.turns[account.current]
            count = self._draw.randint(0, self._max_drafts)
            if account.is_session:
                count = min(count, len(turn.expected) - len(turn.received) - 1)
            ahead = turn.expected[len(turn.received) :][:count]
            if turn.received:
                drafts[name] = [self._guess(token) for token in ahead]
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def _guess(self, token_id: int) -> int:
        """Return a token, or another one."""
        if self._draw.random() < _WRONG:
            return (token_id + 1) % self.setup.vocab_size
        return token_id
