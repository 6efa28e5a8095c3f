"""Random schedules through vLLM's scheduler with drafts: no request may notice any of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from mrv2.batch.commit import commit_step
from mrv2.state.progress import Progress
from mrv2_diff.mutants.mutant import Arguments, after, before
from mrv2_diff.schedules.events import KINDS
from mrv2_diff.schedules.generator import SETUPS, actions

pytestmark = pytest.mark.vllm

NUM_STEPS = 20_000
LEAST_EVENTS = 50
"""Of each kind that drafts leave possible, or the steps prove less than they should."""


@pytest.mark.slow
def test_every_request_returns_what_it_returns_without_drafts() -> None:
    from mrv2_diff.schedules.drafted import DraftedDriver

    counts = dict.fromkeys(KINDS, 0)
    num_steps, num_drafted, num_drafts, seed = 0, 0, 0, 0
    while num_steps < NUM_STEPS:
        for index, setup in enumerate(SETUPS):
            driver = DraftedDriver(setup, max_drafts=1 + (seed + index) % 4, seed=seed)
            driver.play(actions(seed, setup, 1250))
            num_steps += driver.num_steps
            num_drafted += driver.num_drafted
            num_drafts += driver.num_drafts
            for kind, count in driver.events.counts.items():
                counts[kind] += count
        seed += 1
    rare = {kind: count for kind, count in counts.items() if count < LEAST_EVENTS}
    assert not rare, f"in {num_steps} steps these happened too seldom: {rare}"
    assert num_drafted > NUM_STEPS // 4, f"{num_drafted} steps had drafts, {num_drafts} in all"


def rejected_drafts_count() -> AbstractContextManager[object]:
    def all_kept(arguments: Arguments) -> None:
        arguments["num_computed_tokens"][arguments["rows"].long()] = arguments["seq_lens"]

    return after(commit_step, all_kept)


def one_token_too_few_is_kept() -> AbstractContextManager[object]:
    def one_less(arguments: Arguments) -> None:
        arguments["num_sampled"] = (arguments["num_sampled"] - 1).clamp(min=1)

    return before(commit_step, one_less)


def the_hosts_bound_is_taken_for_exact() -> AbstractContextManager[object]:
    def faulty(self: Progress, rows: Any, num_computed_tokens: Any) -> Any:
        return np.arange(len(rows))

    return patch.object(Progress, "differing", faulty)


@pytest.mark.parametrize(
    ("fault", "is_async"),
    [
        (rejected_drafts_count, False),
        (rejected_drafts_count, True),
        (one_token_too_few_is_kept, True),
        (the_hosts_bound_is_taken_for_exact, True),
    ],
)
def test_a_planted_fault_of_drafts_is_found(
    fault: Callable[[], AbstractContextManager[object]], is_async: bool
) -> None:
    from mrv2_diff.schedules.drafted import DraftedDriver
    from mrv2_diff.schedules.driver import Divergence

    setup = next(setup for setup in SETUPS if setup.is_async is is_async)
    DraftedDriver(setup, max_drafts=3).play(actions(1, setup, 300))
    with fault(), pytest.raises(Divergence):
        DraftedDriver(setup, max_drafts=3).play(actions(1, setup, 300))
