"""What the runner does on the host for a decode step, as counts that no clock can blur.

Counted is the runner's own part: everything but the model, the attention planner and the sampler.
The bench measures the same part as time.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mrv2
from mrv2 import KVGroup, Runner, RunnerConfig, Sampling
from mrv2.batch.inputs import InputBatch
from mrv2.memory import arena
from mrv2.memory.transfers import Transfers
from mrv2.ports import AttentionPlanner, ForwardInputs, ForwardOutput
from mrv2.trace import Probe
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.toy_host import ToyHost

MAX_TORCH_OPS = 38
"""Torch operations of a steady decode step, on a CPU. As measured: a change that needs more makes
every step slower, and one that needs fewer should lower the bound."""
MAX_CALLS = 106
"""Calls within the runner's modules and from them into C, in such a step; as measured."""

EVERY_COLUMN = Sampling(
    temperature=0.7,
    seed=3,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.5,
)
"""Parameters that a row keeps one value of each for."""

BATCHES = (1, 2, 64, 256)
BLOCK = 32
CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=max(BATCHES),
    max_num_tokens=8 * max(BATCHES),
    max_model_len=4 * BLOCK,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=BLOCK, max_blocks=4),),
)
OWN_MODULES = str(Path(mrv2.__file__).parent)


class Part:
    """Whether the runner's own part is running, or something that it calls and does not own."""

    def __init__(self) -> None:
        self.own = True

    @contextmanager
    def another(self) -> Iterator[None]:
        self.own = False
        try:
            yield
        finally:
            self.own = True

    def wants(self, probe: Probe) -> bool:
        """Return True: every value is kept."""
        return True

    def record(self, probe: Probe, value: object) -> None:
        """Follow the step, as its trace: the sampler runs between these two values."""
        if probe in ("logits", "sampled"):
            self.own = probe == "sampled"


class Apart(AttentionPlanner):
    """The model and its attention, marked as another part."""

    def __init__(self, model: HashLM, part: Part) -> None:
        self._model, self._part = model, part

    def plan(self, batch: InputBatch) -> object:
        with self._part.another():
            return self._model.plan(batch)

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        with self._part.another():
            return self._model.forward(inputs)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        with self._part.another():
            return self._model.compute_logits(hidden)


class CountingTransfers(Transfers):
    """Counts copies, whoever asks for them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts: Counter[str] = Counter()

    def upload(self, values: npt.NDArray[Any], out: Tensor | None = None) -> Tensor:
        self.counts["uploads"] += 1
        return super().upload(values, out)

    def download(self, values: Tensor) -> Tensor:
        self.counts["downloads"] += 1
        return super().download(values)


class OpCounter(TorchDispatchMode):
    """Counts the operations that torch dispatches in the runner's own part."""

    def __init__(self, part: Part) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._part = part
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if self._part.own:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Bench:
    """A runner with a batch of requests that have run their prompts."""

    def __init__(self, num_reqs: int) -> None:
        self.part = Part()
        model = Apart(HashLM(CONFIG, num_blocks=4 * CONFIG.max_num_reqs), self.part)
        self.transfers = CountingTransfers(CONFIG.device)
        self.runner = Runner(CONFIG, model, model, self.transfers, self.part)
        self.host = ToyHost(CONFIG.kv_groups, num_blocks=4 * CONFIG.max_num_reqs)
        for index in range(num_reqs):
            self.host.add(f"r{index}", [1 + index % 7] * 4)
        # The arrivals, a decode, and one in which the arrivals' staging buffer becomes one chunk.
        for _ in range(3):
            self.step()

    def step(self) -> None:
        """Run what is left of every request."""
        with self.part.another():
            plan = self.host.plan({name: r.num_left for name, r in self.host.requests.items()})
        self.host.take(self.runner.sample(self.runner.execute(plan)).wait())

    def writes(self) -> tuple[int, int]:
        """Return the uploads of one step, and the kernels that scatter them."""
        with patch.object(arena, "staged_write", wraps=arena.staged_write) as scatter:
            num_uploads = self.copies()["uploads"]
        return num_uploads, scatter.call_count

    def copies(self) -> Counter[str]:
        """Return the copies of one step."""
        self.transfers.counts = Counter()
        self.step()
        return self.transfers.counts

    def torch_ops(self) -> Counter[str]:
        """Return the torch operations of the runner's own part of one step."""
        counter = OpCounter(self.part)
        with counter:
            self.step()
        return counter.counts

    def calls(self) -> Counter[str]:
        """Return the calls in the runner's own part of one step, by the name of what is called."""
        counts: Counter[str] = Counter()

        def count(frame: FrameType, event: str, callee: Any) -> None:
            own = self.part.own and frame.f_code.co_filename.startswith(OWN_MODULES)
            if own and event in ("call", "c_call"):
                counts[callee.__qualname__ if event == "c_call" else frame.f_code.co_qualname] += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            self.step()
        finally:
            sys.setprofile(before)
        return counts


