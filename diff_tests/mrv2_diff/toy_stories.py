"""Random lives of requests, from a seed, for `mrv2_diff.toy_host.Toy.play`."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mrv2 import RunnerConfig, Sampling
from mrv2_diff.parameters import PARAMETERS
from mrv2_diff.toy_host import ToyHost, ToyRequest


class RandomStory:
    """Requests arrive, are chunked, wait, share prefixes, are preempted, rewound and aborted.

    Args:
        seed: Of everything random here.
        config: Of the runner; its limits are kept to.
        most_temperature: Above 0, half of the requests draw at a random temperature up to this.
        sampling: Makes each request's parameters, in place of a temperature for half of them.
    """

    def __init__(
        self,
        seed: int,
        config: RunnerConfig,
        most_temperature: float = 0.0,
        sampling: Callable[[random.Random, RunnerConfig], Sampling] | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._config = config
        self._most_temperature = most_temperature
        self._sampling = sampling
        self._lengths: dict[ToyRequest, int] = {}
        self._num_added = 0

    def __call__(self, host: ToyHost, step: int) -> dict[str, int]:
        """Let things happen, and return the work of the step."""
        self._end_some(host)
        self._disturb_some(host)
        while len(host.requests) < self._config.max_num_reqs + 2 and self._random.random() < 0.4:
            self._add(host)
        return self._work(host)

    def _end_some(self, host: ToyHost) -> None:
        for request in list(host.requests.values()):
            done = len(request.outputs) >= self._lengths[request]
            if done or self._random.random() < 0.01:
                host.finish(request.req_id)
                if self._random.random() < 0.3:
                    self._add(host, request.req_id)

    def _disturb_some(self, host: ToyHost) -> None:
        for request in host.requests.values():
            if request.has_row and self._random.random() < 0.04:
                host.preempt(request.req_id)
            elif request.num_computed > 1 and self._random.random() < 0.03:
                host.rewind(request.req_id, self._random.randint(1, request.num_computed - 1))

    def _add(self, host: ToyHost, req_id: str | None = None) -> None:
        self._num_added += 1
        prompt = [self._random.randrange(self._config.vocab_size) for _ in range(self._length())]
        donors = [r for r in host.requests.values() if r.num_computed >= self._page]
        if donors and self._random.random() < 0.4:
            donor = self._random.choice(donors)
            known = [*donor.prompt, *donor.outputs][: donor.num_computed]
            known = known[: self._config.max_model_len // 2]
            shared = len(known) // self._page * self._page
            request = host.add(req_id or f"r{self._num_added}", known[:shared] + prompt)
            host.share(donor.req_id, request.req_id, shared)
        else:
            request = host.add(req_id or f"r{self._num_added}", prompt)
        if self._random.random() < 0.5 and self._most_temperature:
            request.sampling = Sampling(
                temperature=self._random.uniform(0.1, self._most_temperature),
                seed=self._random.getrandbits(64),
            )
        if self._sampling is not None:
            request.sampling = self._sampling(self._random, self._config)
            if request.num_computed:  # a prompt that is partly computed has no logprobs
                request.sampling = replace(request.sampling, num_prompt_logprobs=None)
        room = self._config.max_model_len - len(request.prompt)
        self._lengths[request] = min(self._random.randint(1, 20), room)

    @property
    def _page(self) -> int:
        return max(group.block_size for group in self._config.kv_groups)

    def _length(self) -> int:
        return self._random.randint(1, self._config.max_model_len // 4)

    def _work(self, host: ToyHost) -> dict[str, int]:
        waiting = [
            request
            for request in host.requests.values()
            if request.num_left
            and len(request.outputs) + request.num_in_flight < self._lengths[request]
        ]
        self._random.shuffle(waiting)
        rows = self._config.max_num_reqs - sum(r.has_row for r in host.requests.values())
        budget = self._config.max_num_tokens
        work: dict[str, int] = {}
        for request in waiting:
            if not budget or self._random.random() < 0.15 or (not request.has_row and not rows):
                continue
            rows -= not request.has_row
            chunk = self._random.choice((1, 3, request.num_left))
            work[request.req_id] = min(chunk, request.num_left, budget)
            budget -= work[request.req_id]
        return work


def mixed_sampling(rng: random.Random, config: RunnerConfig) -> Sampling:
    """Return parameters of which each asks for something one time in three."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(config.vocab_size), count))

    asked: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.5, 1.0, 1.4)),
        "seed": rng.getrandbits(64),
    }
    for row in sorted(PARAMETERS, key=lambda row: row.needs_markers):
        if row.story is None or (row.needs_markers and not config.thinking):
            continue
        value = row.story(rng, tokens)
        if not row.acts_alone or rng.random() < 0.33:
            asked[row.ours] = value
    return Sampling(**asked)
