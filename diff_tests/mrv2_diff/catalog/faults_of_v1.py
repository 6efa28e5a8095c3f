"""What V1 does wrong on vLLM's CPU worker, each shown against a right value."""

from dataclasses import replace

from mrv2_diff.case import Add, Apart, Case, Event, Variant
from mrv2_diff.catalog.prompts import CHUNKED, ROOMY, prompt


def _seeded_chunks() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=0,
            req_id=f"seeded-chunks-{index}",
            prompt=prompt(700 + index, length),
            max_tokens=24,
            temperature=1.0 if index % 3 else 0.0,
            seed=40 + index,
        )
        for index, length in enumerate((60, 97, 150, 30, 48, 49))
    )


def _drafts() -> tuple[Event, ...]:
    """Greedy requests with prompts so long that most tokens occur in them, beside random ones.

    A draft is what followed the last token where it occurred before.
    """
    return tuple(
        Add(
            step=0,
            req_id=f"drafts-{index}",
            prompt=prompt(720 + index, 180),
            max_tokens=24,
            temperature=float(index % 2),
            seed=5 if index % 2 else None,
        )
        for index in range(6)
    )


CASES = (
    Case(
        id="sampling.seeded_chunks",
        area="sampling",
        feature="temperature with seed",
        title="Seeded requests whose prompts are cut into chunks",
        engine=CHUNKED,
        workload=_seeded_chunks,
        apart=Apart(
            reference=Variant(runner="v1"),
            candidate=Variant(runner="mrv2"),
            right=Variant(runner="mrv2", engine=(("max_num_batched_tokens", 1024),)),
            raises="Generator does not use offset",
            why="mrv2 draws what it draws from whole prompts",
            on=frozenset({"cpu"}),
            elsewhere="generators have offsets, and V1 runs chunks of seeded prompts",
        ),
    ),
    Case(
        id="sampling.beside_drafts",
        area="sampling",
        feature="greedy",
        title="V1 with n-gram drafts, greedy beside random requests, against V1 without drafts",
        engine=replace(ROOMY, max_num_batched_tokens=2048),
        workload=_drafts,
        apart=Apart(
            reference=Variant(
                runner="v1",
                engine=(
                    (
                        "speculative_config",
                        (
                            ("method", "ngram"),
                            ("num_speculative_tokens", 2),
                            ("prompt_lookup_min", 1),
                            ("prompt_lookup_max", 3),
                        ),
                    ),
                ),
            ),
            candidate=Variant(runner="mrv2"),
            right=Variant(runner="v1"),
            why="V1's drafts change greedy tokens; mrv2 refuses drafts and gives V1's without them",
            on=frozenset({"cpu"}),
            elsewhere="V1's kernels verify drafts otherwise; without drafts on both sides",
        ),
    ),
)
