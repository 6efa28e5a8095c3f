"""Steps that break the protocol are refused by name, and the next good one works."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mrv2 import CapacityError, ConfigError, Mrv2Error, ProtocolError

pytestmark = pytest.mark.vllm


class Bench:
    """A driver with two live requests, and its next step at hand.

    Args:
        is_steady: Whether that step is one more decode, like the last; otherwise a third request
            arrives in it.
    """

    def __init__(self, *, is_steady: bool = False) -> None:
        from mrv2_diff.schedules.actions import Setup
        from mrv2_diff.schedules.driver import Driver

        self.driver = Driver(Setup())
        self.runner: Any = self.driver.engine.runner
        self.arrive("a", prefix_len=10)
        self.arrive("b", prefix_len=7)
        for _ in range(4):
            self.driver.step()
        if not is_steady:
            self.arrive("c", prefix_len=3)

    def arrive(self, name: str, **fields: Any) -> None:
        from mrv2_diff.schedules.actions import Arrive

        self.driver.do(Arrive(name=name, max_tokens=12, tail=len(name), **fields))

    def state(self) -> tuple[object, ...]:
        core = self.runner.core
        return (
            dict(self.runner.ledger.known()),
            self.runner.ledger.num_announced,
            dict(core.rows._row_of),
            list(core.rows._free),
            core.block_tables._num_blocks.tolist(),
            core.requests.progress.upper.tolist(),
            core.requests.token_ids.num_staged,
            core.requests.token_ids.tensor.tolist(),
        )

    def refuses(self, spoil: Callable[[Any], Any], error: type[Mrv2Error], message: str) -> None:
        """Send the spoiled next step, then the next step as it is, and run to the end."""
        runner = self.runner
        sent: list[Any] = []
        execute = runner.execute_model

        def execute_spoiled(step: Any) -> Any:
            if not sent:
                sent.append(step)
                before = self.state()
                with pytest.raises(error, match=message):
                    execute(spoil(copy.deepcopy(step)))
                assert self.state() == before
            return execute(step)

        runner.execute_model = execute_spoiled
        self.driver.step()
        assert sent
        self.driver.drain()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def continued(step: Any, **fields: Any) -> Any:
    return replace(step, scheduled_cached_reqs=replace(step.scheduled_cached_reqs, **fields))


def unknown(step: Any) -> Any:
    names = [name.replace("a", "nobody") for name in step.scheduled_cached_reqs.req_ids]
    work = {name.replace("a", "nobody"): n for name, n in step.num_scheduled_tokens.items()}
    return replace(continued(step, req_ids=names), num_scheduled_tokens=work)


def block_outside(step: Any) -> Any:
    step.scheduled_new_reqs[0].block_ids[0][0] = 30
    return step


def block_below(step: Any) -> Any:
    blocks = list(step.scheduled_cached_reqs.new_block_ids)
    blocks[0] = ([-1],)
    return continued(step, new_block_ids=blocks)


def too_many_blocks(step: Any) -> Any:
    blocks = list(step.scheduled_cached_reqs.new_block_ids)
    blocks[0] = (list(range(1, 29)) * 2,)
    return continued(step, new_block_ids=blocks)


def ended_goes_on(step: Any) -> Any:
    return replace(step, finished_req_ids={"a"})


def preempted_goes_on(step: Any) -> Any:
    return replace(step, preempted_req_ids={"b"})


def more_than_known(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={**step.num_scheduled_tokens, "a": 3})


def placeholders_of_drafts(step: Any) -> Any:
    work = {**step.num_scheduled_tokens, "a": 3}
    return replace(step, num_scheduled_tokens=work, scheduled_spec_decode_tokens={"a": [-1, -1]})


def no_tokens(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={**step.num_scheduled_tokens, "a": 0})


def too_many_tokens(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={**step.num_scheduled_tokens, "c": 13})


def not_listed(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={**step.num_scheduled_tokens, "z": 1})


def no_number(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={"c": 1})


def unequal_lists(step: Any) -> Any:
    return continued(step, num_computed_tokens=[1])


def resumed_without_tokens(step: Any) -> Any:
    return continued(step, resumed_req_ids={"a"})


def negative_progress(step: Any) -> Any:
    computed = list(step.scheduled_cached_reqs.num_computed_tokens)
    return continued(step, num_computed_tokens=[-1, *computed[1:]])


def arrives_twice(step: Any) -> Any:
    return replace(step, scheduled_new_reqs=step.scheduled_new_reqs * 2)


def empty_prompt(step: Any) -> Any:
    step.scheduled_new_reqs[0].prompt_token_ids.clear()
    return step


def negative_temperature(step: Any) -> Any:
    step.scheduled_new_reqs[0].sampling_params.temperature = -1.0
    return step


BAD_STEPS: list[tuple[Callable[[Any], Any], type[Mrv2Error], str]] = [
    (unknown, ProtocolError, "'nobody', which it never announced"),
    (ended_goes_on, ProtocolError, "'a', which it never announced or has finished"),
    (preempted_goes_on, ProtocolError, "'b' is scheduled but has no row"),
    (block_outside, CapacityError, "'c' is given block 30 of KV group 0; the cache has 30 blocks"),
    (block_below, CapacityError, "'a' is given block -1 of KV group 0; the cache has 30 blocks"),
    (too_many_blocks, CapacityError, "56 blocks are added to .* of KV group 0; its max_blocks is"),
    (more_than_known, ProtocolError, "'a' is to run 3 tokens from position 1. on; it has 1."),
    (
        placeholders_of_drafts,
        ProtocolError,
        r"schedules drafts of \['a'\], and no feature of this engine takes drafts",
    ),
    (no_tokens, ProtocolError, "'a' is to run 0 tokens"),
    (too_many_tokens, CapacityError, "the step has 15 tokens; max_num_tokens is 12"),
    (not_listed, ProtocolError, r"those with a number of tokens differ in \['z'\]"),
    (no_number, ProtocolError, r"those with a number of tokens differ in \['a', 'b'\]"),
    (unequal_lists, ProtocolError, r"2 requests go on, with lists of \(2, 1, 2\) entries"),
    (resumed_without_tokens, ProtocolError, "'a' is resumed without its tokens"),
    (negative_progress, ProtocolError, "'a' is to run 1 tokens from position -1 on"),
    (arrives_twice, ProtocolError, "'c' arrived twice|scheduled twice|differ in"),
    (empty_prompt, CapacityError, "'c' arrives with 0 tokens; it needs at least one"),
    (negative_temperature, ConfigError, "temperature"),
]


@pytest.mark.parametrize(
    ("spoil", "error", "message"), BAD_STEPS, ids=[spoil.__name__ for spoil, _, _ in BAD_STEPS]
)
def test_a_bad_step_is_refused_by_name_and_changes_nothing(
    bench: Bench, spoil: Callable[[Any], Any], error: type[Mrv2Error], message: str
) -> None:
    bench.refuses(spoil, error, message)


def renamed(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={"a": 1, "z": 1})


def two_and_none(step: Any) -> Any:
    return replace(step, num_scheduled_tokens={"a": 2, "b": 0})


STEADY = (
    unknown,
    ended_goes_on,
    preempted_goes_on,
    block_below,
    too_many_blocks,
    no_tokens,
    more_than_known,
    not_listed,
    unequal_lists,
    resumed_without_tokens,
    negative_progress,
)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        *((spoil, *rest) for spoil, *rest in BAD_STEPS if spoil in STEADY),
        (renamed, ProtocolError, r"those with a number of tokens differ in \['b', 'z'\]"),
        (two_and_none, ProtocolError, "'a' is to run 2 tokens from position|'b' is to run 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_step_is_refused_in_the_middle_of_a_steady_decode(
    spoil: Callable[[Any], Any], error: type[Mrv2Error], message: str
) -> None:
    bench = Bench(is_steady=True)
    assert bench.runner.ledger.last_decode is not None
    bench.refuses(spoil, error, message)


def test_execute_twice_is_refused_and_the_first_step_goes_on(bench: Bench) -> None:
    execute = bench.runner.execute_model

    def execute_twice(step: Any) -> Any:
        output = execute(step)
        if output is None:
            before = bench.state()
            with pytest.raises(ProtocolError, match="execute_model was called twice"):
                execute(step)
            assert bench.state() == before
        return output

    bench.runner.execute_model = execute_twice
    bench.driver.drain()


def test_sampling_with_no_step_in_flight_is_refused(bench: Bench) -> None:
    before = bench.state()
    with pytest.raises(ProtocolError, match="no step is in flight; call execute_model first"):
        bench.runner.sample_tokens(None)
    assert bench.state() == before
    bench.driver.drain()
