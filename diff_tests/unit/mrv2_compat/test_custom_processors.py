"""Processors of V1's protocol inside the runner, with the toy host in vLLM's place."""

import importlib.metadata
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrv2 import (
    KVGroup,
    LogitsView,
    PendingOutput,
    ProtocolError,
    Runner,
    RunnerConfig,
    Sampling,
    StepPlan,
    generate_head,
    stages_with,
)
from mrv2_diff.toy_host import Toy
from mrv2_diff.toy_stories import RandomStory

pytestmark = pytest.mark.vllm

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=16), KVGroup(block_size=8, max_blocks=8)),
)
VOCAB = CONFIG.vocab_size


def chained(prompt: Sequence[int], outputs: Sequence[int]) -> int:
    """The token that a chained request must draw: it depends on all tokens before it."""
    last = outputs[-1] if outputs else 5
    return (sum(prompt) + 31 * len(outputs) + 7 * last) % VOCAB


def chain(prompt: Sequence[int], length: int) -> list[int]:
    outputs: list[int] = []
    for _ in range(length):
        outputs.append(chained(prompt, outputs))
    return outputs


def is_chained(req_id: str) -> bool:
    return req_id.endswith(("c", "1", "3", "5", "7", "9"))


class Probe:
    """What a test has its processors do, and what they saw."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.applied: list[int] = []
        self.made = 0
        self.fault: Callable[[str, Any], None] = lambda _when, _outputs: None
        """Called with "added" or "apply" and the prompt of each request; may raise."""


def dict_processor(probe: Probe, *, invariant: bool = False) -> Any:
    """Return a class in V1's protocol: it forces the token of each request that asks for it."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Chained(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: Any) -> None:
            self.batch: dict[int, tuple[list[int], list[int]]] = {}
            probe.made += 1

        def is_argmax_invariant(self) -> bool:
            return invariant

        def _added(self, params: Any, prompt: Any, outputs: Any) -> Any:
            probe.fault("added", prompt)
            wants = (params.extra_args or {}).get("chained")
            return (prompt, outputs) if wants else None

        def update_state(self, batch_update: Any) -> None:
            probe.updates.append(batch_update)
            process_dict_updates(self.batch, batch_update, self._added)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            assert logits.dtype == torch.float32
            probe.applied.append(len(logits))
            for index, (prompt, outputs) in self.batch.items():
                logits[index] += 1000.0  # a fault comes when something was changed already
                probe.fault("apply", prompt)
                logits[index, chained(prompt, outputs)] = 5000.0
            return logits

    return Chained


def adapter_processor(probe: Probe) -> Any:
    """The same over vLLM's adapter for processors that act on one request."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Chained(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            probe.updates.append(batch_update)
            super().update_state(batch_update)

        def new_req_logits_processor(self, params: Any) -> Any:
            wants = (params.extra_args or {}).get("chained")
            return self.force if wants else None

        def force(self, prompt: list[int], outputs: list[int], row: torch.Tensor) -> torch.Tensor:
            probe.fault("apply", prompt)
            forced = torch.full_like(row, -1.0)
            forced[chained(prompt, outputs)] = 1.0
            return forced

    return Chained


KINDS: dict[str, Callable[[Probe], Any]] = {
    "dictionary": dict_processor,
    "argmax invariant": lambda probe: dict_processor(probe, invariant=True),
    "adapter": adapter_processor,
}


class Guest:
    """A toy whose runner has custom processors; `is_chained` says which requests are."""

    def __init__(self, *kinds: Any) -> None:
        from mrv2_compat.vllm_v1.features.processors import CustomProcessors

        def make(kind: Any) -> Any:
            return kind(None, CONFIG.device, False)

        self.processors = CustomProcessors([make(kind) for kind in kinds], make)
        self.toy = Toy(CONFIG)
        stages = stages_with(self.processors.reshaping, self.processors.narrowing)
        self.toy.runner = Runner(
            CONFIG,
            self.toy.model,
            self.toy.model,
            head=generate_head(stages=stages),
            extensions=(lambda _: self.processors,),
        )
        self.failures: dict[str, str] = {}

    def plan(self, work: dict[str, int]) -> StepPlan:
        """The host's plan, with what the adapter tells processors of each request."""
        from vllm import SamplingParams

        plan = self.toy.host.plan(work)
        arrivals = tuple(
            replace(
                arrival,
                extras={
                    "custom_processors": SamplingParams(
                        extra_args={"chained": is_chained(arrival.req_id)}
                    )
                },
            )
            for arrival in plan.arrivals
        )
        return replace(plan, arrivals=arrivals)

    def step(
        self, work: dict[str, int], forced: Sequence[Sequence[int]] | None = None
    ) -> PendingOutput:
        core = self.toy.runner
        pending = core.sample(core.execute(self.plan(work)), forced)
        self.failures |= self.processors.last_failures
        assert pending.wait().extras["custom_processors"] == self.processors.last_failures
        return pending

    def run(self, work: dict[str, int]) -> None:
        self.toy.host.take(self.step(work).wait())

    def assert_right(self) -> int:
        """Check every token of every request, and return how many there are."""
        requests = [*self.toy.host.finished, *self.toy.host.requests.values()]
        for request, (_, greedy) in zip(requests, self.toy.expected(), strict=True):
            own = chain(request.prompt, len(request.outputs))
            assert request.outputs == (own if is_chained(request.req_id) else greedy)
        return sum(len(request.outputs) for request in requests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "lag"), [(1, 0), (3, 2)])
