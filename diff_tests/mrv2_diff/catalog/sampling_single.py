"""Each sampling parameter alone, beside requests without it, with preemptions and chunks.

The engine of these cases is short of blocks and of tokens in a step. What is compared of random
requests is what they draw from, under the reference's tokens.
"""

from dataclasses import replace

from mrv2_diff.case import Case, Departure
from mrv2_diff.catalog.workloads import (
    END,
    ROOMY,
    START,
    STRAINED,
    Kind,
    beside_others,
    drawn,
    greedy,
    some_tokens,
)
from mrv2_diff.verdict import Verdict

_EXPECTS = frozenset({"preemptions", "resumes", "chunks"})


def _case(name: str, feature: str, title: str, number: int, users: tuple[Kind, ...]) -> Case:
    return Case(
        id=f"sampling.{name}",
        area="sampling",
        feature=feature,
        title=title,
        engine=STRAINED,
        workload=beside_others(name.replace("_", "-"), 1000 + 20 * number, users),
        expects=_EXPECTS,
    )


ALLOWED = _case(
    "allowed_tokens",
    "allowed tokens",
    "A few, half and one of the vocabulary allowed",
    0,
    (
        greedy(allowed_token_ids=some_tokens(1, 40)),
        drawn(allowed_token_ids=some_tokens(2, 165)),
        greedy(allowed_token_ids=(330,)),
        drawn(allowed_token_ids=some_tokens(3, 7)),
        greedy(allowed_token_ids=(7, 7, 3)),
    ),
)
MIN_TOKENS = _case(
    "min_tokens",
    "min tokens",
    "Stop tokens are masked until the least number of outputs, counted across preemptions",
    1,
    (
        greedy(min_tokens=30, stop_token_ids=some_tokens(4, 60)),
        drawn(min_tokens=48, stop_token_ids=some_tokens(5, 100)),
        greedy(min_tokens=48),
        drawn(min_tokens=1, stop_token_ids=(5,), ignore_eos=False),
        greedy(min_tokens=44, stop_token_ids=some_tokens(6, 30), ignore_eos=False),
    ),
)
LOGIT_BIAS = _case(
    "logit_bias",
    "logit bias",
    "Biases of all sizes on one token, on many, on the first and the last",
    2,
    (
        greedy(logit_bias=tuple((token, 2.5) for token in some_tokens(7, 50))),
        drawn(logit_bias=((0, 4.0), (330, -4.0), (17, 0.125))),
        greedy(logit_bias=((9, 100.0),)),
        drawn(logit_bias=tuple((token, -100.0) for token in some_tokens(8, 300))),
        greedy(logit_bias=((3, 1.0), (4, -1.0))),
    ),
)
PRESENCE = _case(
    "presence_penalty",
    "penalties",
    "Presence penalties of both signs",
    3,
    (
        greedy(presence_penalty=1.5),
        drawn(presence_penalty=-1.1),
        greedy(presence_penalty=-2.0),
        drawn(presence_penalty=2.0),
        greedy(presence_penalty=0.3),
    ),
)
FREQUENCY = _case(
    "frequency_penalty",
    "penalties",
    "Frequency penalties of both signs",
    4,
    (
        greedy(frequency_penalty=-0.7),
        drawn(frequency_penalty=1.3),
        greedy(frequency_penalty=2.0),
        drawn(frequency_penalty=-2.0),
        greedy(frequency_penalty=0.1),
    ),
)
REPETITION = _case(
    "repetition_penalty",
    "penalties",
    "Repetition penalties below and above 1, which count the prompt as well",
    5,
    (
        greedy(repetition_penalty=1.3),
        drawn(repetition_penalty=0.7),
        greedy(repetition_penalty=3.0),
        drawn(repetition_penalty=1.01),
        greedy(repetition_penalty=0.5),
    ),
)
BAD_WORDS = _case(
    "bad_words",
    "bad words",
    "Words of one token, of two and of three; the longer ones begin in the outputs alone",
    6,
    (
        greedy(bad_words=tuple((token,) for token in some_tokens(9, 40))),
        drawn(bad_words=tuple((first, first * 7 % 331) for first in range(331))),
        greedy(
            bad_words=tuple(
                (first, (first + step) % 331)
                for first in range(0, 331, 2)
                for step in (1, 100, 200)
            )
        ),
        drawn(
            allowed_token_ids=(1, 2, 3, 4),
            bad_words=tuple((a, b, (a + b) % 4 + 1) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4)),
        ),
        greedy(bad_words=((5,), (5, 6), (330, 329, 328))),
    ),
)
MIN_P = _case(
    "min_p",
    "min-p",
    "Fractions of the likeliest token's probability",
    7,
    (drawn(min_p=0.05), drawn(min_p=0.5), greedy(min_p=0.3), drawn(min_p=0.9), drawn(min_p=0.001)),
)
TOP_K = _case(
    "top_k",
    "top-k",
    "From one token to all but one",
    8,
    (drawn(top_k=5), drawn(top_k=1), greedy(top_k=3), drawn(top_k=330), drawn(top_k=60)),
)
TOP_P = _case(
    "top_p",
    "top-p",
    "Small and large parts of the distribution",
    9,
    (drawn(top_p=0.9), drawn(top_p=0.3), greedy(top_p=0.5), drawn(top_p=0.999), drawn(top_p=0.6)),
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
        "thinking_budget",
        "thinking budget",
        "Sections that the output opens, with small and large budgets",
        10,
        _THINKERS,
    ),
    engine=ROOMY,
    expects=frozenset(),
)
THINKING_DETOURS = replace(
    _case(
        "thinking_detours",
        "thinking budget",
        "End markers outside of sections, starts within them, and resumes",
        11,
        tuple(
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
    ),
    departure=Departure(
        value="processed_logits",
        verdict=Verdict.REFERENCE_WRONG,
        why="V1 miscounts sections after stray ends and resumes, decision 0014",
    ),
)

CASES: tuple[Case, ...] = (
    ALLOWED,
    MIN_TOKENS,
    LOGIT_BIAS,
    PRESENCE,
    FREQUENCY,
    REPETITION,
    BAD_WORDS,
    MIN_P,
    TOP_K,
    TOP_P,
    THINKING_BUDGET,
    THINKING_DETOURS,
)
