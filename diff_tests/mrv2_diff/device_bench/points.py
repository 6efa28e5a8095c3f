"""What is measured: points, the requests of each, and when each arrives and leaves."""

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP = 8
"""Steps that are not measured, after the last prompt."""
_LOWEST_TOKEN, _TOKENS = 3, 200
"""Token ids of prompts: every vocabulary has these, and none is special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One kind of step.

    Raises:
        ValueError: A field is out of its bounds.
    """

    batch: int
    """Requests that run in each step."""
    temperature: float = 0.0
    context: int = 64
    """Tokens of each prompt."""
    churn: float = 0.0
    """Part of the batch that leaves in each step, and is replaced."""

    def __post_init__(self) -> None:
        """Refuse what no engine can run."""
        if self.batch < 1 or self.context < 1:
            raise ValueError(
                f"batch is {self.batch} and context {self.context}; choose at least 1 of each"
            )
        if not 0.0 <= self.churn <= 0.5:
            raise ValueError(f"churn is {self.churn}; choose a part of the batch from 0 to 0.5")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; choose 0 or more")

    @property
    def name(self) -> str:
        """Name of the point, for tables and keys."""
        sampling = f"t{self.temperature:g}" if self.temperature else "greedy"
        churn = f"-churn{100 * self.churn:g}%" if self.churn else ""
        return f"b{self.batch}-{sampling}-c{self.context}{churn}"

    @property
    def most_running(self) -> int:
        """Requests that an engine may hold at once.

        With async scheduling one that has ended is held for two steps more.
        """
        return self.batch + 2 * math.ceil(self.churn * self.batch)

    def values(self) -> dict[str, Any]:
        """Return the fields, to send to a child."""
        return asdict(self)

    def steps_to_decode(self, max_num_batched_tokens: int) -> int:
        """Return a bound on the steps that the prompts take."""
        return (
            math.ceil(self.batch * self.context / max(1, max_num_batched_tokens - self.batch)) + 2
        )

    def tokens_held(self, steps: int, max_num_batched_tokens: int) -> int:
        """Return a bound on a request's tokens in a block of so many measured steps."""
        return self.context + self.steps_to_decode(max_num_batched_tokens) + WARM_UP + steps + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a point."""

    step: int
    """Before which it arrives."""
    prompt: list[int]
    max_tokens: int
    """After which it leaves."""


def prompt(number: int, length: int) -> list[int]:
    """Return the prompt of a request, the same in every process."""
    return [_LOWEST_TOKEN + (place * 7 + number * 13) % _TOKENS for place in range(length)]


def arrivals(point: Point, steps: int) -> Iterator[Arrival]:
    """Yield the requests of a block of so many steps in all, in the order in which they arrive.

    Without churn all arrive at once and outlive the block. With churn requests leave in the order
    in which they came, and for each that leaves one arrives in the next step: all at once at the
    start, each with as many tokens as there are steps until its turn.
    """
    forever = steps + 1
    if not point.churn:
        for number in range(point.batch):
            yield Arrival(step=0, prompt=prompt(number, point.context), max_tokens=forever)
        return
    number, arrives = 0, 0
    while arrives < steps:
        leaves = _last_step(point, number)
        yield Arrival(
            step=arrives,
            prompt=prompt(number, point.context),
            max_tokens=leaves - arrives + 1,
        )
        number += 1
        arrives = 0 if number < point.batch else _last_step(point, number - point.batch) + 1


def _last_step(point: Point, number: int) -> int:
    """Return the last step of a request: by step s the first (s + 1) * batch * churn are gone."""
    return math.floor(number / (point.batch * point.churn) + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all wait from the start, for throughput and the time to the first token."""

    requests: int = 256
    low: int = 100
    high: int = 1024
    """Bounds of both prompts and outputs, in tokens; each length is uniform between them."""
    temperature: float = 0.6
    seed: int = 0

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt and output length of each request."""
        rng = random.Random(self.seed)
        return [
            (rng.randint(self.low, self.high), rng.randint(self.low, self.high))
            for _ in range(self.requests)
        ]

    def values(self) -> dict[str, Any]:
        """Return the fields, to send to a child."""
        return asdict(self)
