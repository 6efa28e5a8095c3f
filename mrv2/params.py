"""What one request asks of its draws: a row for each parameter, and what a model can give of it.

A parameter is a field of `Sampling`: its neutral default, what must hold of a value, the words of
that, and the tokens that a value names. What several parameters mean together stands at the end.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter
from typing import Any

from mrv2.errors import ConfigError

ALL_LOGPROBS = -1
"""`Sampling.num_logprobs` and `num_prompt_logprobs` for the whole vocabulary."""

_INF = 3.4028235e38
"""Rounds to the largest float32; what is larger is infinite on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What is asked of the values of one parameter."""

    holds: Callable[[Any], bool]
    what: str
    """What a value must be, in words."""
    token_ids: Callable[[Any], Collection[int]] | None
    """The tokens that a value names, which the vocabulary must have."""
    counts_tokens: bool
    """Whether a value is a number of tokens, of which the vocabulary must have as many."""


def _must(
    holds: Callable[[Any], bool],
    what: str,
    *,
    token_ids: Callable[[Any], Collection[int]] | None = None,
    counts_tokens: bool = False,
) -> Mapping[str, _Rule]:
    """Return the metadata of a parameter whose values have bounds."""
    rule = _Rule(holds=holds, what=what, token_ids=token_ids, counts_tokens=counts_tokens)
    return {"rule": rule}


def _names(token_ids: Callable[[Any], Collection[int]]) -> Mapping[str, _Rule]:
    """Return the metadata of a parameter with no bounds but the vocabulary."""
    return _must(lambda _: True, "anything", token_ids=token_ids)


def _is_temperature(value: float) -> bool:
    return 0.0 <= value < _INF


def _is_seed(value: int) -> bool:
    return -(2**63) <= value < 2**64


def _is_finite(value: float) -> bool:
    return -_INF < value < _INF


def _is_count(value: int | None) -> bool:
    return value is None or value >= ALL_LOGPROBS


def _listed(token_ids: Collection[int] | None) -> Collection[int]:
    return token_ids or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request draws its tokens, and which logprobs it wants.

    Every default asks for nothing. Token ids are checked against the vocabulary where the request
    arrives, since it is not known here.

    Raises:
        ConfigError: A value is outside its range.
    """

    temperature: float = field(
        default=0.0, metadata=_must(_is_temperature, "finite and at least 0")
    )
    """0 takes the likeliest token; larger values flatten the distribution."""
    seed: int = field(default=0, metadata=_must(_is_seed, "an integer of 64 bits"))
    """64 bits. Noise is a pure function of (seed, position, token id)."""
    top_k: int = field(default=0, metadata=_must(lambda k: k >= 0, "0 (all) or more"))
    """Only the k likeliest tokens are drawn, and those that are equal to the last of them. 0 and
    anything from the vocabulary's size on leave all."""
    top_p: float = field(default=1.0, metadata=_must(lambda p: 0.0 < p <= 1.0, "in (0, 1]"))
    """In (0, 1]. Only the likeliest tokens are drawn that together have this probability."""
    min_p: float = field(default=0.0, metadata=_must(lambda p: 0.0 <= p <= 1.0, "in [0, 1]"))
    """In [0, 1]. Only tokens at least this fraction as likely as the likeliest are drawn."""
    presence_penalty: float = field(default=0.0, metadata=_must(_is_finite, "finite"))
    """Subtracted once from the logit of each token that was output."""
    frequency_penalty: float = field(default=0.0, metadata=_must(_is_finite, "finite"))
    """Subtracted from a token's logit for each time that it was output."""
    repetition_penalty: float = field(
        default=1.0, metadata=_must(lambda by: 0.0 < by < _INF, "finite and above 0")
    )
    """Above 0. Divides positive logits of tokens in the prompt or the output, multiplies others."""
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata=_must(
            lambda biases: all(map(_is_finite, biases.values())), "finite", token_ids=_listed
        ),
    )
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None,
        metadata=_must(lambda ids: ids != (), "None (all) or not empty", token_ids=_listed),
    )
    """No other token is drawn. None allows all; the empty tuple is an error."""
    bad_words: tuple[tuple[int, ...], ...] = field(
        default=(),
        metadata=_must(
            all,
            "made of sequences that are not empty",
            token_ids=lambda words: tuple(chain.from_iterable(words)),
        ),
    )
    """Sequences whose last token is not drawn where the output ends in the tokens before it."""
    min_tokens: int = field(default=0, metadata=_must(lambda least: least >= 0, "0 or more"))
    """Outputs before which none of `stop_token_ids` is drawn."""
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_names(_listed))
    """Tokens that end the request, EOS included. They matter here only until `min_tokens`."""
    is_structured: bool = False
    """Whether a grammar constrains the request. Where a grammar allows nothing but stop tokens,
    `min_tokens` yields."""
    thinking_budget: int | None = field(
        default=None, metadata=_must(lambda n: n is None or n >= 0, "None or at least 0")
    )
    """Tokens of one thinking section after which its end is forced. None sets no bound."""
    num_logprobs: int | None = field(
        default=None, metadata=_must(_is_count, "-1 (all), 0, or more", counts_tokens=True)
    )
    """None returns no logprobs, 0 the sampled token's, n the n likeliest beside it, -1 all of the
    vocabulary."""
    logprob_token_ids: tuple[int, ...] | None = field(default=None, metadata=_names(_listed))
    """Return the logprobs of exactly these tokens beside the sampled one's, in this order."""
    num_prompt_logprobs: int | None = field(
        default=None, metadata=_must(_is_count, "-1 (all), 0, or more", counts_tokens=True)
    )
    """As `num_logprobs`, for each token of the prompt but the first."""

    def __post_init__(self) -> None:
        # A request is made at every arrival, and most are plain: no rule is looked up for those.
        if not (_is_temperature(self.temperature) and _is_seed(self.seed) and self.is_plain):
            self._check()

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for but a temperature and a seed, as in most requests."""
        return bool(_beside_temperature_and_seed(self) == _NOTHING)

    def _check(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if not rule.holds(value):
                raise ConfigError(f"{name} is {value}; it must be {rule.what}")


_RULES: dict[str, _Rule] = {
    each.name: each.metadata["rule"] for each in fields(Sampling) if each.metadata
}
_RESET = {
    each.name: each.default_factory() if callable(each.default_factory) else each.default
    for each in fields(Sampling)
    if each.name not in ("temperature", "seed")
}
_beside_temperature_and_seed = attrgetter(*_RESET)
_NOTHING = tuple(_RESET.values())


def sampling_faults(sampling: Sampling, vocab_size: int, *, has_markers: bool) -> list[str]:
    """Return what a request asks for that a model cannot give, a sentence for each fault.

    Args:
        sampling: What the request asks for, each value within its range.
        vocab_size: Width of the model's logits.
        has_markers: Whether the runner knows the marks around the model's thinking.
    """
    if sampling.is_plain:
        return []
    faults = []
    for name, rule in _RULES.items():
        token_ids = () if rule.token_ids is None else rule.token_ids(getattr(sampling, name))
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            outside = sorted({i for i in token_ids if not 0 <= i < vocab_size})
            faults.append(
                f"{name} has {_some(outside)}; the vocabulary is 0 to {vocab_size - 1}: leave out "
                "what is outside"
            )
    for name, rule in _RULES.items():
        count = getattr(sampling, name) if rule.counts_tokens else None
        if count is not None and count > vocab_size:
            faults.append(
                f"{name} is {count}; the vocabulary has {vocab_size} tokens: ask for at most as "
                "many, or for -1 (all)"
            )
    if sampling.thinking_budget is not None and not has_markers:
        faults.append(
            f"thinking_budget is {sampling.thinking_budget}, and the runner was given no marks of "
            "where thinking begins and ends: leave it out, or configure them (thinking)"
        )
    return faults + _contradictions(sampling)


def _contradictions(sampling: Sampling) -> list[str]:
    """Return why no token at all could be drawn, where the parameters alone say so."""
    if sampling.allowed_token_ids is None:
        return []
    allowed = set(sampling.allowed_token_ids)
    allowed -= {word[0] for word in sampling.bad_words if len(word) == 1}
    remedy = "allow another token, or forbid fewer"
    if not allowed:
        return [f"bad_words forbid every one of allowed_token_ids: {remedy}"]
    if sampling.min_tokens and not sampling.is_structured and allowed <= {*sampling.stop_token_ids}:
        return [
            f"min_tokens is {sampling.min_tokens} and forbids every one of allowed_token_ids that "
            f"is left, since all of them end the request: {remedy}"
        ]
    return []


def _some(token_ids: list[int], limit: int = 8) -> str:
    """Return the ids, cut where they would hide the rest of a message."""
    rest = len(token_ids) - limit
    listed = ", ".join(map(str, token_ids[:limit]))
    return f"{listed} and {rest} more" if rest > 0 else listed
