"""Cases in which nothing is wrong: requests drawn at random, to run a runner beside itself.

The other one is given the steps in another form (another order, other neighbours, other chunks), so
every request is computed with other matrix shapes, and nothing but rounding may differ. What is
asked for is drawn so that it shows in any request that asks: a parameter that could change nothing
would be a case that proves nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mrv2_diff.case import Add, Case, EngineSpec, Event
from mrv2_diff.catalog.prompts import CACHED, CHUNKED, ROOMY, prompt
from mrv2_diff.kinds import Options
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.parameters import alike_of

NUM_REQUESTS = (4, 7)
MAX_TOKENS = (4, 12)
_VOCAB = 256
"""Of prompts; the tokens of bytes."""

_MASKS, _PENALTIES, _CUTS = alike_of("masks"), alike_of("penalties"), alike_of("cuts")

_TIGHT = replace(CHUNKED, max_model_len=128, num_blocks=6)
"""5 usable blocks: requests are preempted and resumed."""
_TWO_GROUPS = EngineSpec(
    model=ModelSpec(sliding_window=40, sliding_layers="alternate"), num_blocks=60
)

ENGINES: dict[str, EngineSpec] = {
    "roomy": ROOMY,
    "chunked": CHUNKED,
    "tight": _TIGHT,
    "cached": CACHED,
    "two KV groups": _TWO_GROUPS,
}
"""Whole prompts, chunks, preemptions, cached prefixes, two KV groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """One case, to be run under a schedule of its own."""

    number: int
    seed: int

    @property
    def engine(self) -> str:
        """Name of its engine."""
        return list(ENGINES)[self.number % len(ENGINES)]

    def case(self) -> Case:
        """Return the case."""
        name = self.engine
        events = _workload(random.Random(f"{self.seed}/{self.number}"), name)
        return Case(
            id=f"alike.{self.seed}.{self.number}",
            area="alike",
            feature=name,
            title=f"Requests drawn from seed {self.seed}, number {self.number}",
            engine=ENGINES[name],
            workload=lambda: events,
        )

    @property
    def schedule_seed(self) -> int:
        """Seed of the other schedule."""
        return random.Random(f"schedule {self.seed}/{self.number}").getrandbits(32)


def alike(count: int, seed: int) -> list[Alike]:
    """Return so many cases."""
    return [Alike(number=number, seed=seed) for number in range(count)]


def _workload(source: random.Random, engine: str) -> tuple[Event, ...]:
    shared = prompt(source.randrange(1000), 64)
    events = [
        _request(source, index, shared if engine == "cached" else ())
        for index in range(source.randint(*NUM_REQUESTS))
    ]
    return tuple(sorted(events, key=lambda event: event.step))


def _request(source: random.Random, index: int, shared: tuple[int, ...]) -> Add:
    temperature = source.choice((0.0, 0.0, 0.0, 0.7, 1.0, 1.6))
    own = tuple(source.randrange(_VOCAB) for _ in range(source.randint(2, 90 - len(shared))))
    options: Options = ()
    if temperature:  # what is cut would hide what else was asked for
        options += _one_of(source, source.choice((_MASKS, _PENALTIES, _CUTS, _CUTS)), 0.7)
    else:
        options += _one_of(source, _MASKS, 0.4) + _one_of(source, _PENALTIES, 0.4)
    if source.random() < 0.15:
        options += (("prompt_logprobs", source.choice((0, 1, 4))),)
    return Add(
        step=source.randrange(5),
        req_id=f"alike-{index}",
        prompt=shared[: source.randint(0, len(shared))] + own,
        max_tokens=source.randint(*MAX_TOKENS),
        temperature=temperature,
        logprobs=source.choice((None, None, 0, 3)),
        options=options,
    )


def _one_of(source: random.Random, kinds: Sequence[Options], share: float) -> Options:
    return source.choice(kinds) if source.random() < share else ()
