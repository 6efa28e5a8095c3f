"""Log probabilities of drawn tokens and of the likeliest ones."""

from mrv2_diff.case import Add, Case, Event
from mrv2_diff.catalog.prompts import ROOMY, prompt


def _greedy_logprobs() -> tuple[Event, ...]:
    counts = (0, 1, 5, 20, -1, None, 3)
    return tuple(
        Add(
            step=index,
            req_id=f"logprobs-{index}",
            prompt=prompt(400 + index, 10 + index),
            max_tokens=20,
            logprobs=count,
        )
        for index, count in enumerate(counts)
    )


def _random_logprobs() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=index,
            req_id=f"drawn-{index}",
            prompt=prompt(420 + index, 14),
            max_tokens=20,
            temperature=1.5 if index % 2 else 0.0,
            seed=index,
            logprobs=4,
        )
        for index in range(6)
    )


CASES = (
    Case(
        id="logprobs.counts",
        area="logprobs",
        feature="logprobs",
        title="0, n, all and no logprobs in one batch",
        engine=ROOMY,
        workload=_greedy_logprobs,
    ),
    Case(
        id="logprobs.of_random_draws",
        area="logprobs",
        feature="logprobs",
        title="Logprobs are those of the raw logits, whatever the temperature",
        engine=ROOMY,
        workload=_random_logprobs,
    ),
)
