"""The runner: lives of requests against the oracle, steps in flight, and what it refuses."""

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from mrv2 import (
    Arrival,
    CapacityError,
    ConfigError,
    Continuation,
    KVGroup,
    Mrv2Error,
    NextDecode,
    PendingOutput,
    ProtocolError,
    RunnerConfig,
    Sampling,
    Scheduled,
    StepPlan,
)
from mrv2.memory.staged import StagedWriteTensor
from mrv2.memory.transfers import Event, Transfers
from mrv2_diff.invariants import snapshot
from mrv2_diff.models.hashlm import hashlm_tokens
from mrv2_diff.toy_host import Toy, ToyHost
from mrv2_diff.toy_stories import RandomStory

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=4,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=97,
    kv_groups=(
        KVGroup(block_size=4, max_blocks=16, num_blocks=400),
        KVGroup(block_size=8, max_blocks=8, num_blocks=400),
    ),
)
WINDOWS = (None, 5)


@pytest.fixture
def toy() -> Toy:
    return Toy(CONFIG, windows=WINDOWS)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 31 * index) % CONFIG.vocab_size for index in range(length)]


def staged_tensors(toy: Toy) -> list[StagedWriteTensor]:
    requests = toy.runner.requests
    return [requests.token_ids, requests.num_computed_tokens, *toy.runner.block_tables.tables]


def assert_true_to_the_oracle(toy: Toy, at_least: int) -> None:
    outputs = toy.outputs()
    assert sum(len(tokens) for _, tokens in outputs) >= at_least
    assert outputs == toy.expected()


# Lives of requests.


def test_a_prompt_and_its_decodes(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.run({"a": 9})
    for _ in range(20):
        toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=21)


def test_chunks_draw_nothing_before_the_last_known_token(toy: Toy) -> None:
    request = toy.host.add("a", prompt(11))
    for chunk in (1, 4, 5):
        toy.run({"a": chunk})
        assert request.outputs == []
    toy.run({"a": 1})
    toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=2)


def test_a_request_may_pause_while_others_run(toy: Toy) -> None:
    toy.host.add("a", prompt(6))
    toy.host.add("b", prompt(10, first=5))
    toy.run({"a": 6, "b": 4})
    for _ in range(3):
        toy.run({"a": 1})
    toy.run({"b": 6})
    for _ in range(3):
        toy.run({"b": 1, "a": 1})
    assert_true_to_the_oracle(toy, at_least=11)


def test_a_preempted_request_resumes_in_other_blocks_and_another_row(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(5, first=7))
    toy.run({"a": 9, "b": 5})
    toy.run({"a": 1, "b": 1})
    before, row = [*toy.host.requests["a"].blocks[0]], toy.runner.rows.row("a")
    toy.host.preempt("a")
    toy.host.add("c", prompt(13, first=3))
    toy.run({"c": 13, "b": 1})
    assert "a" not in toy.runner.rows
    toy.run({"a": 4, "c": 1})
    assert toy.host.requests["a"].blocks[0] != before[:1]
    assert toy.runner.rows.row("a") != row
    toy.run({"a": 7, "b": 1})
    toy.run({"b": 1, "a": 1})
    assert_true_to_the_oracle(toy, at_least=9)


def test_a_request_preempted_and_resumed_in_one_step(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.run({"a": 9})
    toy.run({"a": 1})
    toy.host.preempt("a")
    toy.run({"a": 11})
    toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=4)


