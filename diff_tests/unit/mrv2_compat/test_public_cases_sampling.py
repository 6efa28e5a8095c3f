"""What goes wrong with sampling in runners of this kind, where vLLM's parameters come in.

What needs a feature that is refused is a test of the refusal, counted apart.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from mrv2 import Sampling
from mrv2_compat.vllm_v1.requests import refusals
from mrv2_compat.vllm_v1.step.ledger import KnownRequest, RequestLedger

pytestmark = pytest.mark.vllm

VOCAB = 100
EOS = 3

REFUSED: dict[str, tuple[str, object]] = {
    "noise of a draft and of its verification": ("speculative_config", object()),
    "residual probabilities of rejected drafts": ("speculative_config", object()),
    "acceptance of drafts that min-p or a bias forbids": ("speculative_config", object()),
    "prompt logprobs beside a drafter's graph": ("speculative_config", object()),
    "prompt logprobs through an adapter of the head": ("lora_config", object()),
    "scores of pooling models": ("model_config.runner_type", "pooling"),
    "seeds of several ranks": ("parallel_config.tensor_parallel_size", 2),
}
"""What was reported, and the setting without which it cannot be asked for."""


def sampling_of(params: Any, arrival_number: int = 0, engine_seed: int = 7) -> Sampling:
    from mrv2_compat.vllm_v1.step import translate_in

    return translate_in.sampling_of(params, engine_seed, arrival_number, VOCAB)


class Worker:
    """What a rank keeps of the requests that every rank is told of in the same order."""

    def __init__(self) -> None:
        self.ledger = RequestLedger()

    def announce(self, req_id: str, params: Any) -> int:
        """Take a request; return the seed of its noise."""
        sampling = sampling_of(params, self.ledger.num_announced)
        self.ledger.announce(req_id, KnownRequest(prompt_len=1, sampling=sampling))
        return sampling.seed


def test_workers_give_requests_without_a_seed_the_same_ones() -> None:
    from vllm import SamplingParams

    def seeds(worker: Worker) -> list[int]:
        found = []
        for index in range(20):
            params = SamplingParams(temperature=1.0, seed=5 if index % 4 == 3 else None)
            worker.ledger.begin_step()
            found.append(worker.announce(f"r{index}", params))
            if index % 3 == 2:
                worker.ledger.forget(f"r{index - 1}")
        return found

    first, second = seeds(Worker()), seeds(Worker())
    assert first == second
    assert {*first[3::4]} == {5}
    assert len({*first}) == 16, "15 of their own, and 5"


def test_a_step_that_is_taken_back_shifts_no_seed() -> None:
    from vllm import SamplingParams

    worker, other = Worker(), Worker()
    worker.ledger.begin_step()
    refused = worker.announce("a", SamplingParams(temperature=1.0))
    worker.ledger.take_back_step()
    worker.ledger.begin_step()
    assert worker.announce("b", SamplingParams(temperature=1.0)) == refused
    assert other.announce("b", SamplingParams(temperature=1.0)) == refused


def test_a_seed_is_the_same_in_every_process() -> None:
    # Values that were worked out in another process: no hash that is salted by the process is in.
    from vllm import SamplingParams

    seeds = [sampling_of(SamplingParams(temperature=1.0), number).seed for number in range(3)]
    assert seeds == [16403258703644632223, 2174948161648732372, 12112147548605771095]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("asked", "config", "held"),
    [
        ({}, {}, (EOS,)),
        ({"stop_token_ids": [7]}, {}, (EOS, 7)),
        ({}, {"eos_token_id": [EOS, 9]}, (EOS, 9)),
        ({"stop_token_ids": [7]}, {"eos_token_id": 9}, (EOS, 7, 9)),
    ],
    ids=str,
)
def test_the_models_end_and_the_users_stops_are_all_held_back(
    asked: dict[str, Any], config: dict[str, Any], held: tuple[int, ...], ignore_eos: bool
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(min_tokens=4, ignore_eos=ignore_eos, **asked)
    params.update_from_generation_config(config, EOS)
    sampling = sampling_of(params)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (4, held)


@pytest.mark.parametrize("report", REFUSED)
def test_what_needs_a_feature_that_is_not_there_is_refused_by_name(report: str) -> None:
    from mrv2_diff.schedules.actions import Setup
    from mrv2_diff.schedules.driver import Driver

    path, value = REFUSED[report]
    served = Driver(Setup()).engine.scheduler.vllm_config
    assert refusals.config_refusals(served) == []
    (refusal,) = refusals.config_refusals(_with(served, path.split("."), value))
    assert f"{path.rpartition('.')[2]}=" in refusal.value
    assert refusal.remedy


def _with(config: Any, path: list[str], value: object) -> Any:
    """Return a view of a configuration in which one value is another."""
    name, *rest = path
    inner = _with(getattr(config, name), rest, value) if rest else value

    class View(SimpleNamespace):
        def __getattr__(self, other: str) -> Any:
            return getattr(config, other)

    return View(**{name: inner})