@pytest.fixture(params=BATCHES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_a_decode_step_makes_so_many_torch_operations_at_any_batch(bench: Bench) -> None:
    counts = bench.torch_ops()
    assert counts["aten.take.default"] == len(CONFIG.kv_groups), "no slot was looked up"
    assert counts.total() <= MAX_TORCH_OPS, counts
    assert bench.torch_ops() == counts


def test_a_decode_step_makes_so_many_calls_at_any_batch(bench: Bench) -> None:
    counts = bench.calls()
    assert counts["Runner.execute"] == counts["Runner.sample"] == 1
    assert counts["PendingOutput.wait"] == 1
    assert counts.total() <= MAX_CALLS, counts
    assert bench.calls() == counts


def test_a_steady_decode_step_uploads_nothing_and_downloads_its_tokens(bench: Bench) -> None:
    for _ in range(3):
        assert bench.copies() == {"downloads": 1}


def test_a_change_costs_one_upload_and_one_kernel_however_many_requests_run() -> None:
    for num_reqs in BATCHES[1:-1]:
        bench = Bench(num_reqs)
        while bench.host.requests["r0"].num_computed < BLOCK:
            assert bench.writes() == (0, 0)
        assert bench.writes() == (1, 1), "a block"
        assert bench.writes() == (0, 0)
        bench.host.finish("r0")
        assert bench.writes() == (1, 1), "a departure"
        assert bench.writes() == (0, 0)
        bench.host.add("late", [1, 2, 3], EVERY_COLUMN)
        assert bench.writes() == (1, 1), "an arrival"
        assert bench.writes() == (1, 1), "the layout behind a prompt"
        assert bench.writes() == (0, 0)


def test_all_that_can_change_in_a_step_costs_one_upload_and_one_kernel() -> None:
    bench = Bench(64)
    for index in range(64, 80):
        bench.host.add(f"r{index}", [1, 2, 3])
    while bench.host.requests["r0"].num_computed < BLOCK:
        bench.step()
    for index in range(40, 56):
        bench.host.finish(f"r{index}")
    for index in range(16):
        bench.host.add(f"s{index}", [2] * (index + 1), EVERY_COLUMN)
    bench.host.rewind("r70", 2)
    assert bench.writes() == (1, 1)


def test_lists_cost_two_uploads_more_in_the_step_in_which_one_changes() -> None:
    bench = Bench(4)
    bench.host.add("late", [1, 2, 3], Sampling(logit_bias={3: 1.0}))
    assert bench.writes() == (3, 1)
    bench.step()
    assert bench.writes() == (0, 0)


def test_a_step_with_an_arrival_costs_more_by_every_count() -> None:
    for measure, bound in ((Bench.torch_ops, MAX_TORCH_OPS), (Bench.calls, MAX_CALLS)):
        bench = Bench(4)
        bench.host.add("late", [1, 2, 3])
        assert measure(bench).total() > bound
        for _ in range(3):  # the staging buffers of the ring grow once to what the arrival took
            bench.step()
        assert measure(bench).total() <= bound