def test_an_id_is_used_again_in_the_step_in_which_it_finished(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.run({"a": 9})
    toy.run({"a": 1})
    toy.host.finish("a")
    toy.host.add("a", prompt(3, first=50))
    toy.run({"a": 3})
    toy.run({"a": 1})
    assert len(toy.runner.rows) == 1
    assert_true_to_the_oracle(toy, at_least=4)


def test_a_prefix_computed_by_another_request(toy: Toy) -> None:
    shared = prompt(16)
    toy.host.add("a", [*shared, 2])
    toy.run({"a": 17})
    toy.host.add("b", [*shared, 60, 61, 62])
    toy.host.share("a", "b", 16)
    toy.run({"b": 3, "a": 1})
    toy.host.finish("a")
    for _ in range(3):
        toy.run({"b": 1})
    assert_true_to_the_oracle(toy, at_least=6)


def test_a_cached_prefix_is_read_and_not_computed_again(toy: Toy) -> None:
    # Had "b" run the prefix itself, the other tokens in the shared blocks would not show.
    toy.host.add("a", prompt(17))
    toy.run({"a": 17})
    request = toy.host.add("b", [*prompt(16, first=40), 60])
    toy.host.share("a", "b", 16)
    toy.run({"b": 1})
    assert request.outputs == hashlm_tokens([*prompt(16), 60], 1, CONFIG.vocab_size, WINDOWS)


def test_progress_that_is_taken_back(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(4, first=9))
    toy.run({"a": 9, "b": 4})
    for _ in range(4):
        toy.run({"a": 1, "b": 1})
    toy.host.rewind("a", 6)
    toy.run({"b": 1, "a": 5})
    toy.run({"a": 2, "b": 1})
    toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=14)


def test_rows_are_reused_out_of_order(toy: Toy) -> None:
    for index, name in enumerate("abcd"):
        toy.host.add(name, prompt(5, first=index))
    toy.run(dict.fromkeys("abcd", 5))
    toy.host.finish("b")
    toy.host.finish("d")
    toy.host.finish("a")
    for index, name in enumerate("efg"):
        toy.host.add(name, prompt(6, first=20 + index))
    toy.run({"g": 6, "c": 1, "e": 6, "f": 6})
    rows = toy.runner.rows.rows(["g", "c", "e", "f"])
    assert sorted(rows.tolist()) == [0, 1, 2, 3]
    assert rows.tolist() != sorted(rows.tolist())
    toy.run({"f": 1, "e": 1, "g": 1, "c": 1})
    assert_true_to_the_oracle(toy, at_least=12)


def test_a_request_fills_its_row_to_the_last_token(toy: Toy) -> None:
    request = toy.host.add("a", prompt(40))
    toy.run({"a": 40})
    while request.num_computed < CONFIG.max_model_len:
        toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=CONFIG.max_model_len - 40 + 1)


def test_noise_depends_on_neither_batch_nor_chunks_nor_row(toy: Toy) -> None:
    sampling = Sampling(temperature=1.3, seed=2**63 + 5)
    alone = Toy(CONFIG, windows=WINDOWS)
    for name, runner in (("a", alone), ("z", toy)):
        runner.host.add(name, prompt(9), sampling)
    alone.run({"a": 9})
    for _ in range(12):
        alone.run({"a": 1})
    for index, name in enumerate("bc"):
        toy.host.add(name, prompt(3, first=index), Sampling(temperature=0.4, seed=9))
    toy.run({"c": 3, "z": 2, "b": 3})
    toy.run({"b": 1, "z": 7})
    for _ in range(5):
        toy.run({"b": 1, "c": 1, "z": 1})
    toy.host.preempt("z")
    toy.run({"c": 1, "z": 15})
    for _ in range(6):
        toy.run({"z": 1, "b": 1})
    drawn = alone.host.requests["a"].outputs
    assert drawn == toy.host.requests["z"].outputs
    assert drawn != hashlm_tokens(prompt(9), 13, CONFIG.vocab_size, WINDOWS)


