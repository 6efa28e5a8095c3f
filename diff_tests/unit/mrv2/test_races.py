"""One answer for every schedule: whatever the device is late with, no step changes."""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mrv2 import (
    GrammarMask,
    GraphSizes,
    KVGroup,
    PendingOutput,
    ProtocolError,
    RunnerConfig,
    ThinkingMarkers,
)
from mrv2.execute.shape import GraphMode
from mrv2.memory.ring import NUM_SLOTS, ResultRing
from mrv2.sampling.bitmask import num_words
from mrv2_diff import race_lane
from mrv2_diff.late_play import Played, play_late
from mrv2_diff.race_lane import (
    AtRandom,
    HeldBack,
    HostSync,
    LastMoment,
    LateStream,
    LateTransfers,
    Prompt,
    Queued,
    Schedule,
)
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import RandomStory, mixed_sampling

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=40,
    max_model_len=48,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=12), KVGroup(block_size=8, max_blocks=6)),
    thinking=ThinkingMarkers(start=(3,), end=(5, 8)),
)
WINDOWS = (None, 6)
NUM_STEPS = 48
LAGS = (1, 2)
PERIOD = 11
"""In turn, each operation of every so many is late."""


def by_kind(kind: str) -> Callable[[Queued], bool]:
    return lambda queued: queued.kind == kind


def by_name(name: str) -> Callable[[Queued], bool]:
    return lambda queued: queued.name == name


def by_turn(phase: int, period: int = PERIOD) -> Callable[[Queued], bool]:
    return lambda queued: queued.number % period == phase


def late_by(which: Callable[[Queued], bool], num_steps: int | None) -> Callable[[], Schedule]:
    return lambda: HeldBack(which=which, num_steps=num_steps)


OPS = (
    "batch.commit_step",
    "batch.gather_tokens",
    "batch.locate_logits",
    "memory.staged_write",
    "sampling.draw",
    "state.gather_block_table",
    "state.slot_mapping",
)
"""Those of every story; the stages of sampling have more."""
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "everything to the last moment": LastMoment,
    **{
        f"every {kind} {'to the last moment' if steps is None else f'by {steps} steps'}": late_by(
            by_kind(kind), steps
        )
        for kind in ("upload", "download", "op", "torch")
        for steps in (1, None)
    },
    **{f"operation {phase} of {PERIOD}": late_by(by_turn(phase), 1) for phase in range(PERIOD)},
    **{f"at random {seed}": lambda seed=seed: AtRandom(seed) for seed in range(4)},  # type: ignore[misc]
}


def story(seed: int) -> RandomStory:
    return RandomStory(seed, CONFIG, sampling=mixed_sampling)


@cache
def queued_promptly() -> LateStream:
    stream = play_late(CONFIG, story(0), NUM_STEPS, lag=1, schedule=Prompt()).stream
    assert stream is not None
    return stream


@cache
def plain(seed: int, lag: int) -> Played:
    return play_late(CONFIG, story(seed), NUM_STEPS, lag=lag, windows=WINDOWS)


def assert_changes_nothing(schedule: Schedule, seed: int, lag: int) -> None:
    late = play_late(CONFIG, story(seed), NUM_STEPS, lag=lag, schedule=schedule, windows=WINDOWS)
    assert late.stream is not None
    assert late.stream.most_behind > 0, "nothing was late"
    assert late.differences(plain(seed, lag)) == []
    assert late.results == late.results_at_end


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_changes_a_step(name: str) -> None:
    index = list(SCHEDULES).index(name)
    for lag in LAGS if name.startswith("every") else (LAGS[index % len(LAGS)],):
        assert_changes_nothing(SCHEDULES[name](), index % 3, lag)


def test_no_op_that_is_late_by_a_step_changes_one() -> None:
    late = [name for kind, name in sorted(queued_promptly().counts) if kind == "op"]
    assert set(OPS) <= set(late)
    for index, name in enumerate(late):
        assert_changes_nothing(HeldBack(which=by_name(name), num_steps=1), 0, LAGS[index % 2])


@pytest.mark.parametrize("lag", LAGS)
def test_what_is_late_is_right_and_not_just_the_same(lag: int) -> None:
    greedy = RandomStory(7, CONFIG)
    late = play_late(
        CONFIG, greedy, NUM_STEPS, lag=lag, schedule=LastMoment(), windows=WINDOWS, checked=True
    )
    assert sum(len(tokens) for _, tokens in late.outputs) > 80
    assert late.outputs == late.expected


# Steps that are replayed from graphs: each replay is one operation, and its results come with it.

