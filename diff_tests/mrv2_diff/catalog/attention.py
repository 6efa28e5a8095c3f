"""Kinds of attention."""

from dataclasses import replace

from mrv2_diff.case import Add, Case, EngineSpec, Event
from mrv2_diff.catalog.prompts import prompt
from mrv2_diff.models.spec import ModelSpec

_SLIDING = EngineSpec(model=ModelSpec(sliding_window=40))
_ALTERNATING = EngineSpec(
    model=ModelSpec(sliding_window=40, sliding_layers="alternate"),
    num_blocks=60,
    prefix_caching=True,
)


def _across_the_window() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=2 * index,
            req_id=f"window-{index}",
            prompt=prompt(500 + index, 20 + 17 * index),
            max_tokens=60,
        )
        for index in range(8)
    )


CASES = (
    Case(
        id="attention.sliding_window",
        area="attention",
        feature="sliding window",
        title="A window of 40 tokens in every layer, sequences up to 200",
        engine=_SLIDING,
        workload=_across_the_window,
    ),
    Case(
        id="attention.alternating_window",
        area="attention",
        feature="sliding window",
        title="Full and sliding layers in two KV groups, with prefix caching",
        engine=_ALTERNATING,
        workload=_across_the_window,
    ),
    Case(
        id="attention.alternating_window_tight",
        area="attention",
        feature="sliding window",
        title="Two KV groups on few blocks, prompts in chunks",
        engine=replace(
            _ALTERNATING, num_blocks=24, max_num_batched_tokens=48, prefix_caching=False
        ),
        workload=_across_the_window,
        expects=frozenset({"preemptions", "chunks"}),
    ),
)
