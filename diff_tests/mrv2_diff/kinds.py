"""What one request asks for beside its prompt, as data, and how cases write it."""

import random
from dataclasses import dataclass

from mrv2_diff.models.tokenizer import VOCAB_SIZE

Options = tuple[tuple[str, object], ...]
"""Sampling parameters by vLLM's name, as `Add.options` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one request asks for."""

    temperature: float = 0.0
    options: Options = ()
    max_tokens: int = 48
    logprobs: int | None = None


def some_tokens(seed: int, count: int) -> tuple[int, ...]:
    """Return so many token ids of the vocabulary, ascending, the same for the same seed."""
    return tuple(sorted(random.Random(seed).sample(range(VOCAB_SIZE), count)))


def drawn(**options: object) -> Kind:
    """Return a random request at temperature 1, which divides nothing."""
    return Kind(temperature=1.0, options=tuple(options.items()))


def greedy(**options: object) -> Kind:
    """Return a greedy request."""
    return Kind(options=tuple(options.items()))
