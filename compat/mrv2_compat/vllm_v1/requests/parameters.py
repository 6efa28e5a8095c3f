"""The parameters of vLLM's requests that the runner acts on: one row for each.

What a request asks of the runner, which requests ask for nothing, and which fields of vLLM's
SamplingParams are served are all read from these rows. Nothing here imports vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Parameter:
    """One parameter of a request."""

    theirs: str
    """Attribute of vLLM's SamplingParams."""

    ours: str | None
    """Field of `Sampling`. None: custom logits processors read it from vLLM's parameters."""

    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing; of a plain request's own parameters and of those that act only
    beside another they are not asked."""

    convert: Callable[[Any, Any, int], Any] | None = None
    """Given vLLM's value, its SamplingParams and the vocabulary's size, returns ours. None: it is
    taken as it is."""

    is_plain: bool = False
    """Whether a request has it that asks for nothing else, as `Sampling.is_plain` means it."""

    fields: tuple[str, ...] | None = None
    """Fields of SamplingParams that the attribute is read from; None: the one of its name."""

    @property
    def served(self) -> tuple[str, ...]:
        """Fields of SamplingParams that the runner acts on because of this row."""
        return (self.theirs,) if self.fields is None else self.fields


def _listed(value: Any, *_: object) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _words(value: Any, _: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the words that can be output.

    A tokenizer may know more tokens than the model has logits for. Such a token cannot be drawn, so
    it is forbidden as it is, and is left out; so are stop tokens.
    """
    return tuple(tuple(word) for word in value or () if _can_be_drawn(word, vocab_size))


def _stop_token_ids(value: Any, params: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the stop tokens that can be drawn, EOS among them; none where no step forbids them."""
    if not params.min_tokens:
        return ()
    return tuple(sorted(i for i in value if _can_be_drawn((i,), vocab_size)))


def _can_be_drawn(token_ids: Sequence[int], vocab_size: int) -> bool:
    return all(0 <= token_id < vocab_size for token_id in token_ids)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("temperature", "temperature", is_plain=True),
    Parameter("seed", "seed", is_plain=True),
    Parameter("top_k", "top_k", (0, -1), lambda top_k, *_: max(top_k, 0)),
    Parameter("top_p", "top_p", (1.0,)),
    Parameter("min_p", "min_p", (0.0,)),
    Parameter("presence_penalty", "presence_penalty", (0.0,)),
    Parameter("frequency_penalty", "frequency_penalty", (0.0,)),
    Parameter("repetition_penalty", "repetition_penalty", (1.0,)),
    Parameter("logit_bias", "logit_bias", (None,), lambda biases, *_: biases or {}),
    Parameter("allowed_token_ids", "allowed_token_ids", (None,), _listed),
    Parameter(
        "bad_words_token_ids",
        "bad_words",
        (None,),
        _words,
        fields=("bad_words", "_bad_words_token_ids"),
    ),
    Parameter("min_tokens", "min_tokens", (0,)),
    # The scheduler's, and ours only beside `min_tokens`.
    Parameter("all_stop_token_ids", "stop_token_ids", convert=_stop_token_ids, fields=()),
    Parameter(
        "structured_outputs", "is_structured", (None,), lambda grammar, *_: grammar is not None
    ),
    Parameter("thinking_token_budget", "thinking_budget", (None,)),
    Parameter("logprobs", "num_logprobs", (None,)),
    Parameter("logprob_token_ids", "logprob_token_ids", (None,), _listed),
    Parameter("prompt_logprobs", "num_prompt_logprobs", (None,)),
    Parameter("extra_args", None),
)

SERVED = frozenset(name for row in PARAMETERS for name in row.served)
"""Fields of SamplingParams that the runner acts on."""

_SHAPING = {row.ours: row for row in PARAMETERS if row.ours is not None and not row.is_plain}
_values = attrgetter(*(row.theirs for row in _SHAPING.values()))
_CONVERTED = [(ours, row.convert) for ours, row in _SHAPING.items() if row.convert is not None]

_ALONE = [row for row in _SHAPING.values() if row.served]
shaping = attrgetter(*(row.theirs for row in _ALONE))
"""Returns what SamplingParams ask for beside a temperature and a seed."""
SHAPES_NOTHING = tuple(product(*(row.neutral for row in _ALONE)))
"""What `shaping` returns of almost every request. Both are asked at every arrival."""


def shaped(params: Any, vocab_size: int) -> dict[str, Any]:
    """Return every field of `Sampling` but the temperature and the seed, as SamplingParams say."""
    fields = dict(zip(_SHAPING, _values(params), strict=True))
    for ours, convert in _CONVERTED:
        fields[ours] = convert(fields[ours], params, vocab_size)
    return fields
