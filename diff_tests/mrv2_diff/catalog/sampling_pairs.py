"""Parameters together: every pair of values of any two of them in some request."""

import random
from collections.abc import Sequence
from dataclasses import replace

from mrv2_diff.case import Add, Case, Departure, Event
from mrv2_diff.catalog.prompts import prompt
from mrv2_diff.catalog.workloads import ROOMY, START, STRAINED
from mrv2_diff.pairwise import all_pairs
from mrv2_diff.parameters import PARAMETERS
from mrv2_diff.verdict import Verdict

FACTORS: dict[str, tuple[object, ...]] = {
    row.name: (row.neutral, *row.paired) for row in PARAMETERS if row.paired
}
"""Values by parameter, the neutral one first."""

ROWS = all_pairs(FACTORS)
RESUMED = {name: values for name, values in FACTORS.items() if name != "thinking_token_budget"}
"""V1 forces other tokens once a request with a thinking budget was resumed; a case shows that."""


def _options(row: dict[str, object]) -> tuple[tuple[str, object], ...]:
    fields = ("temperature", "logprobs")
    return tuple(
        (name, value)
        for name, value in row.items()
        if name not in fields and value not in ((), None)
    )


def _pairs(
    rows: Sequence[dict[str, object]], first_prompt: int, max_tokens: int
) -> tuple[Event, ...]:
    """Return a request for each row, some of them in the middle of a thinking section."""
    source = random.Random(first_prompt)
    events = []
    for index, row in enumerate(rows):
        temperature, logprobs = row["temperature"], row["logprobs"]
        assert isinstance(temperature, float)
        assert logprobs is None or isinstance(logprobs, int)
        thinking = (START,) if index % 3 else ()
        begin = prompt(first_prompt + index, source.randrange(8, 90))
        events.append(
            Add(
                step=index // 3,
                req_id=f"pairs-{first_prompt}-{index}",
                prompt=(*begin, *thinking, *prompt(first_prompt + 500 + index, index % 4)),
                max_tokens=max_tokens,
                temperature=temperature,
                logprobs=logprobs,
                options=_options(row),
            )
        )
    return tuple(events)


_CUT_ON_CUDA = Departure(
    value="processed_logits",
    verdict=Verdict.REFERENCE_WRONG,
    why="its kernel for top-k with top-p keeps tokens beyond the k-th where logits lie 200 apart",
    on=frozenset({"cuda"}),
    elsewhere="V1 sorts, and cuts where mrv2 does",
)

CASES = (
    Case(
        id="sampling.pairs",
        area="sampling",
        feature="parameters together",
        title="Every pair of values of any two parameters",
        engine=ROOMY,
        workload=lambda: _pairs(ROWS, 2000, 30),
        departure=_CUT_ON_CUDA,
    ),
    Case(
        id="sampling.pairs_strained",
        area="sampling",
        feature="parameters together",
        title="The same, cut into chunks, preempted and resumed",
        engine=STRAINED,
        workload=lambda: _pairs(all_pairs(RESUMED), 2100, 40),
        departure=replace(
            _CUT_ON_CUDA, why="its kernel for top-k with top-p cuts a token that both keep"
        ),
        expects=frozenset({"preemptions", "resumes", "chunks"}),
    ),
)