REPLAYED = replace(CONFIG, graphs=GraphSizes(decodes=(1, 2, 4), forwards=(8, 16)))
READ_LATE = 2 * NUM_SLOTS
"""Steps queued before the oldest one's output is taken: more than the ring of results holds."""
REPLAYED_SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "everything to the last moment": LastMoment,
    "every replay to the last moment": late_by(by_kind("graph"), None),
    "every replay by 1 steps": late_by(by_kind("graph"), 1),
    "every replay by 3 steps": late_by(by_kind("graph"), 3),
    "every upload by 1 steps": late_by(by_kind("upload"), 1),
    "every op by 1 steps": late_by(by_kind("op"), 1),
    **{f"operation {phase} of 7": late_by(by_turn(phase, 7), 1) for phase in (0, 3, 5)},
    "at random": lambda: AtRandom(5, 0.1),
}
STORIES: dict[str, Callable[[int], RandomStory]] = {
    "plain": lambda seed: RandomStory(seed, CONFIG, most_temperature=1.2),
    "mixed": story,
}
"""In a plain one every draw is the graph's own; in a mixed one sampling mostly runs again."""


@cache
def replayed(name: str, seed: int, lag: int) -> Played:
    played = play_late(REPLAYED, STORIES[name](seed), NUM_STEPS, lag=lag, windows=WINDOWS)
    eager = play_late(CONFIG, STORIES[name](seed), NUM_STEPS, lag=lag, windows=WINDOWS)
    assert played.results == eager.results
    return played


def assert_changes_no_replay(schedule: Schedule, name: str, seed: int, lag: int) -> None:
    late = play_late(
        REPLAYED, STORIES[name](seed), NUM_STEPS, lag=lag, schedule=schedule, windows=WINDOWS
    )
    assert late.stream is not None
    assert late.stream.most_behind > 0, "nothing was late"
    num_replays = sum(count for (kind, _), count in late.stream.counts.items() if kind == "graph")
    assert num_replays == late.steps_by_mode[GraphMode.DECODE] >= 5
    assert late.differences(replayed(name, seed, lag)) == []
    assert late.results == late.results_at_end


@pytest.mark.parametrize("story_name", STORIES)
@pytest.mark.parametrize("name", REPLAYED_SCHEDULES)
def test_no_schedule_changes_a_replayed_step(name: str, story_name: str) -> None:
    index = list(REPLAYED_SCHEDULES).index(name)
    for lag in LAGS if "replay" in name or not index else (LAGS[index % len(LAGS)],):
        assert_changes_no_replay(REPLAYED_SCHEDULES[name](), story_name, 1, lag)


@pytest.mark.parametrize("name", ["every replay by 3 steps", "at random"])
def test_outputs_that_are_read_after_their_slots_came_round_are_those_of_their_steps(
    name: str,
) -> None:
    assert_changes_no_replay(REPLAYED_SCHEDULES[name](), "plain", 1, READ_LATE)


def test_outputs_in_slots_that_nobody_reads_in_time_are_lost() -> None:
    right = replayed("plain", 1, READ_LATE)
    with patch.object(ResultRing, "make_room", lambda self: None):
        lost = play_late(REPLAYED, STORIES["plain"](1), NUM_STEPS, lag=READ_LATE, windows=WINDOWS)
    assert "results" in lost.differences(right)


def test_a_step_is_refused_whose_slot_a_late_device_has_not_written() -> None:
    with pytest.raises(ProtocolError, match=f"{NUM_SLOTS} steps are queued"):
        assert_changes_no_replay(LastMoment(), "plain", 1, READ_LATE)


def test_the_stories_do_all_that_can_happen_to_a_request() -> None:
    for lag in LAGS:
        events = Counter[str]()
        for seed in range(3):
            events.update(plain(seed, lag).events)
        for event in (
            "preempted in flight",
            "finished in flight",
            "rewound in flight",
            "resumed in the same step",
            "id used again in the same step",
            "live and not scheduled",
        ):
            assert events[event] > 0, (event, events)


def test_every_copy_and_every_op_of_a_step_is_queued() -> None:
    stream = queued_promptly()
    assert {("op", name) for name in OPS} <= stream.counts.keys()
    assert stream.counts["upload", "copy"] > NUM_STEPS
    assert stream.counts["download", "copy"] > NUM_STEPS
    assert stream.most_behind == 0


@pytest.mark.parametrize("schedule", [LastMoment, Prompt])
def test_the_models_operations_one_by_one(schedule: Callable[[], Schedule]) -> None:
    outputs = []
    for stream in (None, LateStream(schedule())):
        transfers = None if stream is None else LateTransfers(stream)
        toy = Toy(CONFIG, windows=WINDOWS, transfers=transfers)
        with stream or nullcontext():
            toy.play(story(4), 20, lag=1)
        outputs.append(toy.outputs())
    assert outputs[0] == outputs[1]


