"""Where two engines part is found, with the gap that decides whether it matters."""

import pytest

from mrv2_diff.drivers.compare import Divergence, agreement
from mrv2_diff.drivers.one_engine import Continuation, Outcome

LOGPROBS = [[-0.5, -0.5, -1.0], [-0.25, -0.25, -2.0], [-0.125, -0.125, -0.25]]


def outcome(*continuations: Continuation) -> Outcome:
    return Outcome(
        runner_class="some.Runner",
        steps=3,
        preemptions=0,
        steps_checked=0,
        async_scheduling=False,
        compiled_graphs=0,
        attention=[],
        continuations=list(continuations),
    )


def continuation(*token_ids: int, shift: float = 0.0) -> Continuation:
    rows = [[value + shift for value in row] for row in LOGPROBS[: len(token_ids)]]
    return Continuation(token_ids=list(token_ids), logprobs=rows)


def test_equal_continuations() -> None:
    found = agreement(outcome(continuation(1, 2, 3)), outcome(continuation(1, 2, 3)))
    assert found.divergences == []
    assert (found.num_requests, found.num_tokens, found.num_logprobs) == (1, 3, 9)
    assert found.largest_logprob_difference == 0.0


def test_a_divergence_has_the_references_gap_and_ends_the_comparison() -> None:
    ours = outcome(continuation(1, 2, 3), continuation(1, 9, 3, shift=0.5))
    theirs = outcome(continuation(1, 2, 3), continuation(1, 2, 3))
    found = agreement(ours, theirs)
    assert found.divergences == [Divergence(request=1, position=1, ours=9, theirs=2, gap=1.75)]
    assert (found.num_tokens, found.num_logprobs) == (3 + 2, 9 + 3)
    assert found.largest_logprob_difference == 0.5


def test_an_early_end_is_a_divergence() -> None:
    found = agreement(outcome(continuation(1, 2)), outcome(continuation(1, 2, 3)))
    assert found.divergences == [Divergence(request=0, position=2, ours=None, theirs=3, gap=0.125)]


def test_without_logprobs_there_is_no_gap() -> None:
    left = Continuation(token_ids=[1], logprobs=[])
    right = Continuation(token_ids=[2], logprobs=[])
    (found,) = agreement(outcome(left), outcome(right)).divergences
    assert found.gap is None


def test_different_numbers_of_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        agreement(outcome(continuation(1)), outcome(continuation(1), continuation(1)))
