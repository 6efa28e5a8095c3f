"""Workloads that sampling cases share: requests with a parameter beside requests without it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mrv2_diff.case import Add, EngineSpec, Event
from mrv2_diff.catalog.prompts import TINY, prompt
from mrv2_diff.kinds import Kind

ROOMY = EngineSpec(
    model=TINY,
    max_num_seqs=24,
    num_blocks=200,
    max_num_batched_tokens=512,
    tokenizer=True,
    reasoning=("{", "}."),
)
"""Enough blocks that nothing is preempted, and enough tokens in a step that no prompt is cut."""
START = 90
"""Token of `{`, which opens a thinking section."""
END = (92, 13)
"""Tokens of the marker that closes one."""

STRAINED = replace(ROOMY, num_blocks=17, max_num_seqs=10, max_num_batched_tokens=48)
"""16 usable blocks for requests of up to 5 each, and a budget below most prompts: requests are cut
into chunks, preempted and resumed. None may have a seed: V1 on a CPU fails on a seeded request
whose prompt is cut."""

_OTHERS = (Kind(), Kind(temperature=0.9))
"""Requests that use nothing, one greedy and one random."""


def beside_others(
    name: str, first_prompt: int, users: Sequence[Kind]
) -> Callable[[], tuple[Event, ...]]:
    """Return a workload of requests that use a parameter, each followed by one that does not.

    Args:
        name: Begins the requests' ids.
        first_prompt: Number of the first prompt.
        users: What the users ask for.
    """

    def workload() -> tuple[Event, ...]:
        kinds = [kind for index, user in enumerate(users) for kind in (user, _OTHERS[index % 2])]
        return tuple(
            Add(
                step=index // 2,
                req_id=f"{name}-{index}",
                prompt=prompt(first_prompt + index, 20 + 17 * (index % 5)),
                max_tokens=kind.max_tokens,
                temperature=kind.temperature,
                logprobs=kind.logprobs,
                options=kind.options,
            )
            for index, kind in enumerate(kinds)
        )

    return workload