# What the lane sees: each fault that it is there for, in a few lines.


@pytest.fixture
def stream() -> LateStream:
    return LateStream(LastMoment())


def test_an_output_that_nobody_waited_for_holds_poison(stream: LateStream) -> None:
    transfers = LateTransfers(stream)
    with stream:
        doubled = transfers.upload(np.array([1, 2], dtype=np.int64)) * 2
        on_host, ready = transfers.download(doubled), transfers.record()
        assert on_host.tolist() == [-77, -77]
        assert ready is not None
        assert not ready.query()
        ready.synchronize()
        assert ready.query()
        assert on_host.tolist() == [2, 4]


def test_an_upload_reads_what_the_host_held_and_a_view_what_it_holds(stream: LateStream) -> None:
    values = np.array([1, 2], dtype=np.int64)
    with stream:
        staged = LateTransfers(stream).upload(values)
        live = torch.from_numpy(values) + 0
        values[:] = 9
        stream.drain()
    assert staged.tolist() == [1, 2]
    assert live.tolist() == [9, 9]


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda tensor: tensor[0].item(),
    "truth": lambda tensor: bool(tensor.sum() > 0),
    "nonzero": torch.nonzero,
    "mask": lambda tensor: tensor[tensor > 0],
    "masked write": lambda tensor: tensor.__setitem__(tensor > 0, 1),
    "repeat": lambda tensor: torch.repeat_interleave(tensor),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_refused(stream: LateStream, name: str) -> None:
    tensor = torch.arange(3)
    with stream, pytest.raises(HostSync, match="needs values of the device"):
        WAITS[name](tensor)


def test_operations_keep_their_order(stream: LateStream) -> None:
    tensor = torch.zeros(3)
    with stream:
        tensor.add_(1)
        tensor[1:].mul_(5)
        doubled = tensor * 2
        top = tensor.topk(1)
        tensor.zero_()
        stream.drain()
    assert tensor.tolist() == [0, 0, 0]
    assert doubled.tolist() == [2, 10, 10]
    assert top.values.tolist() == [5]


def test_what_stands_behind_a_late_operation_waits_with_it() -> None:
    late = LateStream(HeldBack(which=by_name("aten::mul_"), num_steps=2))
    tensor = torch.ones(1)
    seen = []
    with late:
        tensor.add_(1)
        tensor.mul_(10)
        tensor.add_(1)
        for _ in range(3):
            seen.append(tensor.tolist())
            late.begin_step()
    assert seen == [[2], [2], [21]]


def masked_steps(stream: LateStream | None, mask: str) -> list[list[int]]:
    """Run decodes of one request whose tokens a grammar or the host decides, three in flight."""
    toy = Toy(CONFIG, transfers=None if stream is None else LateTransfers(stream))
    toy.host.add("a", [1, 2, 3])
    bitmask = np.zeros((1, num_words(CONFIG.vocab_size)), dtype=np.int32)
    outputs, pending = [], deque[PendingOutput]()
    with stream or nullcontext():
        for number in range(12):
            step = toy.runner.execute(toy.host.plan({"a": 3 if number == 0 else 1}))
            bitmask[:] = 1 << (number + 1)  # the host's array is written again for each step
            grammar = GrammarMask(bitmask=bitmask, logit_idx=np.zeros(1, dtype=np.int32))
            if mask == "grammar":
                pending.append(toy.runner.sample(step, grammar=grammar))
            else:
                pending.append(toy.runner.sample(step, [[number + 1]]))
            if len(pending) > 3:
                outputs.append(pending.popleft().wait().token_ids[0])
        outputs += [left.wait().token_ids[0] for left in pending]
        if stream is not None:
            stream.drain()
    row = toy.runner.rows.row("a")
    return [*outputs, toy.runner.requests.token_ids.tensor[row, 3:15].tolist()]


@pytest.mark.parametrize("mask", ["grammar", "forced"])
def test_a_mask_and_forced_tokens_are_those_of_their_step(stream: LateStream, mask: str) -> None:
    late = masked_steps(stream, mask)
    assert late == masked_steps(None, mask)
    drawn = late[-1] if mask == "forced" else [token % 32 for token in late[-1]]
    assert drawn == list(range(1, 13))
    assert stream.most_behind > 0


def test_an_operation_that_writes_some_results_and_makes_others_is_named() -> None:
    schema = torch.ops.aten._native_batch_norm_legit.default._schema
    arguments = [torch.ones(2) for _ in schema.arguments]
    with pytest.raises(TypeError, match="_native_batch_norm_legit writes some"):
        race_lane._written(schema, arguments, {})