@pytest.mark.parametrize(("seed", "lag"), [(1, 0), (2, 0), (3, 1), (4, 2)])
def test_a_thousand_steps_of_random_lives(seed: int, lag: int) -> None:
    config = replace(CONFIG, max_num_reqs=7, maps_tokens=seed % 2 == 0)
    toy = Toy(config, windows=WINDOWS)
    allocated: list[int] = []

    def check() -> None:
        live = {name for name, request in toy.host.requests.items() if request.has_row}
        assert len(toy.runner.rows) == len(live)
        assert all(name in toy.runner.rows for name in live)
        assert len(set(toy.runner.rows.rows(sorted(live)).tolist())) == len(live)
        assert all(tensor.num_staged == 0 for tensor in staged_tensors(toy)) or not work[-1]
        if len(work) % 250 == 0:
            gc.collect()
            allocated.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))

    work: list[dict[str, int]] = []
    story = RandomStory(seed, config)

    def remembered(host: ToyHost, step: int) -> dict[str, int]:
        work.append(story(host, step))
        return work[-1]

    toy.play(remembered, 1000, lag=lag, after_step=check)
    assert_true_to_the_oracle(toy, at_least=2000)
    assert sum(request.num_preemptions for request in toy.host.finished) > 30
    assert max(allocated[1:]) <= allocated[0] + 20, "tensors pile up"


@pytest.mark.parametrize("lag", [1, 3])
def test_random_draws_do_not_depend_on_when_outputs_are_taken(lag: int) -> None:
    # A preemption drops what is in flight, so a late host has taken fewer tokens, never others.
    drawn = []
    for taken in (0, lag):
        toy = Toy(CONFIG, windows=WINDOWS)
        toy.play(rolling_story, 60, lag=taken)
        drawn.append(dict(toy.outputs()))
    soon, late = drawn
    assert sum(map(len, late.values())) > 100
    assert late == {name: soon[name][: len(tokens)] for name, tokens in late.items()}


def rolling_story(host: ToyHost, step: int) -> dict[str, int]:
    """Every four steps one leaves and one comes; every seven the second oldest is preempted."""
    if step % 4 == 0:
        if len(host.requests) == CONFIG.max_num_reqs:
            host.finish(next(iter(host.requests)))
        sampling = Sampling(temperature=0.9, seed=step) if step % 8 else Sampling()
        host.add(f"r{step}", prompt(3 + step % 5, first=step), sampling)
    names = list(host.requests)
    if step % 7 == 6:
        host.preempt(names[1])
    if step % 2:
        names.reverse()
    return {name: min(host.requests[name].num_left, 8) for name in names}


# Steps in flight.


