"""What the shadow's own steps are, in the V1 scheduler's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrv2_diff import process

process.prepare()

# E402: vLLM reads the environment when it is imported.
from mrv2_diff.shadow.follower import DrawTrace, Follower  # noqa: E402
from mrv2_diff.shadow.messages import Done  # noqa: E402
from mrv2_diff.shadow.slices import Answered, Arrived, Room, Slice, Work  # noqa: E402

pytestmark = pytest.mark.vllm

ROOM = Room(num_blocks=12, block_sizes=(4,), max_num_reqs=4, max_model_len=64)
VOCAB = 50


class FakeRunner:
    """Knows how many tokens each request has, and draws token 1."""

    def __init__(self, trace: DrawTrace) -> None:
        self.trace = trace
        self.steps: list[Any] = []
        self.forced: list[list[list[int]] | None] = []
        self.grammars: list[Any] = []
        self.known: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}

    def execute_model(self, step: Any) -> object:
        self.steps.append(step)
        for req_id in step.finished_req_ids:
            del self.known[req_id]
        cached = step.scheduled_cached_reqs
        ends = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.known
            self.known[new.req_id] = len(new.prompt_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
            ends[new.req_id] = step.num_scheduled_tokens[new.req_id]
        for req_id, given, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                assert computed == 0
                self.known[req_id] = len(cached.all_token_ids[req_id])
                self.blocks[req_id] = []
            self.blocks[req_id] += given[0] if given else []
            ends[req_id] = computed + step.num_scheduled_tokens[req_id]
        for req_id, end in ends.items():
            assert len(self.blocks[req_id]) == -(-end // 4), "blocks follow the tokens"
        drawing = [end == self.known[req_id] for req_id, end in ends.items()]
        layout = SimpleNamespace(
            req_ids=list(ends), cu_num_logits=np.cumsum([0, *drawing], dtype=np.int32)
        )
        self.trace.record("layout", layout)
        logits = torch.zeros(sum(drawing), VOCAB)
        logits[:, 1] = 1.0
        self.trace.record("logits", logits)
        self.trace.record("processed_logits", logits)
        return None

    def sample_tokens(self, grammar: Any, forced: Any = None) -> Any:
        self.forced.append(forced)
        self.grammars.append(grammar)
        drawn = self.trace.draw_ids
        for req_id in drawn:
            self.known[req_id] += 1
        return SimpleNamespace(
            req_id_to_index={req_id: index for index, req_id in enumerate(drawn)},
            sampled_token_ids=[[1] for _ in drawn],
            logprobs=None,
        )

    @property
    def run(self) -> list[dict[str, int]]:
        """Tokens of each step, by request."""
        return [step.num_scheduled_tokens for step in self.steps]


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(DrawTrace())


@pytest.fixture
def follower(runner: FakeRunner) -> Follower:
    return Follower(runner, runner.trace, ROOM, 8, torch.float32, returns_raw=True)


def arrived(req_id: str, prompt_len: int, num_blocks: int = 5) -> Arrived:
    return Arrived(
        req_id=req_id,
        prompt=list(range(prompt_len)),
        params=SimpleNamespace(temperature=0.0, logprobs=None, logprob_token_ids=None),
        num_blocks=(num_blocks,),
    )


def part(*work: tuple[str, int, int, int | None], **further: Any) -> Slice:
    """A slice: each request's start, end and V1's token."""
    return Slice(
        work=[Work(req_id=req_id, start=start, end=end) for req_id, start, end, _ in work],
        answers={req_id: Answered(token_id=t) for req_id, _, _, t in work if t is not None},
        is_complete=True,
        **further,
    )


def test_v1s_tokens_are_committed_and_one_difference_is_one_finding(
    follower: Follower, runner: FakeRunner
) -> None:
    first = follower.run(part(("a", 0, 6, 9), arrived=[arrived("a", 6)]))
    second = follower.run(part(("a", 6, 7, 1)))
    assert [finding["v1_token"] for finding in first.findings] == [9]
    assert first.findings[0]["position"] == 6
    assert second == Done(num_slices=1, compared_tokens=1)
    assert runner.forced == [[[9]], [[1]]]
    assert runner.run == [{"a": 6}, {"a": 1}]


def test_chunks_are_v1s(follower: Follower, runner: FakeRunner) -> None:
    follower.run(part(("a", 0, 5, None), arrived=[arrived("a", 7)]))
    follower.run(part(("a", 5, 7, 1)))
    assert runner.run == [{"a": 5}, {"a": 2}]
    assert runner.forced == [[[]], [[1]]]


def test_a_prefix_hit_is_computed_before_in_steps_that_fit(
    follower: Follower, runner: FakeRunner
) -> None:
    follower.run(part(("b", 0, 3, 1), arrived=[arrived("b", 3)]))
    done = follower.run(part(("b", 3, 4, 1), ("a", 12, 15, 1), arrived=[arrived("a", 15)]))
    assert done == Done(num_slices=1, compared_tokens=2)
    assert runner.run == [{"b": 3}, {"a": 8}, {"a": 4}, {"b": 1, "a": 3}]
    assert runner.forced == [[[1]], None, None, [[1], [1]]]


def test_a_preempted_request_is_computed_again_in_other_blocks(
    follower: Follower, runner: FakeRunner
) -> None:
    follower.run(part(("a", 0, 6, 7), arrived=[arrived("a", 6)]))
    before = list(runner.blocks["a"])
    done = follower.run(part(("a", 4, 7, 1), restarted=["a"]))
    assert done == Done(num_slices=1, compared_tokens=1)
    assert runner.run == [{"a": 6}, {"a": 4}, {"a": 3}]
    resumed = runner.steps[1].scheduled_cached_reqs
    assert resumed.resumed_req_ids == {"a"}
    assert resumed.all_token_ids["a"] == [0, 1, 2, 3, 4, 5, 7]
    after = runner.blocks["a"]
    assert len(before) == len(after) == 2
    assert after[0] not in before
    assert after[1] == before[0], "a runner that kept its old block would write it twice"
    assert runner.steps[2].scheduled_cached_reqs.resumed_req_ids == set()


def test_the_block_that_a_resumed_request_had_is_the_next_ones(
    follower: Follower, runner: FakeRunner
) -> None:
    """A request of one block: only another one can write into what it should not read."""
    follower.run(part(("a", 0, 2, 1), arrived=[arrived("a", 2, num_blocks=1)]))
    before = list(runner.blocks["a"])
    follower.run(part(("a", 0, 3, 1), restarted=["a"]))
    follower.run(part(("b", 0, 2, 1), arrived=[arrived("b", 2, num_blocks=1)]))
    assert runner.blocks["b"] == before
    assert runner.blocks["a"] != before


def test_a_resumed_request_that_has_all_blocks_has_them_in_another_order(
    follower: Follower, runner: FakeRunner
) -> None:
    follower.run(part(("a", 0, 10, 1), arrived=[arrived("a", 10, num_blocks=12)]))
    before = list(runner.blocks["a"])
    follower.run(part(("a", 0, 11, 1), restarted=["a"]))
    after = runner.blocks["a"]
    assert len(set(after)) == 3
    assert after[0] not in before
    assert after[1:] == before[:2]


def test_a_token_that_v1_draws_again_replaces_the_first(
    follower: Follower, runner: FakeRunner
) -> None:
    follower.run(part(("a", 0, 6, 7), arrived=[arrived("a", 6)]))
    done = follower.run(part(("a", 0, 6, 1), restarted=["a"]))
    assert done == Done(num_slices=1, compared_tokens=1)
    assert runner.steps[1].scheduled_cached_reqs.all_token_ids["a"] == [0, 1, 2, 3, 4, 5]


def test_a_request_that_is_out_of_step_is_dropped(follower: Follower, runner: FakeRunner) -> None:
    follower.run(part(("a", 0, 6, 7), arrived=[arrived("a", 6)]))
    done = follower.run(part(("a", 9, 10, 1)))
    assert "V1 ran it to 10 of 7 tokens with an answer" in done.dropped["a"]
    assert follower.run(part(("a", 10, 11, 1))) == Done(num_slices=1)
    assert runner.steps[-1].finished_req_ids == {"a"}


def test_what_ends_gives_its_blocks_and_its_row_back(
    follower: Follower, runner: FakeRunner
) -> None:
    for number in range(9):
        req_id = f"r{number}"
        follower.run(part((req_id, 0, 6, 1), arrived=[arrived(req_id, 6, 10)]))
        follower.run(part(finished=[req_id]))
    assert runner.known == {}
    follower.run(part(("a", 0, 6, 1), ("b", 0, 1, 1), arrived=[arrived("a", 6), arrived("b", 1)]))
    follower.run(part(forget_all=True))
    assert runner.known == {}
    assert 0 not in {block for blocks in runner.blocks.values() for block in blocks}


def test_grammars_go_with_the_step_that_draws(follower: Follower, runner: FakeRunner) -> None:
    mask = np.array([3, 4], dtype=np.int32)
    follower.run(part(("a", 4, 6, 1), arrived=[arrived("a", 6)], grammar={"a": mask}))
    catching_up, drawing = runner.grammars
    assert catching_up is None
    assert drawing.structured_output_request_ids == ["a"]
    assert drawing.grammar_bitmask.tolist() == [[3, 4]]
