"""What a request must return, whatever else happens to it: what it returns when it runs alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mrv2 import KVGroup, RunnerConfig, Sampling
from mrv2_compat.vllm_v1.step.translate_in import sampling_of
from mrv2_diff.models.hashlm import hashlm_tokens
from mrv2_diff.schedules.actions import Arrive, Setup
from mrv2_diff.schedules.params import sampling_params
from mrv2_diff.toy_host import Toy


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a request must return."""

    tokens: list[int]
    """Up to and with the token that ends it."""
    max_tokens: int
    """How many it may be asked for; 0 where nothing can be expected of it."""


class Expectations(Protocol):
    """Knows what requests return."""

    def outputs(self, prompt: Sequence[int], request: Arrive) -> Expected:
        """Return the output of a request.

        Args:
            prompt: Its prompt, which is longer than that of `request` in a session.
            request: What it asks for.
        """


class HashExpectations:
    """Solo outputs of HashLM on one setup.

    Plainly greedy ones come from `hashlm_tokens`, in plain Python; others from a runner with a
    single row, which does nothing but this.

    Args:
        setup: Gives the vocabulary, the windows and the longest request.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._solo: Toy | None = None
        self._num_solo = 0
        self._known: dict[tuple[tuple[int, ...], str, int], list[int]] = {}

    def outputs(self, prompt: Sequence[int], request: Arrive) -> Expected:
        """Return the output of a request."""
        sampling = sampling_of(sampling_params(request), 0, 0, self._setup.vocab_size)
        count = min(request.max_tokens, self._setup.max_model_len - len(prompt))
        key = (tuple(prompt), repr(sampling), count)
        if key not in self._known:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._run_alone(prompt, sampling, count)
        tokens = up_to(self._known[key], request.stop)
        return Expected(tokens=tokens, max_tokens=request.max_tokens)

    def _run_alone(self, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
        if replace(sampling, seed=0) == Sampling():
            return hashlm_tokens(prompt, count, self._setup.vocab_size, self._setup.windows)
        if self._solo is None:
            self._solo = _solo_runner(self._setup)
        self._num_solo += 1
        request = self._solo.host.add(f"solo {self._num_solo}", prompt, sampling)
        for _ in range(count):
            self._solo.run({request.req_id: request.num_left})
        self._solo.host.finish(request.req_id)
        self._solo.host.finished.clear()
        return request.outputs


def up_to(tokens: list[int], stop: int | None) -> list[int]:
    """Return tokens up to and with the first that ends a request."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


_MAX_KNOWN = 5000
"""Outputs that are kept, so that a soak's memory says something about the runner."""


def _solo_runner(setup: Setup) -> Toy:
    blocks = -(-setup.max_model_len // setup.block_size)
    group = KVGroup(block_size=setup.block_size, max_blocks=blocks)
    config = RunnerConfig(
        device=torch.device("cpu"),
        max_num_reqs=1,
        max_num_tokens=setup.max_model_len,
        max_model_len=setup.max_model_len,
        vocab_size=setup.vocab_size,
        kv_groups=(group,) * len(setup.windows),
    )
    return Toy(config, blocks, setup.windows)
