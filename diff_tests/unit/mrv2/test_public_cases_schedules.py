"""Faults of lifecycles, slots and copies that users of such runners reported: each by right values.

Every test states what is right by itself: from the model's own arithmetic, from a formula, or from
the same request undisturbed.
"""

from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2 import (
    Arrival,
    GenerateHead,
    GraphSizes,
    KVGroup,
    Runner,
    RunnerConfig,
    Sampling,
    Scheduled,
    StepPlan,
)
from mrv2.batch.commit import commit_step
from mrv2.batch.inputs import InputBatch, gather_tokens
from mrv2.batch.layout import BatchLayout
from mrv2.execute.shape import GraphKey, GraphMode
from mrv2.memory.arena import Arena
from mrv2.memory.staged import StagedWriteTensor
from mrv2.memory.transfers import Transfers
from mrv2.ports import ForwardInputs
from mrv2.sampling.penalties import Penalties
from mrv2.state.block_tables import gather_block_table, slot_mapping
from mrv2.trace import Probe
from mrv2_diff.invariants import owned
from mrv2_diff.late_play import Played, play_late
from mrv2_diff.models.hashlm import HashLM, hashlm_tokens
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.race_lane import HeldBack, LastMoment, LateStream, LateTransfers
from mrv2_diff.toy_host import Toy, ToyHost, ToyRequest
from mrv2_diff.toy_stories import RandomStory, mixed_sampling

CPU = torch.device("cpu")
CONFIG = RunnerConfig(
    device=CPU,
    max_num_reqs=4,
    max_num_tokens=32,
    max_model_len=64,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=16), KVGroup(block_size=8, max_blocks=8)),
)
CARRIERS = ("runner.transfers",)
"""Its ring grows to the steps that were ever in flight."""


class Seen:
    """A trace that copies what the model is given."""

    def __init__(self) -> None:
        self.input_ids: list[list[int]] = []
        self.slots: list[list[list[int]]] = []
        self.layouts: list[BatchLayout] = []
        self.keys: list[GraphKey] = []

    def wants(self, probe: Probe) -> bool:
        return probe == "batch"

    def record(self, probe: Probe, value: object) -> None:
        if isinstance(value, ForwardInputs):
            self.input_ids.append(value.input_ids.tolist())
        elif isinstance(value, InputBatch):
            self.slots.append([slots.tolist() for slots in value.slots])
        elif isinstance(value, BatchLayout):
            self.layouts.append(value)
        elif isinstance(value, GraphKey):
            self.keys.append(value)


def watched(config: RunnerConfig = CONFIG) -> tuple[Toy, Seen]:
    seen = Seen()
    return Toy(config, trace=seen), seen


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 31 * index) % CONFIG.vocab_size for index in range(length)]


# A row is used again.


@pytest.mark.parametrize("num_uncomputed", [0, 1])
def test_a_first_step_that_decodes_reads_its_own_last_token_and_not_its_rows_last_owners(
    num_uncomputed: int,
) -> None:
    # All KV of the prompt is there, as when another engine has run it; the only row is reused.
    toy, seen = watched(replace(CONFIG, max_num_reqs=1))
    first = toy.host.add("r0", prompt(8))
    toy.run({"r0": 8})
    toy.run({"r0": 1})
    tail = [] if num_uncomputed == 0 else [71]
    second = toy.host.add("r1", prompt(8) + tail)
    if num_uncomputed == 0:
        second.outputs = [71]
    assert first.outputs[-1] != 71
    toy.host.share("r0", "r1", 8)
    toy.host.finish("r0")
    toy.run({"r1": 1})
    assert toy.runner.rows.row("r1") == 0
    assert seen.input_ids[-1] == [71]
    assert second.outputs[-1:] == hashlm_tokens([*prompt(8), 71], 1, CONFIG.vocab_size, (None,) * 2)


