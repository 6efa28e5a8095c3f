"""Thinking budget: which token is forced, worked out by hand, at each logit's own position."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mrv2.config import ThinkingMarkers
from mrv2.errors import ConfigError
from mrv2.sampling.stages import PENALISING
from mrv2.sampling.thinking_budget import ThinkingBudget
from mrv2_diff.right_values import History, Markers, forced_by_budget

Rows = Callable[..., Any]
START, END, A, B, C = 1, 2, 5, 6, 7
SINGLE = ThinkingMarkers(start=(START,), end=(END,))
DOUBLE = ThinkingMarkers(start=(START, 3), end=(4, END))
FREE = None


def forced(processed: Tensor) -> list[int | None]:
    """Return the forced token of each logit; all others must be as they were."""
    found: list[int | None] = []
    for row in processed:
        places = (row == 1e9).nonzero().flatten().tolist()
        assert int((row != 0.0).sum()) == len(places) <= 1
        found.append(places[0] if places else FREE)
    return found


def forced_along(
    stage_rows: Rows,
    markers: ThinkingMarkers,
    budget: int,
    prompt: Sequence[int],
    outputs: Sequence[int],
) -> list[int | None]:
    """Return what is forced before each output and behind the last."""
    rows = stage_rows(ThinkingBudget, thinking=markers)
    rows.admit(5, prompt, thinking_budget=budget)
    rows.write(5, len(prompt), *outputs)
    where = [(5, len(prompt) + count) for count in range(len(outputs) + 1)]
    return forced(rows.apply(torch.zeros(len(where), 11), *where))


def test_the_budget_acts_after_the_penalties() -> None:
    names = [getattr(stage, "__name__", "") for stage in PENALISING]
    assert names == ["Penalties", "ThinkingBudget"]


@pytest.mark.parametrize(
    ("budget", "prompt", "outputs", "wanted"),
    [
        # The section has exactly as many tokens as the budget.
        (2, [START], [A, B, END, C], [FREE, FREE, END, FREE, FREE]),
        (2, [A], [START, A, B, END, C], [FREE, FREE, FREE, END, FREE, FREE]),
        (0, [START], [END, C], [END, FREE, FREE]),
        (0, [A], [START, END, C], [FREE, END, FREE, FREE]),
        # Used up within the prompt, or to the last token of it.
        (2, [START, A, B], [END, C], [END, FREE, FREE]),
        (2, [START, A, B, C], [END, C], [END, FREE, FREE]),
        (3, [START, A, B], [C, END], [FREE, END, FREE]),
        # It ends by itself, before the budget and on its last token.
        (3, [START], [A, END, A, B, C], [FREE] * 6),
        (2, [START], [A, END, A, B, C], [FREE] * 6),
        (2, [START, A], [END, A, B, C], [FREE] * 5),
        # Every section has a budget of its own.
        (1, [START], [END, A, START, A, END, A], [FREE, FREE, FREE, FREE, END, FREE, FREE]),
        (1, [A], [START, A, END, B, START, B, END], [FREE, FREE, END, FREE, FREE, FREE, END, FREE]),
        # A start within a section begins nothing; an end outside of one ends nothing.
        (3, [A], [START, A, START, B, END], [FREE, FREE, FREE, FREE, END, FREE]),
        (2, [A], [END, START, A, END, B, B], [FREE] * 7),
        (2, [A], [END, START, A, B, END], [FREE, FREE, FREE, FREE, END, FREE]),
        # A prompt whose section is closed, and one whose last start counts.
        (1, [START, A, END], [B, C], [FREE] * 3),
        (2, [START, A, START], [A, B, END], [FREE, FREE, END, FREE]),
        (1, [A, B], [C, C], [FREE] * 3),
    ],
)
def test_single_markers_by_hand(
    stage_rows: Rows,
    budget: int,
    prompt: list[int],
    outputs: list[int],
    wanted: list[int | None],
) -> None:
    assert forced_along(stage_rows, SINGLE, budget, prompt, outputs) == wanted


@pytest.mark.parametrize(
    ("budget", "prompt", "outputs", "wanted"),
    [
        (1, [START, 3], [A, 4, END, C], [FREE, 4, END, FREE, FREE]),
        (1, [A], [START, 3, A, 4, END, C], [FREE, FREE, FREE, 4, END, FREE, FREE]),
        # Half a marker is none.
        (0, [A, START], [A, B], [FREE] * 3),
        (0, [A], [START, A, START, 3, 4, END], [FREE, FREE, FREE, FREE, 4, END, FREE]),
        # Half an end that the model wrote before the budget was spent is not continued.
        (2, [START, 3], [A, 4, 4, END], [FREE, FREE, 4, END, FREE]),
        # Half an end that was forced is, and begins anew where another token was drawn.
        (1, [START, 3], [A, 4, B, 4, END], [FREE, 4, END, 4, END, FREE]),
        # A marker does not lie across the end of the prompt.
        (0, [A, START], [3, A], [FREE] * 3),
    ],
)
def test_markers_of_several_tokens_by_hand(
    stage_rows: Rows,
    budget: int,
    prompt: list[int],
    outputs: list[int],
    wanted: list[int | None],
) -> None:
    assert forced_along(stage_rows, DOUBLE, budget, prompt, outputs) == wanted


def test_an_end_that_overlaps_itself_is_forced_whole(stage_rows: Rows) -> None:
    markers = ThinkingMarkers(start=(START,), end=(4, 4, END))
    outputs = [A, 4, 4, 4, END, A]
    wanted = [FREE, FREE, 4, 4, END, FREE, FREE]
    assert forced_along(stage_rows, markers, 2, [START], outputs) == wanted


def test_a_natural_end_shorter_than_the_forced_one_ends_a_section(stage_rows: Rows) -> None:
    markers = ThinkingMarkers(start=(START,), end=(C, END), natural_end=(END,))
    assert forced_along(stage_rows, markers, 2, [START], [A, END, A, B]) == [FREE] * 5
    wanted = [FREE, FREE, C, END, FREE]
    assert forced_along(stage_rows, markers, 2, [START], [A, B, C, END]) == wanted
    assert forced_along(stage_rows, markers, 0, [START, A, END], [A]) == [FREE, FREE]


def test_drafts_do_not_cross_the_budget(stage_rows: Rows) -> None:
    rows = stage_rows(ThinkingBudget, thinking=SINGLE)
    rows.admit(5, [START], [A], thinking_budget=3)
    rows.admit(0, [START], [A], thinking_budget=0)
    rows.admit(3, [START], [A])
    for row in (5, 0, 3):
        rows.write(row, 2, B, B, B, B)
    where = [(row, position) for row in (5, 0, 3) for position in range(2, 7)]
    processed = forced(rows.apply(torch.zeros(15, 11), *where))
    assert processed == [FREE, FREE, END, END, END] + [END] * 5 + [FREE] * 5
    # The draft at the budget is the end itself: what comes behind it is free.
    rows.write(5, 4, END)
    processed = forced(rows.apply(torch.zeros(5, 11), *where[:5]))
    assert processed == [FREE, FREE, END, FREE, FREE]


@pytest.mark.parametrize("done", range(1, 7))
def test_a_resumed_request_goes_on_where_it_was(stage_rows: Rows, done: int) -> None:
    prompt, outputs = [A, START, 3, B], [B, 4, END, A, START, 3, A, B, 4, END]
    unbroken = forced_along(stage_rows, DOUBLE, 2, prompt, outputs)
    assert unbroken == [FREE, 4, END, FREE, FREE, FREE, FREE, FREE, 4, END, FREE]
    rows = stage_rows(ThinkingBudget, thinking=DOUBLE)
    rows.admit(2, prompt, outputs[:done], thinking_budget=2)
    rows.evict(2)
    rows.admit(6, prompt, outputs[:done], thinking_budget=2)
    rows.write(6, 4 + done, *outputs[done:])
    where = [(6, 4 + count) for count in range(done, len(outputs) + 1)]
    assert forced(rows.apply(torch.zeros(len(where), 11), *where)) == unbroken[done:]


def test_a_row_forgets_its_last_request(stage_rows: Rows) -> None:
    rows = stage_rows(ThinkingBudget, thinking=SINGLE)
    rows.admit(3, [START], [A], thinking_budget=0)
    assert rows.wants(3, 0)
    rows.evict(3)
    assert not rows.wants(3, 0)
    rows.admit(3, [A], thinking_budget=0)
    assert forced(rows.apply(torch.zeros(1, 11), (3, 1))) == [FREE]
    rows.admit(3, [START])
    assert not rows.wants(3)


def test_only_the_forced_logit_changes(stage_rows: Rows) -> None:
    rows = stage_rows(ThinkingBudget, thinking=SINGLE)
    rows.admit(4, [START], thinking_budget=0)
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    logits[0, END] = -torch.inf
    wanted = logits.clone()
    wanted[0, END] = 1e9
    assert torch.equal(rows.apply(logits, (4, 1), (0, 1), (6, 1)), wanted)


def test_a_budget_without_markers_is_refused_and_leaves_the_row(stage_rows: Rows) -> None:
    rows = stage_rows(ThinkingBudget)
    rows.admit(1, [A])
    with pytest.raises(ConfigError, match=r"'r1' has a thinking budget of 7.*no thinking markers"):
        rows.admit(1, [A], thinking_budget=7)
    assert not rows.wants(1)


def test_a_huge_budget_never_ends(stage_rows: Rows) -> None:
    rows = stage_rows(ThinkingBudget, thinking=SINGLE)
    rows.admit(1, [START, A], thinking_budget=10**12)
    assert forced(rows.apply(torch.zeros(1, 11), (1, 2))) == [FREE]


@pytest.mark.parametrize("empty", [{"start": (), "end": (2,)}, {"start": (1,), "end": ()}])
def test_empty_markers_are_refused(empty: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="give a start and an end"):
        ThinkingMarkers(**empty)


@pytest.mark.parametrize("seed", range(40))
def test_random_streams_equal_the_right_values(stage_rows: Rows, seed: int) -> None:
    rng = random.Random(seed)
    start = (rng.randrange(2), *rng.choices(range(3), k=rng.choice([0, 0, 1, 2])))
    end = (2, *rng.choices(range(3), k=rng.choice([0, 0, 1, 2])))
    budget, prompt = rng.randrange(5), rng.choices(range(4), k=rng.randint(1, 6))
    outputs: list[int] = []
    wanted: list[int | None] = []
    for _ in range(50):
        history = History(
            prompt=tuple(prompt), outputs=outputs, markers=Markers(start=start, end=end)
        )
        wanted.append(forced_by_budget(budget, history))
        # Mostly what is forced, as a sampler draws it; what was drawn instead must not derail it.
        follows = wanted[-1] is not None and rng.random() < 0.9
        outputs.append(wanted[-1] if follows and wanted[-1] is not None else rng.randrange(4))
    markers = ThinkingMarkers(start=start, end=end)
    assert forced_along(stage_rows, markers, budget, prompt, outputs)[:-1] == wanted
