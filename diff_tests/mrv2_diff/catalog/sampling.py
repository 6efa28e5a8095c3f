"""Random draws. Tokens of two runners are not comparable; the logits that they draw from are."""

from mrv2_diff.case import Add, Case, Event
from mrv2_diff.catalog.prompts import ROOMY, prompt

LEAST = 0.01
"""vLLM raises a temperature between 0 and this one to it, before either runner is told."""


def _seeded() -> tuple[Event, ...]:
    temperatures = (0.3, 0.7, 1.0, 1.3, 1.7, 2.0)
    return tuple(
        Add(
            step=index,
            req_id=f"seeded-{index}",
            prompt=prompt(300 + index, 9 + 3 * index),
            max_tokens=24,
            temperature=temperature,
            seed=1000 + index,
        )
        for index, temperature in enumerate(temperatures)
    )


def _beside_greedy() -> tuple[Event, ...]:
    temperatures = (0.0, 0.8, 0.0, LEAST, 1.1, 0.0, 0.05, 1.0)
    return tuple(
        Add(
            step=2 * index,
            req_id=f"beside-{index}",
            prompt=prompt(320 + index, 12),
            max_tokens=20,
            temperature=temperature,
            seed=None if index % 2 else 7,
        )
        for index, temperature in enumerate(temperatures)
    )


CASES = (
    Case(
        id="sampling.temperature_seeded",
        area="sampling",
        feature="temperature with seed",
        title="Temperatures from 0.3 to 2 (vLLM's largest), each with a seed",
        engine=ROOMY,
        workload=_seeded,
    ),
    Case(
        id="sampling.temperature_beside_greedy",
        area="sampling",
        feature="temperature with seed",
        title="Random and greedy requests in one batch, down to 0.01, vLLM's least above 0",
        engine=ROOMY,
        workload=_beside_greedy,
    ),
)