def test_a_resumed_request_has_its_new_blocks_alone_and_its_parameters_again() -> None:
    model = HashLM(CONFIG, num_blocks=40)
    runner = Runner(CONFIG, model, model)
    sampling = Sampling(temperature=0.7, seed=11, presence_penalty=0.5)

    def arrival(name: str, blocks: list[int], tokens: list[int]) -> Arrival:
        return Arrival(
            req_id=name,
            token_ids=tokens,
            prompt_len=9,
            num_computed_tokens=0,
            block_ids=(blocks, [block + 20 for block in blocks]),
            sampling=sampling if name == "a" else Sampling(),
        )

    def run(plan: StepPlan) -> int:
        return runner.sample(runner.execute(plan)).wait().token_ids[0][0]

    def scheduled(name: str, num_tokens: int) -> Scheduled:
        return Scheduled(
            req_ids=[name],
            num_tokens=[num_tokens],
            num_computed_tokens=[0],
            num_known_tokens=[num_tokens],
        )

    drawn = run(
        StepPlan(arrivals=(arrival("a", [0, 1, 2], prompt(9)),), scheduled=scheduled("a", 9))
    )
    run(
        StepPlan(
            departed=("a",),
            arrivals=(arrival("b", [0, 1, 3], prompt(9, 5)),),
            scheduled=scheduled("b", 9),
        )
    )
    tokens = [*prompt(9), drawn]
    run(StepPlan(arrivals=(arrival("a", [5, 6, 7], tokens),), scheduled=scheduled("a", 10)))
    row = runner.rows.row("a")
    first, second = runner.block_tables.tables
    assert first.tensor[row, :3].tolist() == [5, 6, 7]
    assert second.tensor[row, :3].tolist() == [25, 26, 27]
    assert runner.block_tables._num_blocks[:, row].tolist() == [3, 3]
    assert runner.requests.token_ids.tensor[row, :10].tolist() == tokens
    assert runner.requests.prompt_len.device_tensor[row] == 9
    assert isinstance(runner.head, GenerateHead)
    sampler = runner.head.sampler
    columns = sampler._columns
    assert columns.temperature.device_tensor[row] == np.float32(0.7)
    assert columns.seed.device_tensor[row] == 11
    (penalties,) = [stage for stage in sampler._stages if isinstance(stage, Penalties)]
    assert penalties._presence.device_tensor[row] == 0.5


def test_a_resumed_prompt_ends_where_its_outputs_end() -> None:
    # Nine tokens in chunks of 4, 4 and 1: only the last draws, and none of them is a decode.
    sampling = Sampling(
        presence_penalty=1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        min_tokens=8,
        stop_token_ids=tuple(range(0, 97, 2)),
        bad_words=((3,), (5, 7)),
    )
    undisturbed, (toy, seen) = Toy(CONFIG), watched()
    for each in (undisturbed, toy):
        each.host.add("a", prompt(3), sampling)
        each.run({"a": 3})
        for _ in range(5):
            each.run({"a": 1})
    request = toy.host.requests["a"]
    assert len(request.outputs) == 6
    toy.host.preempt("a")
    toy.host.add("other", prompt(5, 9))
    toy.run({"other": 5})
    for chunk, num_outputs in ((4, 6), (4, 6), (1, 7)):
        toy.run({"a": chunk})
        assert len(request.outputs) == num_outputs
        assert seen.layouts[-1].max_query_len == chunk
        assert seen.keys[-1].num_tokens == chunk
        row = toy.runner.rows.row("a")
        assert toy.runner.requests.prompt_len.device_tensor[row] == 3
    for _ in range(6):
        toy.run({"a": 1})
    for _ in range(7):
        undisturbed.run({"a": 1})
    assert request.outputs == undisturbed.host.requests["a"].outputs
    assert len(request.outputs) == 13


@pytest.mark.parametrize("is_replayed", [False, True])
def test_prompts_as_long_as_a_decode_draw_what_they_draw_alone(is_replayed: bool) -> None:
    # A step of such prompts, last chunks and tails behind a cached prefix looks like a decode.
    config = replace(CONFIG, graphs=GraphSizes(decodes=(4,) * is_replayed))
    seen = Seen()
    toy = Toy(config, graph_maker=PlayedGraphMaker() if is_replayed else None, trace=seen)
    toy.host.add("donor", prompt(16))
    toy.run({"donor": 16})
    toy.host.add("chunk", prompt(9, 3))
    toy.run({"chunk": 8})
    toy.host.add("hit", [*prompt(16), 71])
    toy.host.share("donor", "hit", 16)
    toy.host.add("fresh", [5])
    everyone = {"fresh": 1, "hit": 1, "chunk": 1, "donor": 1}
    for _ in range(6):
        toy.run(everyone)
    for name in everyone:
        toy.host.finish(name)
        toy.host.add(f"{name} again", [7 + len(name)])
    alone = {f"{name} again": 1 for name in everyone}
    toy.run(alone)
    toy.run(alone)
    mode = GraphMode.DECODE if is_replayed else GraphMode.EAGER
    assert [key.mode for key in seen.keys[2:]] == [mode] * 8
    assert [len(tokens) for _, tokens in toy.outputs()] == [6, 6, 6, 7, 2, 2, 2, 2]
    assert toy.outputs() == toy.expected()


