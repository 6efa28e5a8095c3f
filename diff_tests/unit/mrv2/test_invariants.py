"""What holds after every step, over long stories; and that snapshots and poison see what they say.

That each invariant can break is shown with the faults of `mrv2_diff.schedule_faults`.
"""

import pytest
import torch

from mrv2 import KVGroup, RunnerConfig, ThinkingMarkers
from mrv2_diff.invariants import POISON_BLOCK, PoisonFreed, snapshot
from mrv2_diff.late_play import play_late
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import RandomStory, mixed_sampling

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=6,
    max_num_tokens=40,
    max_model_len=32,
    vocab_size=61,
    kv_groups=(KVGroup(block_size=4, max_blocks=8), KVGroup(block_size=8, max_blocks=4)),
    thinking=ThinkingMarkers(start=(3,), end=(5, 8)),
)


@pytest.mark.parametrize(("seed", "lag"), [(11, 0), (12, 1), (13, 2)])
def test_invariants_hold_over_two_hundred_steps(seed: int, lag: int) -> None:
    story = RandomStory(seed, CONFIG, sampling=mixed_sampling)
    played = play_late(CONFIG, story, 200, lag=lag, checked=True)
    assert played.events["finished"] > 20
    assert played.events["preempted"] > 20


def test_poison_changes_no_result() -> None:
    plain, poisoned = (
        play_late(CONFIG, RandomStory(5, CONFIG), 100, lag=1, checked=checked)
        for checked in (False, True)
    )
    assert plain.results == poisoned.results


def test_a_freed_row_holds_poison_from_the_next_step_on() -> None:
    toy = Toy(CONFIG)
    PoisonFreed(toy.runner)
    toy.host.add("a", [1, 2, 3])
    toy.host.add("b", [4, 5, 6])
    toy.run({"a": 3, "b": 3})
    row = toy.runner.rows.row("a")
    toy.host.finish("a")
    toy.run({"b": 1})
    assert toy.runner.requests.token_ids.tensor[row].unique().tolist() == [-1]
    assert toy.runner.block_tables.tables[1].tensor[row].unique().tolist() == [POISON_BLOCK]
    toy.host.add("c", [7])
    toy.run({"c": 1, "b": 1})
    assert toy.runner.rows.row("c") == row
    assert toy.outputs() == toy.expected()


def test_a_snapshot_sees_host_values_device_values_and_containers() -> None:
    toy = Toy(CONFIG)
    toy.host.add("a", [1, 2, 3])
    toy.run({"a": 3})
    before = snapshot(toy.runner)
    assert snapshot(toy.runner) == before
    toy.runner.requests.num_computed_tokens.tensor[5] = 1
    toy.runner.block_tables._num_blocks[1, 5] = 1
    toy.runner.rows._free.pop()
    changed = {path for path, value in snapshot(toy.runner).items() if value != before.get(path)}
    assert changed == {
        "runner.requests.num_computed_tokens.tensor",
        "runner._parts.arena._words[False]",
        "runner.block_tables._num_blocks",
        "runner.rows._free",
    }
