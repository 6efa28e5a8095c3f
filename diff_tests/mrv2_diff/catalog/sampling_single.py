"""Each sampling parameter alone, beside requests without it, with preemptions and chunks.

The engine of these cases is short of blocks and of tokens in a step. What is compared of random
requests is what they draw from, under the reference's tokens.
"""

from dataclasses import replace

from mrv2_diff.case import Case, Departure
from mrv2_diff.catalog.workloads import END, ROOMY, START, STRAINED, beside_others
from mrv2_diff.kinds import Kind, drawn, greedy, some_tokens
from mrv2_diff.parameters import PARAMETERS, OwnCase
from mrv2_diff.verdict import Verdict

_EXPECTS = frozenset({"preemptions", "resumes", "chunks"})


def _case(own: OwnCase) -> Case:
    return Case(
        id=f"sampling.{own.id}",
        area="sampling",
        feature=own.feature,
        title=own.title,
        engine=STRAINED,
        workload=beside_others(own.id.replace("_", "-"), 1000 + 20 * own.number, own.kinds),
        expects=_EXPECTS,
    )


_THINKERS = (
    greedy(thinking_token_budget=3, logit_bias=((START, 9.0),)),
    drawn(thinking_token_budget=0, logit_bias=((START, 4.0),)),
    greedy(thinking_token_budget=20, allowed_token_ids=(*some_tokens(30, 30), START)),
    drawn(thinking_token_budget=1, logit_bias=((START, 3.0),)),
    greedy(thinking_token_budget=7, logit_bias=((START, 20.0),)),
)
THINKING_BUDGET = replace(
    _case(
        OwnCase(
            id="thinking_budget",
            number=10,
            feature="thinking budget",
            title="Sections that the output opens, with small and large budgets",
            kinds=_THINKERS,
        )
    ),
    engine=ROOMY,
    expects=frozenset(),
)
THINKING_DETOURS = replace(
    _case(
        OwnCase(
            id="thinking_detours",
            number=11,
            feature="thinking budget",
            title="End markers outside of sections, starts within them, and resumes",
            kinds=tuple(
                Kind(
                    temperature=temperature,
                    max_tokens=70,
                    options=(
                        ("thinking_token_budget", budget),
                        ("allowed_token_ids", (START, *END, *some_tokens(30 + budget, 3))),
                    ),
                )
                for budget, temperature in zip(range(3, 11), (0.0, 1.0) * 4, strict=True)
            ),
        )
    ),
    departure=Departure(
        value="processed_logits",
        verdict=Verdict.REFERENCE_WRONG,
        why="V1 miscounts sections after stray ends and resumes, decision 0014",
    ),
)

_OWN = sorted(
    (row.own_case for row in PARAMETERS if row.own_case is not None), key=lambda own: own.number
)

CASES: tuple[Case, ...] = (
    *map(_case, _OWN),
    THINKING_BUDGET,
    THINKING_DETOURS,
)
