"""Copies, and the proof that a host write after a step was queued never changes that step.

The proof takes the device's slowness to its end: every upload is delivered as if it had happened
only when the next step was already queued. A first pass looks at each staging buffer that late; a
second pass runs the same schedule and gives each upload those late bytes in place of the present
ones. If anything on the host could still write to what a queued step reads, the second pass
computes something else.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mrv2 import KVGroup, RunnerConfig, Sampling
from mrv2.memory.transfers import Copy, Transfers, queue_copy
from mrv2_diff.toy_host import Story, Toy, ToyHost
from mrv2_diff.toy_stories import RandomStory

CPU = torch.device("cpu")
CONFIG = RunnerConfig(
    device=CPU,
    max_num_reqs=6,
    max_num_tokens=40,
    max_model_len=64,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=16), KVGroup(block_size=8, max_blocks=8)),
)


class Uploads(Transfers):
    """Uploads through the given copy; downloads at once, as the stream runs them in its order."""

    def download(self, values: Tensor) -> Tensor:
        return values.clone()


class OneBuffer(Uploads):
    """The fault that the ring prevents: from the third on, steps stage into the same buffer."""

    num_steps = 0

    def begin_step(self) -> None:
        self.num_steps += 1
        if self.num_steps < 3:
            super().begin_step()
        else:
            self._ring[self._current].reset()


ONE_BLOCK = replace(CONFIG, kv_groups=(KVGroup(block_size=64, max_blocks=1),) * 2)
"""A request never gets a second block, so a step of decodes uploads its layout and nothing else."""

MadeBy = Callable[[torch.device, Copy], Transfers]


class Late:
    """Keeps each upload's staging memory, and reads it when the following step was queued."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.num_changed = 0
        self._this_step: list[tuple[Tensor, Tensor]] = []
        self._last_step: list[tuple[Tensor, Tensor]] = []

    def copy(self, destination: Tensor, source: Tensor) -> None:
        queue_copy(destination, source)
        self._this_step.append((source, source.clone()))

    def step_was_queued(self) -> None:
        for source, at_once in self._last_step:
            self.values.append(source.clone())
            self.num_changed += not torch.equal(source, at_once)
        self._last_step, self._this_step = self._this_step, []

    def end(self) -> None:
        self.step_was_queued()
        self.step_was_queued()


Outputs = list[tuple[str, list[int]]]


def played(
    config: RunnerConfig, transfers: Transfers, story: Story, after_step: Callable[[], None]
) -> Outputs:
    toy = Toy(config, windows=(None, 6), transfers=transfers)
    toy.play(story, 300, lag=1, after_step=after_step)
    return toy.outputs()


def delayed_outputs(
    config: RunnerConfig, made_by: MadeBy, story: Callable[[], Story]
) -> tuple[Late, Outputs]:
    """Run a story twice; return what was seen late, and what comes out of it."""
    late = Late()
    played(config, made_by(CPU, late.copy), story(), late.step_was_queued)
    late.end()
    values = iter(late.values)

    def deliver(destination: Tensor, source: Tensor) -> None:
        destination.copy_(next(values))

    outputs = played(config, made_by(CPU, deliver), story(), lambda: None)
    assert next(values, None) is None
    return late, outputs


def nothing() -> None:
    pass


def turning_story() -> Story:
    """Two requests decode, and every step turns their order.

    Later steps differ in values, not in shape, so a late copy is seen by value, not by a crash.
    """

    def story(host: ToyHost, step: int) -> dict[str, int]:
        if step == 0:
            host.add("a", [1, 2, 3, 4])
            host.add("b", [5, 6, 7, 8], Sampling(temperature=0.8, seed=3))
            return {"a": 4, "b": 4}
        if step >= 50:
            return {}
        return {"a": 1, "b": 1} if step % 2 else {"b": 1, "a": 1}

    return story


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_does_not_change_when_its_copies_are_late(seed: int) -> None:
    def story() -> Story:
        return RandomStory(seed, CONFIG, most_temperature=1.2)

    plain = played(CONFIG, Transfers(CPU), story(), nothing)
    assert sum(len(tokens) for _, tokens in plain) > 500
    late, delayed = delayed_outputs(CONFIG, Uploads, story)
    assert len(late.values) > 250
    assert late.num_changed == 0
    assert delayed == plain


