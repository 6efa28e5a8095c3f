"""On a real engine: what is planted into the candidate goes over its budget, and is named."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mrv2_diff import process

process.prepare()  # vLLM reads the environment when it is imported

# E402: as above.
from mrv2.sampling.temperature import Temperature  # noqa: E402
from mrv2_diff.case import Add, Budget, Case, EngineSpec, Event  # noqa: E402
from mrv2_diff.catalog.prompts import TINY, prompt  # noqa: E402
from mrv2_diff.compare.tally import Tally  # noqa: E402
from mrv2_diff.judge import Outcome  # noqa: E402
from mrv2_diff.lockstep.engine import LockstepEngine, engine  # noqa: E402
from mrv2_diff.measuring import MemoryPasses, measure_latency  # noqa: E402
from mrv2_diff.models.checkpoint import cached_model  # noqa: E402
from mrv2_diff.record import Cost  # noqa: E402
from mrv2_diff.verdict import Verdict  # noqa: E402

pytestmark = pytest.mark.vllm

MEBIBYTE = 1 << 20
STEPS = 56
"""Of a pass for time; for memory a quarter is enough."""
SPEC = EngineSpec(model=TINY, max_num_seqs=4)
ROOM = Budget(memory=1.5, latency=3.0)
"""What is planted is far beyond it, and what else happens on a machine far within."""


def _events(steps: int) -> tuple[Event, ...]:
    return tuple(
        Add(step=0, req_id=f"r{index}", prompt=prompt(index, 12), max_tokens=steps,
            temperature=0.5 * index, seed=index)
        for index in range(3)
    )  # fmt: skip


def _case(steps: int) -> Case:
    return Case(
        id="a.b",
        area="a",
        feature="f",
        title="t",
        engine=SPEC,
        workload=lambda: _events(steps),
        budget=ROOM,
    )


@pytest.fixture(scope="module")
def started() -> Iterator[LockstepEngine]:
    with engine(SPEC, cached_model(SPEC.model)) as running:
        yield running


@pytest.fixture(scope="module")
def passes(started: LockstepEngine) -> MemoryPasses:
    return MemoryPasses(started, "mrv2")


def _memory(passes: MemoryPasses) -> tuple[Cost, Outcome]:
    outcome = Outcome(Tally(None), modes=["forced"], steps=STEPS // 4)
    passes.measure(_case(STEPS // 4), outcome)
    (cost,) = outcome.costs
    return cost, outcome


def _time(started: LockstepEngine, candidate: str = "mrv2") -> Cost:
    outcome = Outcome(Tally(None))
    measure_latency(started, _case(STEPS), candidate, outcome)
    (cost,) = outcome.costs
    return cost


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let a stage of the candidate's sampler do something more."""

    def planted(more: Callable[[], object]) -> None:
        narrow = Temperature.narrow

        def narrow_and_more(stage: Temperature, *arguments: Any) -> None:
            more()
            narrow(stage, *arguments)

        monkeypatch.setattr(Temperature, "narrow", narrow_and_more)

    return planted


Plant = Callable[[Callable[[], object]], None]


def test_without_a_fault_each_phase_is_measured_and_within(passes: MemoryPasses) -> None:
    cost, outcome = _memory(passes)
    assert cost.verdict is Verdict.MATCH, cost.summary
    for memory in outcome.memory.values():
        assert set(memory.phases) == {"weights", "profile", "kv", "execute", "sample"}
        assert all(peak.held_by for peak in memory.phases.values())


def test_memory_for_a_moment_is_named(passes: MemoryPasses, plant: Plant) -> None:
    plant(lambda: torch.zeros(8 * MEBIBYTE, dtype=torch.uint8))
    cost, _ = _memory(passes)
    assert cost.verdict is Verdict.OVER_BUDGET
    assert (cost.phase, cost.op) == ("sample", "aten::zeros in test_costs.py: <lambda>")


def test_memory_that_is_never_given_back_is_named(passes: MemoryPasses, plant: Plant) -> None:
    leaked: list[torch.Tensor] = []

    def leak() -> None:
        leaked.append(torch.ones(MEBIBYTE // 2, dtype=torch.uint8))

    plant(leak)
    cost, _ = _memory(passes)
    assert cost.verdict is Verdict.OVER_BUDGET
    assert cost.op == "aten::ones in test_costs.py: leak"


def test_memory_of_the_start_is_named(
    started: LockstepEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mrv2_compat.vllm_v1.runner import VllmRunner

    initialize = VllmRunner.initialize_kv_cache

    def initialize_and_more(runner: Any, *arguments: Any, **named: Any) -> None:
        runner.more = torch.zeros(64 * MEBIBYTE, dtype=torch.uint8)
        initialize(runner, *arguments, **named)

    monkeypatch.setattr(VllmRunner, "initialize_kv_cache", initialize_and_more)
    cost, _ = _memory(MemoryPasses(started, "mrv2"))
    assert cost.verdict is Verdict.OVER_BUDGET
    assert (cost.phase, cost.op) == ("kv", "aten::zeros in test_costs.py: initialize_and_more")


def test_a_start_that_fails_is_told_and_the_steps_are_judged(
    started: LockstepEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mrv2_compat.vllm_v1.runner import VllmRunner

    def no_room(runner: Any, *arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(VllmRunner, "profile_run", no_room)
    cost, outcome = _memory(MemoryPasses(started, "mrv2"))
    assert cost.verdict is Verdict.MATCH
    assert "the start was not measured (OutOfMemoryError: no room)" in cost.summary
    assert set(outcome.memory["mrv2"].phases) == {"execute", "sample"}


def test_a_sleep_is_over_and_its_phase_is_named(started: LockstepEngine, plant: Plant) -> None:
    """Ten times what a step of either runner takes on a core of its own."""
    plant(lambda: time.sleep(0.03))
    cost = _time(started)
    assert cost.verdict is Verdict.OVER_BUDGET, cost.summary
    assert cost.phase == "sample"
    assert cost.low is not None
    assert cost.low > ROOM.latency


def test_v1_beside_itself_is_never_over(started: LockstepEngine) -> None:
    cost = _time(started, "v1")
    assert cost.verdict in (Verdict.MATCH, Verdict.INCONCLUSIVE), cost.summary
    assert cost.samples >= 10
