"""The stages in the order in which they act. Order is semantics: V1's, which users tuned to."""

from collections.abc import Iterable

from mrv2.sampling.allowed_tokens import AllowedTokens
from mrv2.sampling.bad_words import BadWords
from mrv2.sampling.logit_bias import LogitBias
from mrv2.sampling.min_p import MinP
from mrv2.sampling.min_tokens import MinTokens
from mrv2.sampling.penalties import Penalties
from mrv2.sampling.stage import StageFactory
from mrv2.sampling.temperature import Temperature
from mrv2.sampling.thinking_budget import ThinkingBudget
from mrv2.sampling.top_k_top_p import TopKTopP

RESHAPING: tuple[StageFactory, ...] = (AllowedTokens, BadWords, MinTokens, LogitBias)
"""Masks and biases, which may change the likeliest token."""
PENALISING: tuple[StageFactory, ...] = (Penalties, ThinkingBudget)
DIVIDING: tuple[StageFactory, ...] = (Temperature, MinP)
"""From here on the likeliest token stays what it is."""
CUTTING: tuple[StageFactory, ...] = (TopKTopP,)

STAGES: tuple[StageFactory, ...] = (*RESHAPING, *PENALISING, *DIVIDING, *CUTTING)
"""Adding a feature is adding its factory here, at the place that its meaning requires."""


def stages_with(
    reshaping: Iterable[StageFactory], narrowing: Iterable[StageFactory]
) -> tuple[StageFactory, ...]:
    """Return the stages with a host's own among them.

    Args:
        reshaping: Stages that may change the likeliest token; they act before the penalties.
        narrowing: Stages that never do; they act before top-k and top-p.
    """
    return (*RESHAPING, *reshaping, *PENALISING, *DIVIDING, *narrowing, *CUTTING)