def test_a_step_is_queued_before_the_last_ones_output_was_taken(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    first = toy.step({"a": 9})
    second = toy.step({"a": 1})
    toy.host.preempt("a")
    toy.host.add("b", prompt(4, first=9))
    third = toy.step({"b": 4})
    for pending in (first, second, third):
        assert pending is not None
        toy.host.take(pending.wait())
    assert toy.host.requests["a"].outputs == []
    assert toy.host.requests["b"].outputs == toy.expected()[1][1]


def test_an_output_stays_as_it_was_when_later_steps_run(toy: Toy) -> None:
    toy.host.add("a", prompt(9), Sampling(num_logprobs=3))
    pending = toy.step({"a": 9})
    assert pending is not None
    first = pending.wait()
    kept = [list(tokens) for tokens in first.token_ids]
    assert first.logprobs is not None
    values = first.logprobs.values.copy()
    toy.host.take(first)
    for _ in range(3):
        toy.run({"a": 1})
    again = pending.wait()
    assert again.token_ids == kept == first.token_ids
    assert again.logprobs is not None
    assert np.array_equal(again.logprobs.values, values)


# What is refused, and that a refusal changes nothing.


def arrival(req_id: str, length: int = 4, **changes: object) -> Arrival:
    made = Arrival(
        req_id=req_id,
        token_ids=prompt(length),
        prompt_len=length,
        num_computed_tokens=0,
        block_ids=([30], [30]),
        sampling=Sampling(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # names of Arrival's fields


def scheduled(**work: tuple[int, int, int]) -> Scheduled:
    """Work as (tokens, first position, known tokens) by request."""
    return Scheduled(
        req_ids=list(work),
        num_tokens=[tokens for tokens, _, _ in work.values()],
        num_computed_tokens=[first for _, first, _ in work.values()],
        num_known_tokens=[known for _, _, known in work.values()],
    )


BLOCKS = ([31], [31])
TOO_MANY = (list(range(17)), [31])
NEW = scheduled(n=(4, 0, 4))
WRONG_PLANS: dict[str, tuple[StepPlan, type[Mrv2Error], str]] = {
    "unknown request": (
        StepPlan(arrivals=(arrival("n"),), scheduled=scheduled(n=(4, 0, 4), x=(1, 0, 1))),
        ProtocolError,
        "'x' is scheduled but has no row",
    ),
    "unknown request beside more blocks for a live one": (
        StepPlan(
            continuations=(Continuation(req_id="a", new_block_ids=BLOCKS),),
            scheduled=scheduled(a=(1, 9, 10), x=(1, 0, 1)),
        ),
        ProtocolError,
        "'x' is scheduled but has no row",
    ),
    "departed and scheduled": (
        StepPlan(departed=("a",), scheduled=scheduled(a=(1, 9, 10))),
        ProtocolError,
        "'a' is scheduled but has no row",
    ),
    "arrives while live": (
        StepPlan(departed=("b",), arrivals=(arrival("a"),), scheduled=scheduled(a=(1, 9, 10))),
        ProtocolError,
        "'a' arrived twice",
    ),
    "arrives twice": (
        StepPlan(arrivals=(arrival("n"), arrival("n")), scheduled=NEW),
        ProtocolError,
        "'n' arrived twice",
    ),
    "continues without a row": (
        StepPlan(
            departed=("a",),
            continuations=(Continuation(req_id="x", new_block_ids=BLOCKS),),
            scheduled=scheduled(b=(1, 5, 6)),
        ),
        ProtocolError,
        "'x' has no row",
    ),
    "continues although it departed": (
        StepPlan(
            departed=("a",),
            continuations=(Continuation(req_id="a", new_block_ids=BLOCKS),),
            scheduled=scheduled(b=(1, 5, 6)),
        ),
        ProtocolError,
        "'a' continues",
    ),
    "more rows than there are": (
        StepPlan(
            departed=("a", "x"),
            arrivals=tuple(arrival(name) for name in "nopq"),
            scheduled=scheduled(n=(4, 0, 4)),
        ),
        CapacityError,
        r"4 requests arrive and [12] stay, but all rows are 4 \(max_num_reqs\)",
    ),
    "more tokens than a step holds": (
        StepPlan(
            departed=("a",),
            arrivals=(arrival("n", 48),),
            scheduled=scheduled(n=(48, 0, 48), b=(1, 5, 6)),
        ),
        CapacityError,
        "49 tokens; max_num_tokens is 48",
    ),
    "more tokens than a row holds": (
        StepPlan(departed=("b",), arrivals=(arrival("n", 65),), scheduled=scheduled(a=(1, 9, 10))),
        CapacityError,
        "65 tokens.*max_model_len is 64",
    ),
    "a position beyond the row": (
        StepPlan(departed=("b",), scheduled=scheduled(a=(1, 64, 65))),
        CapacityError,
        "'a' is to run up to token 65; max_model_len is 64",
    ),
    "no token at all arrives": (
        StepPlan(arrivals=(arrival("n", 0),), scheduled=NEW),
        CapacityError,
        "0 tokens; it needs at least one",
    ),
    "more blocks arrive than a table holds": (
        StepPlan(departed=("a",), arrivals=(arrival("n", block_ids=TOO_MANY),), scheduled=NEW),
        CapacityError,
        "17 blocks are added to 0 of KV group 0; its max_blocks is 16",
    ),
    "more blocks follow than a table holds": (
        StepPlan(
            arrivals=(arrival("n"),),
            continuations=(Continuation(req_id="a", new_block_ids=([31], list(range(8)))),),
            scheduled=NEW,
        ),
        CapacityError,
        "8 blocks are added to 2 of KV group 1; its max_blocks is 8",
    ),
    "blocks for another number of groups": (
        StepPlan(arrivals=(arrival("n", block_ids=([30],)),), scheduled=NEW),
        ProtocolError,
        "blocks are given for 1 KV groups; there are 2",
    ),
    "a block that the cache lacks": (
        StepPlan(departed=("b",), arrivals=(arrival("n", block_ids=([30], [400])),), scheduled=NEW),
        CapacityError,
        "request 'n' is given block 400 of KV group 1; the cache has 400 blocks",
    ),
    "a block below the first": (
        StepPlan(
            departed=("b",),
            continuations=(Continuation(req_id="a", new_block_ids=([31, -1], [])),),
            scheduled=scheduled(a=(1, 9, 10)),
        ),
        CapacityError,
        "request 'a' is given block -1 of KV group 0; the cache has 400 blocks",
    ),
    "fewer than no token computed": (
        StepPlan(departed=("b",), arrivals=(arrival("n", num_computed_tokens=-1),), scheduled=NEW),
        ProtocolError,
        "request 'n' arrives with num_computed_tokens -1; it has 4 tokens",
    ),
    "more tokens computed than there are": (
        StepPlan(departed=("b",), arrivals=(arrival("n", num_computed_tokens=5),), scheduled=NEW),
        ProtocolError,
        "request 'n' arrives with num_computed_tokens 5; it has 4 tokens",
    ),
    "a prompt longer than the tokens": (
        StepPlan(departed=("b",), arrivals=(arrival("n", prompt_len=5),), scheduled=NEW),
        ProtocolError,
        "request 'n' arrives with prompt_len 5; it has 4 tokens",
    ),
    "an arrival that starts elsewhere": (
        StepPlan(departed=("b",), arrivals=(arrival("n"),), scheduled=scheduled(n=(3, 1, 4))),
        ProtocolError,
        "request 'n' arrives with num_computed_tokens 0 and is to run from position 1",
    ),
    "a prompt with logprobs and a gap": (
        StepPlan(departed=("b",), scheduled=scheduled(lp=(1, 3, 6))),
        ProtocolError,
        "request 'lp' wants logprobs of its prompt and goes on from position 3; 2 were run",
    ),
    "fewer blocks than tokens arrive": (
        StepPlan(
            departed=("b",),
            arrivals=(arrival("n", 9, block_ids=([30, 31], [30, 31])),),
            scheduled=scheduled(a=(1, 9, 10), n=(9, 0, 9)),
        ),
        CapacityError,
        "'n' is to run up to token 9; its 2 blocks of KV group 0 hold 8: give it more blocks",
    ),
    "more tokens than the blocks that are held": (
        StepPlan(scheduled=scheduled(a=(4, 9, 13))),
        CapacityError,
        "'a' is to run up to token 13; its 3 blocks of KV group 0 hold 12",
    ),
    "more tokens than the blocks that follow": (
        StepPlan(
            departed=("b",),
            continuations=(Continuation(req_id="a", new_block_ids=([31, 32], [])),),
            scheduled=scheduled(a=(8, 9, 17)),
        ),
        CapacityError,
        "'a' is to run up to token 17; its 2 blocks of KV group 1 hold 16",
    ),
    "fewer than no token known": (
        StepPlan(departed=("b",), scheduled=scheduled(a=(1, 9, -1))),
        ProtocolError,
        "'a' is to run 1 tokens from position 9 on; it has -1",
    ),
    "fewer than no token to run": (
        StepPlan(departed=("b",), scheduled=scheduled(a=(-1, 9, 10))),
        ProtocolError,
        "'a' is to run -1 tokens from position 9 on; it has 10",
    ),
    "more logprobs than tokens": (
        StepPlan(
            arrivals=(arrival("o"), arrival("n", sampling=Sampling(num_logprobs=98))),
            scheduled=NEW,
        ),
        ConfigError,
        "'n' cannot be served: num_logprobs is 98; the vocabulary has 97 tokens",
    ),
    "no token to run": (
        StepPlan(departed=("b",), scheduled=scheduled(a=(0, 9, 10))),
        ProtocolError,
        "'a' is to run 0 tokens from position 9",
    ),
    "a token that is not known": (
        StepPlan(departed=("b",), scheduled=scheduled(a=(2, 9, 10))),
        ProtocolError,
        "'a' is to run 2 tokens from position 9 on; it has 10",
    ),
    "before the first token": (
        StepPlan(departed=("b",), scheduled=scheduled(a=(1, -1, 10))),
        ProtocolError,
        "from position -1",
    ),
    "scheduled twice": (
        StepPlan(
            departed=("b",),
            scheduled=Scheduled(
                req_ids=["a", "a"],
                num_tokens=[1, 1],
                num_computed_tokens=[9, 9],
                num_known_tokens=[10, 10],
            ),
        ),
        ProtocolError,
        "request 'a' is scheduled twice in one step",
    ),
    "lists of different lengths": (
        StepPlan(departed=("b",), scheduled=replace(scheduled(a=(1, 9, 10)), num_tokens=[1, 1])),
        ProtocolError,
        r"1 requests are scheduled with lists of \(2, 1, 1\)",
    ),
    "nothing scheduled": (
        StepPlan(departed=("b",), scheduled=scheduled()),
        ProtocolError,
        "nothing to execute; call update_rows",
    ),
}


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_wrong_plan_changes_nothing(toy: Toy, name: str) -> None:
    plan, error, message = WRONG_PLANS[name]
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(5, first=3))
    toy.host.add("lp", prompt(6, first=5), Sampling(num_prompt_logprobs=1))
    toy.run({"a": 9, "b": 5, "lp": 2})
    before = snapshot(toy.runner)
    with pytest.raises(error, match=message):
        toy.runner.execute(plan)
    assert snapshot(toy.runner) == before
    toy.host.add("c", prompt(3, first=11))
    toy.run({"b": 1, "c": 3, "a": 1})
    toy.run({"a": 1, "b": 1, "c": 1})
    assert_true_to_the_oracle(toy, at_least=8)


def test_a_decode_beyond_the_blocks_is_refused_once_it_gets_there(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(5, first=3))
    toy.run({"a": 9, "b": 5})
    for _ in range(3):
        toy.run({"a": 1, "b": 1})
    before = snapshot(toy.runner)
    with pytest.raises(
        CapacityError, match=r"'a' is to run up to token 13; its 3 blocks .* 0 hold 12"
    ):
        toy.runner.execute(StepPlan(scheduled=scheduled(a=(1, 12, 13), b=(1, 8, 9))))
    assert snapshot(toy.runner) == before
    for _ in range(20):
        toy.run({"a": 1, "b": 1})
    assert_true_to_the_oracle(toy, at_least=48)


EVENTS = ("arrives while live", "more rows than there are", "more blocks arrive than a table holds")


@pytest.mark.parametrize("name", EVENTS)
def test_wrong_events_of_a_step_without_work_change_nothing(toy: Toy, name: str) -> None:
    plan, error, message = WRONG_PLANS[name]
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(5, first=3))
    toy.run({"a": 9, "b": 5})
    before = snapshot(toy.runner)
    with pytest.raises(error, match=message):
        toy.runner.update_rows(plan)
    assert snapshot(toy.runner) == before
    toy.run({"a": 1, "b": 1})
    assert_true_to_the_oracle(toy, at_least=4)


class SharedEvents(Transfers):
    """Transfers whose events another thread waits for, too, whenever one is to be given back."""

    def __init__(self) -> None:
        super().__init__(CONFIG.device, record=Passed)
        self.given_back: list[Event] = []
        self.elsewhere: PendingOutput | None = None

    def give_back(self, event: Event) -> None:
        self.given_back.append(event)
        output, self.elsewhere = self.elsewhere, None
        if output is not None:
            assert output.wait().token_ids


class Passed:
    """An event that has passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def test_an_event_is_given_back_once_by_two_that_wait_for_it_at_once() -> None:
    transfers = SharedEvents()
    toy = Toy(CONFIG, windows=WINDOWS, transfers=transfers)
    toy.host.add("a", prompt(9))
    pending = toy.step({"a": 9})
    assert pending is not None
    transfers.given_back.clear()
    transfers.elsewhere = pending
    first, again = pending.wait(), pending.wait()
    assert transfers.elsewhere is None
    assert len(transfers.given_back) == 1
    assert first.token_ids == again.token_ids


def test_a_step_is_sampled_once(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    step = toy.runner.execute(toy.host.plan({"a": 9}))
    toy.host.take(toy.runner.sample(step).wait())
    before = snapshot(toy.runner)
    with pytest.raises(ProtocolError, match="step 1 cannot be sampled; step 2 is next"):
        toy.runner.sample(step)
    assert snapshot(toy.runner) == before
    toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=2)


def test_a_step_is_sampled_by_the_runner_that_executed_it(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    step = toy.runner.execute(toy.host.plan({"a": 9}))
    other = Toy(CONFIG, windows=WINDOWS)
    before = snapshot(other.runner)
    with pytest.raises(ProtocolError, match="step 1 is next, and was not executed"):
        other.runner.sample(step)
    assert snapshot(other.runner) == before


def test_a_step_is_sampled_before_the_next_is_executed(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    step = toy.runner.execute(toy.host.plan({"a": 9}))
    before = snapshot(toy.runner)
    with pytest.raises(ProtocolError, match="step 1 was executed but not sampled"):
        toy.runner.execute(StepPlan(departed=("a",), scheduled=scheduled(a=(1, 9, 10))))
    assert snapshot(toy.runner) == before
    toy.host.take(toy.runner.sample(step).wait())
    toy.run({"a": 1})
    assert_true_to_the_oracle(toy, at_least=2)


@pytest.mark.parametrize(
    ("forced", "error", "message"),
    [
        ([], ProtocolError, r"\[\] tokens are forced on .* have \[0, 1\] logits"),
        ([[], []], ProtocolError, r"\[0, 0\] tokens are forced on .* have \[0, 1\] logits"),
        ([[], [1, 2]], ProtocolError, r"\[0, 2\] tokens are forced on .* have \[0, 1\] logits"),
        ([[1], [1]], ProtocolError, r"\[1, 1\] tokens are forced on .* have \[0, 1\] logits"),
        ([[], [97]], ConfigError, r"forced tokens \[97\] .* vocabulary of 97"),
        ([[], [-1]], ConfigError, r"forced tokens \[-1\] .* vocabulary of 97"),
    ],
)
def test_wrong_forced_tokens_leave_the_step_to_be_sampled(
    toy: Toy, forced: list[list[int]], error: type[Mrv2Error], message: str
) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(9))
    step = toy.runner.execute(toy.host.plan({"b": 4, "a": 9}))
    with pytest.raises(error, match=message):
        toy.runner.sample(step, forced)
    toy.host.take(toy.runner.sample(step).wait())
    toy.run({"a": 1, "b": 5})
    assert_true_to_the_oracle(toy, at_least=3)


def test_forced_tokens_are_committed_and_the_drawn_ones_returned(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(9, first=30))
    drawn = {name: hashlm_tokens(toy.host.requests[name].prompt, 1, 97, WINDOWS) for name in "ab"}
    step = toy.runner.execute(toy.host.plan({"b": 9, "a": 9}))
    output = toy.runner.sample(step, [[70], [80]]).wait()
    assert output.req_ids == ["b", "a"]
    assert output.token_ids == [drawn["b"], drawn["a"]]
    toy.host.take(replace(output, token_ids=[[70], [80]]))
    toy.run({"a": 1, "b": 1})
    for name, token in (("a", 80), ("b", 70)):
        request = toy.host.requests[name]
        assert request.outputs == [token, *hashlm_tokens([*request.prompt, token], 1, 97, WINDOWS)]


BREAKAGES: dict[str, Callable[[Toy], object]] = {
    "a block of another request": lambda toy: (
        toy.runner.block_tables.tables[0].tensor[0, 0].fill_(toy.host.requests["b"].blocks[0][0])
    ),
    "a position one late": lambda toy: toy.runner.requests.num_computed_tokens.tensor.add_(1),
    "a token that was not committed": lambda toy: toy.runner.requests.token_ids.tensor[
        :, 10
    ].zero_(),
    "a stale slot": lambda toy: toy.model.caches[0][
        4 * toy.host.requests["a"].blocks[0][0]
    ].zero_(),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_hashlm_shows_a_fault_in_the_rows(toy: Toy, name: str) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(9, first=30))
    toy.run({"a": 9, "b": 9})
    toy.run({"a": 1, "b": 1})
    assert toy.outputs() == toy.expected()
    BREAKAGES[name](toy)
    toy.run({"a": 1, "b": 1})
    assert toy.outputs() != toy.expected()


def decode_on(toy: Toy, *, listed: bool) -> list[object]:
    """Run decodes in which blocks are added; return what the rows hold after each."""
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(5, first=3))
    toy.run({"a": 9, "b": 5})
    states: list[object] = []
    for _ in range(14):
        plan = toy.host.plan({"a": 1, "b": 1})
        if listed and isinstance(plan.scheduled, NextDecode):
            plan = replace(plan, scheduled=plan.scheduled.listed())
        toy.host.take(toy.runner.sample(toy.runner.execute(plan)).wait())
        runner = toy.runner
        states.append(
            (
                dict(runner.rows._row_of),
                runner._room,
                runner.requests.progress.upper.tolist(),
                runner.requests.num_computed_tokens.tensor.tolist(),
                runner.requests.token_ids.tensor.tolist(),
                runner.block_tables._num_blocks.tolist(),
                [table.tensor.tolist() for table in runner.block_tables.tables],
            )
        )
    return states


def test_both_forms_of_a_decode_leave_the_same_state() -> None:
    short, general = Toy(CONFIG, windows=WINDOWS), Toy(CONFIG, windows=WINDOWS)
    assert decode_on(short, listed=False) == decode_on(general, listed=True)
    assert short.outputs() == general.outputs()
    assert_true_to_the_oracle(short, at_least=30)


def test_a_decode_that_follows_another_step_is_taken_by_its_lists(toy: Toy) -> None:
    toy.host.add("a", prompt(9))
    toy.host.add("b", prompt(5, first=3))
    toy.run({"a": 9, "b": 5})
    toy.run({"a": 1, "b": 1})
    first = toy.host.plan({"a": 1, "b": 1})
    assert isinstance(first.scheduled, NextDecode)
    toy.host.take(toy.runner.sample(toy.runner.execute(first)).wait())
    before = snapshot(toy.runner)
    with pytest.raises(ProtocolError, match="'b' is scheduled but has no row"):
        toy.runner.execute(StepPlan(departed=("b",), scheduled=first.scheduled.next_decode()))
    assert snapshot(toy.runner) == before
    toy.run({"b": 1})
    toy.runner.execute(StepPlan(scheduled=first.scheduled.next_decode()))
    assert toy.runner.requests.progress.upper[toy.runner.rows.row("b")] == 5 + 3