# Steps in flight.


ONE_GROUP = replace(CONFIG, kv_groups=(KVGroup(block_size=4, max_blocks=16),))


class Crowded:
    """A story in which the cache is too small: the youngest makes room for the oldest.

    Args:
        limits: Tokens that each request draws.
    """

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self.num_preempted_in_flight = 0

    def __call__(self, host: ToyHost, step: int) -> dict[str, int]:
        if step == 0:
            host.add("r0", prompt(10))
            host.add("r1", prompt(9, 5))
        if step == 4:
            host.add("r2", prompt(21, 8))
        for request in list(host.requests.values()):
            assert request.num_in_flight >= 0
            if len(request.outputs) == self._limits[request.req_id]:
                host.finish(request.req_id)
        work: dict[str, int] = {}
        num_planned = 0
        for request in host.requests.values():
            num_drawn = len(request.outputs) + request.num_in_flight
            if not request.num_left or num_drawn == self._limits[request.req_id]:
                continue
            chunk = min(request.num_left, 6)
            missing = -(-(request.num_computed + chunk) // 4) - len(request.blocks[0])
            if not self._make_room(host, work, request, missing + num_planned):
                continue
            work[request.req_id] = chunk
            num_planned += missing
        return work

    def _make_room(
        self, host: ToyHost, work: dict[str, int], request: ToyRequest, num_blocks: int
    ) -> bool:
        for victim in reversed(list(host.requests.values())):
            if host.num_free(0) >= num_blocks or victim is request:
                break
            if victim.has_row and victim.req_id not in work:
                self.num_preempted_in_flight += victim.num_in_flight > 0
                host.preempt(victim.req_id)
        return host.num_free(0) >= num_blocks


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_requests_that_crowd_each_other_out_draw_what_they_draw_alone(lag: int, late: bool) -> None:
    limits = {"r0": 25, "r1": 19, "r2": 9}
    stream = LateStream(LastMoment()) if late else None
    toy = Toy(ONE_GROUP, num_blocks=12, transfers=LateTransfers(stream) if stream else None)
    story = Crowded(limits)
    with stream or nullcontext():
        toy.play(story, 140, lag=lag)
    drawn = {request.req_id: request for request in toy.host.finished}
    assert set(drawn) == set(limits), "a request did not finish"
    for name, request in drawn.items():
        assert request.outputs == hashlm_tokens(request.prompt, limits[name], CONFIG.vocab_size)
    assert sum(request.num_preemptions for request in drawn.values()) >= 2
    assert bool(story.num_preempted_in_flight) == (lag > 0)
    toy.step({})
    assert len(toy.runner.rows) == 0


@pytest.mark.parametrize("kind", ["upload", "download"])
def test_copies_that_wait_until_the_next_step_was_built_change_nothing(kind: str) -> None:
    def play(schedule: HeldBack | None) -> Played:
        story = RandomStory(17, CONFIG, sampling=mixed_sampling)
        return play_late(CONFIG, story, 60, lag=2, schedule=schedule)

    late = play(HeldBack(which=lambda queued: queued.kind == kind, num_steps=1))
    assert late.stream is not None
    assert late.stream.counts["upload", "copy"] > 200  # layouts, tables, tokens, parameters
    assert late.stream.most_behind > 0
    assert late.differences(play(None)) == []


# Slots and addresses.


def slots_of(blocks: list[int], size: int, positions: range) -> list[int]:
    return [blocks[position // size] * size + position % size for position in positions]


def test_slots_of_chunks_that_begin_and_end_inside_shuffled_blocks() -> None:
    toy, seen = watched(ONE_GROUP)
    toy.host._free[0] = [*range(20, 60), 0, 5, 7, 2, 9]  # handed out from the end
    toy.host.add("a", prompt(20))
    for chunk in (7, 7, 6):
        toy.run({"a": chunk})
    blocks = [9, 2, 7, 5, 0]
    assert toy.host.requests["a"].blocks == [blocks]
    assert [slots[0] for slots in seen.slots] == [
        slots_of(blocks, 4, range(7)),
        slots_of(blocks, 4, range(7, 14)),
        slots_of(blocks, 4, range(14, 20)),
    ]
    toy.host.add("b", prompt(11, 3))
    toy.run({"b": 5})
    toy.run({"a": 1, "b": 6})
    of_b = toy.host.requests["b"].blocks[0]
    of_a = toy.host.requests["a"].blocks[0]
    assert seen.slots[-1][0] == [
        *slots_of(of_a, 4, range(20, 21)),
        *slots_of(of_b, 4, range(5, 11)),
    ]


def test_a_slot_beyond_32_bits_is_exact() -> None:
    table = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    positions = torch.tensor([15, 16, 31])
    slots = torch.zeros(3, dtype=torch.int64)
    slot_mapping(table, torch.tensor([0, 3], dtype=torch.int32), positions, 16, 3, slots)
    assert slots.tolist() == [15, (2**31 - 1) * 16, (2**31 - 1) * 16 + 15]


@pytest.fixture
def huge_table(tmp_path: Path) -> Tensor:
    """A table of 2,100 rows of 2**20 + 1 int32, in a file with holes: it costs what is touched."""
    num_rows, stride = 2100, 2**20 + 1
    flat = torch.from_file(
        str(tmp_path / "table"), shared=True, size=num_rows * stride, dtype=torch.int32
    )
    assert num_rows * stride > 2**31
    return flat.view(num_rows, stride)


def test_the_last_rows_of_a_table_of_more_than_32_bits(huge_table: Tensor) -> None:
    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    num_computed = torch.zeros(len(huge_table), dtype=torch.int32)
    rows, seq_lens = int32(2099, 2080), int32(4, 3)
    huge_table[2099, :4], huge_table[2080, :3] = int32(1, 2, 3, 4), int32(5, 6, 7)
    num_computed[rows.long()] = int32(3, 2)
    drawn = torch.tensor([[8], [9]])
    commit_step(rows, seq_lens, int32(1, 1), drawn, int32(1, 1), huge_table, num_computed)
    assert huge_table[2099, :6].tolist() == [1, 2, 3, 4, 8, 0]
    assert huge_table[2080, :5].tolist() == [5, 6, 7, 9, 0]
    assert int(huge_table[0, 0]) == int(huge_table[1, 0]) == 0
    for query_lens in ((1, 1), (1, 2)):  # the reference has a way of its own for decodes
        num_tokens = sum(query_lens)
        input_ids, positions = int32(*[0] * num_tokens), torch.zeros(num_tokens, dtype=torch.int64)
        gather_tokens(
            rows,
            int32(0, query_lens[0], num_tokens),
            huge_table,
            int32(*[0] * 2080, 4 - query_lens[1], *[0] * 18, 4),
            max(query_lens),
            input_ids,
            positions,
            int32(0, 0),
        )
        assert input_ids.tolist() == [8, *[7, 9][-query_lens[1] :]]
    out = torch.zeros((2, 5), dtype=torch.int32)
    gather_block_table(huge_table, rows, 5, out)
    assert out.tolist() == [[1, 2, 3, 4, 8], [5, 6, 7, 9, 0]]


def test_a_staged_write_to_the_last_row_of_such_a_table(huge_table: Tensor) -> None:
    arena = Arena(Transfers(CPU))
    staged = StagedWriteTensor(tuple(huge_table.shape), torch.int32, CPU, arena)
    arena._words = dict.fromkeys((False, True), huge_table.view(-1))
    staged.stage_write(2099, 2**20 - 1, [7, 8])
    staged.stage_write(0, 0, [9])
    staged.apply_write()
    assert huge_table[2099, -2:].tolist() == [7, 8]
    assert int(huge_table[0, 0]) == 9


# Nothing piles up.


def test_a_thousand_steps_leave_every_row_free_and_every_list_as_it_was() -> None:
    def sizes(num_steps: int) -> dict[str, int]:
        toy = Toy(CONFIG)
        toy.play(RandomStory(23, CONFIG, sampling=mixed_sampling), num_steps, lag=1)
        for name in list(toy.host.requests):
            toy.host.finish(name)
        toy.step({})
        toy.host.add("last", prompt(4))
        toy.run({"last": 4})  # what the departures staged is flushed
        toy.host.finish("last")
        toy.step({})
        assert sorted(toy.runner.rows._free) == list(range(CONFIG.max_num_reqs))
        return {
            path: len(value)
            for path, value in owned(toy.runner)
            if isinstance(value, list | dict | set | deque) and not path.startswith(CARRIERS)
        }

    assert sizes(1000) == sizes(20)