def test_processors_follow_random_lives(kind: str, seed: int, lag: int) -> None:
    probe = Probe()
    guest = Guest(KINDS[kind](probe))
    story, host = RandomStory(seed, CONFIG), guest.toy.host
    pending: deque[PendingOutput] = deque()
    for number in range(120):
        work = story(host, number)
        if work:
            pending.append(guest.step(work))
        else:
            guest.toy.runner.update_rows(guest.plan(work))
        while len(pending) > lag:
            host.take(pending.popleft().wait())
    while pending:
        host.take(pending.popleft().wait())
    assert guest.assert_right() > 200
    assert sum(request.num_preemptions for request in host.finished) > 2
    assert any(update is not None and update.moved for update in probe.updates)
    assert guest.failures == {}


def test_processors_are_told_once_a_step_and_of_changes_only() -> None:
    probe, other = Probe(), Probe()
    guest = Guest(dict_processor(probe), dict_processor(other, invariant=True))
    guest.toy.host.add("c", [1, 2, 3])
    guest.toy.host.add("b", [4, 5])
    guest.run({"c": 3, "b": 1})  # b is in the middle of its prompt
    guest.run({"c": 1, "b": 1})
    guest.run({"c": 1, "b": 1})
    guest.run({"b": 1})
    guest.run({"b": 1, "c": 1})
    for told in (probe.updates, other.updates):
        assert [None if u is None else (u.batch_size, len(u.added)) for u in told] == [
            (1, 1),
            (2, 1),
            None,
            (1, 0),
            (2, 1),
        ]
    assert probe.applied == other.applied == [1, 2, 2, 1, 2]
    assert guest.assert_right() == 8


def test_a_step_that_draws_nothing_tells_nothing() -> None:
    probe = Probe()
    guest = Guest(dict_processor(probe))
    guest.toy.host.add("c", [1, 2, 3])
    guest.run({"c": 2})
    assert probe.updates == []
    guest.run({"c": 1})
    assert guest.assert_right() == 1


def test_outputs_are_the_forced_tokens_where_tokens_are_forced() -> None:
    guest = Guest(dict_processor(Probe()))
    guest.toy.host.add("c", [1, 2, 3])
    guest.step({"c": 3}, forced=[[50]])
    drawn = guest.step({"c": 1}, forced=[[51]]).wait().token_ids
    assert drawn == [[chained([1, 2, 3], [50])]]
    assert guest.step({"c": 1}).wait().token_ids == [[chained([1, 2, 3], [50, 51])]]


def test_a_processor_that_keeps_the_likeliest_token_acts_after_temperature() -> None:
    seen = []

    class Looks(dict_processor(Probe(), invariant=True)):  # type: ignore[misc]
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits.clone())
            return logits

    guest = Guest(Looks)
    guest.toy.host.add("b", [1, 2, 3], Sampling(temperature=2.0, seed=1))
    guest.toy.host.add("z", [1, 2, 3])
    guest.run({"b": 3, "z": 3})
    assert torch.equal(seen[0][0] * 2.0, seen[0][1])


def test_a_result_that_is_another_tensor_counts() -> None:
    class Copies(dict_processor(Probe())):  # type: ignore[misc]
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            rewritten: torch.Tensor = super().apply(logits.clone())
            return rewritten

    guest = Guest(Copies)
    guest.toy.host.add("c", [1, 2, 3])
    guest.run({"c": 3})
    assert guest.assert_right() == 1


# Processors that raise.


def raising(when: str, prompt: Sequence[int], *, once: bool = False) -> Callable[[str, Any], None]:
    """Return a fault of the request with this prompt."""
    count = 0

    def fault(now: str, seen: Any) -> None:
        nonlocal count
        if now == when and list(seen) == list(prompt) and not (once and count):
            count += 1
            raise KeyError("a bug of somebody's")

    return fault


