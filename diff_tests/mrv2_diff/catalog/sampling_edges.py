"""Parameters at their bounds and beyond what matters, rows that are cut whole, and exact ties."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mrv2_diff.case import Add, Case, Departure, Event
from mrv2_diff.catalog.prompts import prompt
from mrv2_diff.catalog.workloads import ROOMY
from mrv2_diff.kinds import Kind, drawn, greedy, some_tokens
from mrv2_diff.models.tokenizer import VOCAB_SIZE
from mrv2_diff.parameters import PARAMETERS, Group
from mrv2_diff.verdict import Verdict

LAST = VOCAB_SIZE - 1
LEVEL = 2.0**30
"""A bias beside which a tiny model's logits vanish in float32: tokens that have it are equal."""


def _together(
    name: str, first_prompt: int, kinds: Sequence[Kind]
) -> Callable[[], tuple[Event, ...]]:
    """Return a workload in which all requests decode side by side."""

    def workload() -> tuple[Event, ...]:
        return tuple(
            Add(
                step=0,
                req_id=f"{name}-{index}",
                prompt=prompt(first_prompt + index, 4 + index),
                max_tokens=kind.max_tokens,
                temperature=kind.temperature,
                logprobs=kind.logprobs,
                options=kind.options,
            )
            for index, kind in enumerate(kinds)
        )

    return workload


def _level(*token_ids: int) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, LEVEL) for token_id in token_ids)


def _hot(temperature: float, **options: object) -> Kind:
    return Kind(temperature=temperature, options=tuple(options.items()))


def _at_bounds(group: Group, kind: Callable[..., Kind]) -> tuple[Kind, ...]:
    return tuple(
        kind(**{row.name: value})
        for row in PARAMETERS
        if row.group == group
        for value in row.bounds
    )


_CUTS = (
    *_at_bounds("cuts", drawn),
    _hot(0.01, top_k=2, top_p=0.5, min_p=0.5),
    _hot(0.01),
    _hot(2.0, top_k=2, top_p=0.5),
    _hot(2.0, min_p=0.2),
)
_PENALTIES = (
    *_at_bounds("penalties", greedy),
    drawn(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0),
    drawn(presence_penalty=-2.0, frequency_penalty=-2.0, repetition_penalty=0.5),
    # All that is left was output before long, and is counted again and again.
    greedy(frequency_penalty=2.0, allowed_token_ids=(0, LAST)),
    _hot(0.01, presence_penalty=-2.0, allowed_token_ids=(0, 1, LAST)),
)
_ALL_WORDS = tuple((first, last) for first in range(VOCAB_SIZE) for last in (4, 5))
_MASKS = (
    greedy(logit_bias=((0, 100.0), (LAST, -100.0))),
    greedy(logit_bias=((0, -100.0), (LAST, 100.0))),
    drawn(logit_bias=tuple((token, 100.0) for token in range(VOCAB_SIZE))),
    greedy(allowed_token_ids=(LAST,)),
    greedy(allowed_token_ids=tuple(range(VOCAB_SIZE))),
    drawn(allowed_token_ids=(0,)),
    # A bias on a token that is not allowed, and a word of nothing but the last token.
    greedy(allowed_token_ids=(4, 5), logit_bias=((6, 100.0), (4, 1.0)), bad_words=((LAST,),)),
    # Rows that are cut whole, from the second output on.
    greedy(allowed_token_ids=(4, 5), bad_words=_ALL_WORDS),
    drawn(allowed_token_ids=(4, 5), bad_words=_ALL_WORDS),
    greedy(min_tokens=0, stop_token_ids=some_tokens(40, 3)),
    greedy(min_tokens=24, stop_token_ids=some_tokens(41, 60)),
    greedy(min_tokens=24, stop_token_ids=(0, LAST), logit_bias=((LAST, 100.0),)),
    greedy(min_tokens=3, stop_token_ids=(LAST,), logit_bias=((LAST, 100.0),)),
    drawn(bad_words=tuple((token,) for token in range(1, VOCAB_SIZE))),
    greedy(bad_words=((7,) * 30, (8, 9) * 6)),  # longer than anything that was output
)
_TIES = (
    greedy(logit_bias=_level(40, 3, LAST)),
    greedy(logit_bias=_level(LAST, 0)),
    drawn(logit_bias=_level(5, 6, 7, 8), top_k=2),
    drawn(logit_bias=_level(5, 6, 7, 8), min_p=1.0),
    drawn(logit_bias=_level(5, 6), top_k=2, min_p=0.5),
    drawn(logit_bias=_level(5, 6, 7), allowed_token_ids=(5, 6, 7, 8)),
    greedy(logit_bias=_level(5, 6), bad_words=((5,),)),
)
_TIES_OF_TOP_P = (
    drawn(logit_bias=_level(5, 6, 7, 8, 9), top_p=0.5),
    drawn(logit_bias=_level(0, 100, LAST), top_p=0.1),
    drawn(logit_bias=_level(*range(20, 60)), top_p=0.3),
    greedy(),
)


def _case(name: str, title: str, feature: str, number: int, kinds: Sequence[Kind]) -> Case:
    return Case(
        id=f"sampling.{name}",
        area="sampling",
        feature=feature,
        title=title,
        engine=ROOMY,
        workload=_together(name.replace("_", "-"), 2300 + 40 * number, kinds),
    )


CASES: tuple[Case, ...] = (
    _case(
        "edges_of_cuts",
        "Top-k, top-p, min-p and temperature at bounds",
        "top-k and top-p",
        0,
        _CUTS,
    ),
    _case("edges_of_penalties", "Penalties at their bounds", "penalties", 1, _PENALTIES),
    _case("edges_of_masks", "One token, all and none left", "allowed tokens", 2, _MASKS),
    replace(
        _case("ties", "Exactly equal logits, greedy and cut", "top-k and top-p", 3, _TIES),
        departure=Departure(
            value="processed_logits",
            verdict=Verdict.KNOWN_DIFFERENCE,
            why="equal tokens stay or go together, decision 0016; V1's kernel keeps k of them",
            on=frozenset({"cuda"}),
            elsewhere="V1's top-k keeps all that equal the k-th, as mrv2 does",
        ),
    ),
    replace(
        _case(
            "ties_of_top_p", "Equal logits at top-p's bound", "top-k and top-p", 4, _TIES_OF_TOP_P
        ),
        departure=Departure(
            value="processed_logits",
            verdict=Verdict.KNOWN_DIFFERENCE,
            why="equal tokens stay or go together, decision 0016",
        ),
    ),
)