@pytest.mark.parametrize(("made_by", "shows"), [(OneBuffer, True), (Uploads, False)])
def test_late_copies_show_a_buffer_that_every_step_uses(made_by: MadeBy, shows: bool) -> None:
    plain = played(ONE_BLOCK, Transfers(CPU), turning_story(), nothing)
    late, delayed = delayed_outputs(ONE_BLOCK, made_by, turning_story)
    assert (late.num_changed > 40) == shows
    assert (delayed != plain) == shows


# The pieces.


def test_an_upload_is_a_copy_of_what_the_host_holds_now() -> None:
    transfers = Transfers(CPU)
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    uploaded = transfers.upload(values)
    values[:] = -1
    assert uploaded.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert uploaded.dtype == torch.int64


def test_uploads_of_a_step_do_not_share_memory() -> None:
    sources: list[Tensor] = []
    transfers = Transfers(CPU, lambda destination, source: sources.append(source))
    arrays: list[npt.NDArray[Any]] = [
        np.array([1], dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.arange(5, dtype=np.float32),
        np.arange(40_000, dtype=np.int64),
        np.array([[7, 8]], dtype=np.int32)[:, ::-1],
        np.array([True, False]),
    ]
    for array in arrays:
        transfers.upload(array)
    assert [source.tolist() for source in sources] == [array.tolist() for array in arrays]
    assert all(source.data_ptr() % 64 == 0 for source in sources if source.numel())


def test_a_buffer_that_had_to_grow_is_one_piece_in_the_next_round() -> None:
    pointers: list[int] = []
    transfers = Transfers(CPU, lambda destination, source: pointers.append(source.data_ptr()))
    block = np.zeros(1 << 15, dtype=np.uint8)
    for _ in range(4):
        transfers.begin_step()
        for _ in range(8):
            transfers.upload(block)
    first, last = pointers[:8], pointers[-8:]
    assert [b - a for a, b in pairwise(last)] == [len(block)] * 7
    assert len(set(first) & set(last)) < 8


def test_a_download_is_memory_of_its_own() -> None:
    transfers = Transfers(CPU)
    values = torch.arange(4)
    downloaded = transfers.download(values)
    values.zero_()
    assert downloaded.tolist() == [0, 1, 2, 3]


def test_an_upload_into_a_tensor_returns_that_tensor() -> None:
    transfers = Transfers(CPU)
    out = torch.full((3,), -1, dtype=torch.int32)
    assert transfers.upload(np.array([4, 5, 6], dtype=np.int32), out=out) is out
    assert out.tolist() == [4, 5, 6]


# On a device that is really late.


@pytest.mark.gpu
@pytest.mark.parametrize(("made_by", "shows"), [(OneBuffer, True), (Transfers, False)])
def test_a_busy_gpu_computes_what_an_idle_one_does(made_by: MadeBy, shows: bool) -> None:
    # The stream sleeps behind each step, so that every copy is late by several steps of the host.
    config = replace(ONE_BLOCK, device=torch.device("cuda"))

    def outputs(made_by: MadeBy, after_step: Callable[[], None], lag: int) -> Outputs:
        toy = Toy(config, windows=(None, 6), transfers=made_by(config.device, queue_copy))
        toy.play(turning_story(), 50, lag=lag, after_step=after_step)
        return toy.outputs()

    idle = outputs(Transfers, torch.cuda.synchronize, 0)
    assert sum(len(tokens) for _, tokens in idle) == 100
    busy = outputs(made_by, lambda: torch.cuda._sleep(20_000_000), 5)  # cycles: about 10 ms
    assert (busy != idle) == shows


@pytest.mark.gpu
def test_a_gpu_that_still_reads_makes_the_ring_grow() -> None:
    transfers = Transfers(torch.device("cuda"))
    torch.cuda._sleep(400_000_000)
    uploaded = []
    for step in range(6):
        transfers.begin_step()
        uploaded.append(transfers.upload(np.full(100, step, dtype=np.int32)))
    torch.cuda.synchronize()
    assert [int(values.unique()) for values in uploaded] == list(range(6))


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu() -> None:
    toy = Toy(replace(CONFIG, device=torch.device("cuda")))
    for name in "ab":
        toy.host.add(name, [1, 2, 3], Sampling(temperature=0.5, num_logprobs=2))
    toy.run({"a": 3})
    torch.cuda.set_sync_debug_mode("error")
    try:
        queued = [toy.step({"b": 3, "a": 1}), toy.step({"a": 1, "b": 1})]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for pending in queued:
        assert pending is not None
        toy.host.take(pending.wait())
    assert [len(tokens) for _, tokens in toy.outputs()] == [3, 2]