@pytest.mark.parametrize("when", ["added", "apply"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_that_raises_fails_its_request_and_no_other(kind: str, when: str) -> None:
    probe, beside = Probe(), Probe()
    guest = Guest(KINDS[kind](probe), dict_processor(beside))
    host = guest.toy.host
    for name, prompt in (("1c", [1, 2, 3]), ("2c", [4, 5]), ("b", [6, 7, 8])):
        host.add(name, prompt)
    guest.run({"1c": 3, "b": 3})
    if kind == "adapter" and when == "added":
        when = "apply"
    probe.fault = raising(when, [4, 5])
    guest.run({"1c": 1, "2c": 2, "b": 1})
    assert list(guest.failures) == ["2c"]
    assert 'Chained raised KeyError: "a bug of somebody\'s"' in guest.failures["2c"]
    guest.run({"b": 1, "2c": 1, "1c": 1})  # it may still be in the step that was planned ahead
    host.finish("2c")
    guest.run({"1c": 1, "b": 1})
    host.finished.clear()
    assert guest.assert_right() == 8
    assert list(guest.failures) == ["2c"]


def test_every_request_that_a_processor_fails_for_is_found() -> None:
    probe = Probe()
    guest = Guest(dict_processor(probe))
    for number in range(1, 5):
        guest.toy.host.add(f"{number}c", [number, 2])
    first, second = raising("apply", [1, 2]), raising("apply", [3, 2])
    probe.fault = lambda when, prompt: (first(when, prompt), second(when, prompt))[0]
    guest.run({f"{number}c": 2 for number in range(1, 5)})
    assert sorted(guest.failures) == ["1c", "3c"]
    guest.toy.host.finish("1c")
    guest.toy.host.finish("3c")
    guest.run({"4c": 1, "2c": 1})
    guest.toy.host.finished.clear()
    assert guest.assert_right() == 4


def test_a_fault_that_does_not_come_again_fails_nobody_and_is_made_good() -> None:
    probe = Probe()
    guest = Guest(dict_processor(probe))
    guest.toy.host.add("1c", [1, 2])
    guest.toy.host.add("b", [3, 4])
    probe.fault = raising("apply", [1, 2], once=True)
    guest.run({"1c": 2, "b": 2})
    guest.run({"b": 1, "1c": 1})
    assert guest.failures == {}
    assert probe.made > 1
    assert guest.assert_right() == 4


def test_a_processor_that_works_for_each_alone_and_not_for_all_fails_all_that_draw() -> None:
    class Crowded(dict_processor(Probe())):  # type: ignore[misc]
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            if len(logits) > 1:
                raise RuntimeError("crowded")
            rewritten: torch.Tensor = super().apply(logits)
            return rewritten

    guest = Guest(Crowded)
    guest.toy.host.add("1c", [1, 2])
    guest.toy.host.add("2c", [3, 4])
    guest.toy.host.add("3c", [5, 6])
    guest.run({"1c": 2, "2c": 2, "3c": 1})
    assert sorted(guest.failures) == ["1c", "2c"]
    guest.toy.host.finish("1c")
    guest.toy.host.finish("2c")
    guest.run({"3c": 1})
    guest.toy.host.finished.clear()
    assert guest.assert_right() == 1


def test_a_result_of_another_shape_is_the_processors_fault() -> None:
    class Cuts(dict_processor(Probe())):  # type: ignore[misc]
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits[:, :3]

    guest = Guest(Cuts)
    guest.toy.host.add("1c", [1, 2])
    guest.run({"1c": 2})
    assert "apply returned (1, 3) for logits of shape (1, 97)" in guest.failures["1c"]


def test_a_request_without_its_parameters_is_refused_before_anything_changes() -> None:
    guest = Guest(dict_processor(Probe()))
    guest.toy.host.add("c", [1, 2, 3])
    with pytest.raises(ProtocolError, match="'c' arrives without its SamplingParams"):
        guest.toy.runner.execute(guest.toy.host.plan({"c": 3}))
    assert "c" not in guest.toy.runner.rows


def test_several_logits_of_one_request_are_refused() -> None:
    guest = Guest(dict_processor(Probe()))
    guest.toy.host.add("1c", [1, 2])
    guest.run({"1c": 2})
    rows = np.zeros(2, dtype=np.int32)
    view = LogitsView(
        logit_rows=torch.zeros(2, dtype=torch.int32),
        positions=torch.tensor([3, 4]),
        rows_np=rows,
    )
    with pytest.raises(ProtocolError, match="several logits in one step"):
        guest.processors.apply([], torch.zeros(2, VOCAB), view)


# What is loaded.


def loaded(named: object, installed: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    from mrv2_compat.vllm_v1.features.processors import load_custom_processors

    def entry_points(group: str) -> list[Any]:
        assert group == "vllm.logits_processors"
        return [
            SimpleNamespace(name="n", value="v", load=lambda kind=kind: kind) for kind in installed
        ]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=named),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        speculative_config=None,
    )
    return load_custom_processors(config, CONFIG.device)


def test_without_processors_of_others_there_is_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(None, [], monkeypatch) is None
    assert loaded([], [], monkeypatch) is None


def test_installed_and_named_processors_become_one_stage_for_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Probe()
    reshapes, narrows = dict_processor(probe), dict_processor(probe, invariant=True)
    both = loaded([narrows], [reshapes], monkeypatch)
    assert (len(both.reshaping), len(both.narrowing)) == (1, 1)
    assert probe.made == 2
    named = f"{__name__}:NAMED"
    monkeypatch.setattr(sys.modules[__name__], "NAMED", narrows, raising=False)
    one = loaded([named], [], monkeypatch)
    assert (len(one.reshaping), len(one.narrowing)) == (0, 1)


def test_a_processor_that_cannot_be_loaded_is_vllms_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="Failed to load 0th LogitsProcessor"):
        loaded(["no_such_module:Kind"], [], monkeypatch)
    with pytest.raises(ValueError, match="is not a subclass of LogitsProcessor"):
        loaded([int], [], monkeypatch)
