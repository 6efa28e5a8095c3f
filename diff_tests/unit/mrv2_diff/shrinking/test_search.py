"""The search leaves what a failure needs and no more, votes on flaky ones, and ends in time."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mrv2_diff.case import Abort, Add
from mrv2_diff.shrinking import cuts
from mrv2_diff.shrinking.cuts import Events
from mrv2_diff.shrinking.search import NothingToShrinkError, Run, Search, Seen
from mrv2_diff.shrinking.signature import Signature
from mrv2_diff.verdict import Verdict

WRONG = Signature(verdict=Verdict.WRONG_VALUE, value="slots", mode="forced")
OTHER = Signature(verdict=Verdict.WRONG_VALUE, value="logits", mode="forced")
PASSES = Signature(verdict=Verdict.MATCH)


def _add(index: int, **changes: object) -> Add:
    prompt = tuple(random.Random(index).randrange(100, 200) for _ in range(30))
    add = Add(step=3 * index, req_id=f"r{index}", prompt=prompt, max_tokens=40)
    return replace(add, **changes)  # type: ignore[arg-type]


WORKLOAD: Events = (*(_add(index) for index in range(8)), Abort(step=21, req_id="r3"))


def _adds(events: Events) -> dict[str, Add]:
    return {event.req_id: event for event in events if isinstance(event, Add)}


def _steps(events: Events) -> int:
    """Every request draws a token in each step from its arrival on."""
    return max(event.step + event.max_tokens for event in _adds(events).values())


def _fails_if(needs: Callable[[Events], bool], otherwise: Signature = PASSES) -> Run:
    def run(events: Events) -> Seen:
        return Seen(signature=WRONG if needs(events) else otherwise, num_steps=_steps(events))

    return run


def test_one_request_of_one_token_is_left_where_any_fails() -> None:
    shrunk = Search(_fails_if(lambda events: True)).shrink(WORKLOAD)
    (left,) = shrunk.events
    assert left == Add(step=0, req_id=left.req_id, prompt=(1,), max_tokens=1)
    assert shrunk.num_steps == 1
    assert shrunk.first_steps == _steps(WORKLOAD)
    assert not shrunk.out_of_time


def test_two_requests_are_left_where_two_are_needed() -> None:
    def needs(events: Events) -> bool:
        adds = _adds(events)
        return "r2" in adds and "r6" in adds and len(adds["r2"].prompt) >= 7

    shrunk = Search(_fails_if(needs)).shrink(WORKLOAD)
    assert set(_adds(shrunk.events)) == {"r2", "r6"}
    assert len(_adds(shrunk.events)["r2"].prompt) == 7
    assert len(_adds(shrunk.events)["r6"].prompt) == 1


def test_an_abort_that_is_needed_stays_behind_its_request() -> None:
    def needs(events: Events) -> bool:
        return any(isinstance(event, Abort) for event in events) and "r3" in _adds(events)

    add, abort = Search(_fails_if(needs)).shrink(WORKLOAD).events
    assert isinstance(add, Add)
    assert isinstance(abort, Abort)
    assert add.req_id == abort.req_id == "r3"


def test_outputs_are_traded_for_prompt_where_that_saves_steps() -> None:
    def needs(events: Events) -> bool:
        return any(len(add.prompt) + add.max_tokens >= 70 for add in _adds(events).values())

    shrunk = Search(_fails_if(needs)).shrink(WORKLOAD)
    (left,) = _adds(shrunk.events).values()
    assert (len(left.prompt), left.max_tokens, shrunk.num_steps) == (69, 1, 1)


def test_parameters_without_which_it_fails_are_left_out() -> None:
    options = (("top_k", 5), ("stop_token_ids", (1, 2, 3, 4, 5, 6)), ("min_p", 0.5))
    whole = (_add(0, temperature=0.7, seed=3, logprobs=5, options=options),)

    def needs(events: Events) -> bool:
        stops = dict(_adds(events)["r0"].options).get("stop_token_ids", ())
        return isinstance(stops, tuple) and 4 in stops

    (left,) = Search(_fails_if(needs)).shrink(whole).events
    assert isinstance(left, Add)
    assert left.options == (("stop_token_ids", (4,)),)
    assert (left.temperature, left.seed, left.logprobs) == (0.0, None, None)


def test_another_failure_is_not_taken_for_the_same() -> None:
    shrunk = Search(_fails_if(lambda events: len(_adds(events)) >= 3, OTHER)).shrink(WORKLOAD)
    assert len(_adds(shrunk.events)) == 3
    assert shrunk.signature == WRONG


def test_what_comes_after_the_divergence_goes_first() -> None:
    runs: list[Events] = []

    def run(events: Events) -> Seen:
        runs.append(events)
        return Seen(signature=WRONG, num_steps=_steps(events), diverged_at=4)

    Search(run, repeat=1).shrink(WORKLOAD)
    assert runs[1] == cuts.until(WORKLOAD, 4)


def test_a_flaky_failure_is_voted_on() -> None:
    draws = random.Random(1)

    def run(events: Events) -> Seen:
        fails = "r5" in _adds(events) and draws.random() < 0.5
        return Seen(signature=WRONG if fails else PASSES, num_steps=_steps(events))

    shrunk = Search(run, repeat=12).shrink(WORKLOAD)
    assert set(_adds(shrunk.events)) == {"r5"}
    assert 0 < shrunk.before.seen < shrunk.before.runs == 12
    assert 0 < shrunk.after.seen < shrunk.after.runs == 12


def test_a_rare_failure_is_no_stand_in_for_a_frequent_one() -> None:
    """One request fails in a tenth of the runs, two or more in two thirds: two are left."""
    draws = random.Random(3)

    def run(events: Events) -> Seen:
        rate = 0.66 if len(_adds(events)) >= 2 else 0.1
        return Seen(signature=WRONG if draws.random() < rate else PASSES, num_steps=_steps(events))

    shrunk = Search(run, repeat=20).shrink(WORKLOAD)
    assert len(_adds(shrunk.events)) == 2


def test_a_case_that_passes_is_nothing_to_shrink() -> None:
    with pytest.raises(NothingToShrinkError, match="does not fail: MATCH in 3 runs"):
        Search(_fails_if(lambda events: False)).shrink(WORKLOAD)


def test_a_case_that_nothing_can_be_said_of_is_nothing_to_shrink() -> None:
    says_nothing = Signature(verdict=Verdict.INCONCLUSIVE)
    with pytest.raises(NothingToShrinkError, match="INCONCLUSIVE"):
        Search(_fails_if(lambda events: False, says_nothing)).shrink(WORKLOAD)


def test_a_case_that_is_not_taken_is_refused() -> None:
    with pytest.raises(NothingToShrinkError, match="does not take"):
        Search(lambda events: None).shrink(WORKLOAD)


def test_requests_that_are_not_taken_are_not_left() -> None:
    def run(events: Events) -> Seen | None:
        if any(add.max_tokens < 5 for add in _adds(events).values()):
            return None
        return Seen(signature=WRONG, num_steps=_steps(events))

    (left,) = Search(run).shrink(WORKLOAD).events
    assert isinstance(left, Add)
    assert left.max_tokens == 5


def test_the_search_ends_in_time_with_the_best_so_far() -> None:
    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            now += 1.0
            yield now

    clock = ticks()
    needs_three = _fails_if(lambda events: len(_adds(events)) >= 3)
    search = Search(needs_three, seconds=12, clock=lambda: next(clock))
    shrunk = search.shrink(WORKLOAD)
    assert shrunk.out_of_time
    assert shrunk.tries < 30
    assert shrunk.after.steady


def test_the_result_is_confirmed_afresh() -> None:
    told: list[str] = []
    run = _fails_if(lambda events: not told)
    shrunk = Search(run).shrink(WORKLOAD, lambda: told.append("anew"))
    assert (shrunk.before.seen, shrunk.after.seen) == (3, 0)
