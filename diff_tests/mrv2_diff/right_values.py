"""What the logits that a token is drawn from must be: numpy in float64, without either runner.

Two runners that agree may share a fault. So each is also held against this page, which takes the
logits as the model made them, the parameters of the request, and the tokens that it has so far.
Float32 is part of the meaning where a sum or a quotient is rounded to it, so each operation is done
in float64 and rounded once, as IEEE arithmetic does. Where a token is kept or cut depends on more
than that (another order of a sum turns it), and such tokens are named instead of decided.

The order of the parameters is vLLM's: allowed tokens, bad words, least number of tokens, bias,
penalties, thinking budget, temperature, min-p, top-k, top-p.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

GREEDY_BELOW = 1e-5
LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this one to it."""
FORCED = 1e9
"""Logit of a token that a thinking budget forces."""
MASS_ERROR = 2.0**-18
"""Of a sum of float32 probabilities, whatever its order. Each has a relative error of some 2**-22:
the logits' own rounding, then an exponential, a division and the sum."""

LIGHTEST = 80.0
"""A token so far below the likeliest has a probability of at most exp(-80), and float32's smallest
normal number is exp(-87). V1's top-p cuts what has none in float32, and of all rows of a batch,
where one of them has a top-p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Token ids that open and close a thinking section."""

    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one request that change its logits, by vLLM's names."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    thinking_token_budget: int | None = None

    @classmethod
    def of(cls, temperature: float, options: Mapping[str, Any]) -> "Parameters | None":
        """Return the parameters of a request, or None where it has one that is not known here.

        Args:
            temperature: As it was sent.
            options: Further sampling parameters. Those that change no logit are passed over.
        """
        if any(name in _UNKNOWN for name in options):
            return None
        known = {name: options[name] for name in cls.__dataclass_fields__ if name in options}
        if temperature < GREEDY_BELOW:  # vLLM drops these of a greedy request
            known = {name: value for name, value in known.items() if name not in _OF_RANDOM}
            return cls(**known)
        return cls(temperature=max(temperature, LEAST_TEMPERATURE), **known)

    @property
    def in_use(self) -> tuple[str, ...]:
        """Names of the parameters that are not at their defaults; a temperature of 1 is none."""
        return tuple(name for name in self.__dataclass_fields__ if self.without(name) != self)

    def without(self, name: str) -> "Parameters":
        """Return the parameters with one at its default; a random request stays random."""
        if name == "temperature":
            return replace(self, temperature=1.0 if self.temperature >= GREEDY_BELOW else 0.0)
        return replace(self, **{name: getattr(Parameters(), name)})


_UNKNOWN = frozenset({"structured_outputs", "extra_args"})
"""Parameters whose meaning is not on this page: a grammar's, a custom processor's."""
_OF_RANDOM = frozenset({"top_k", "top_p", "min_p"})


@dataclass(slots=True, kw_only=True)
class History:
    """A request's tokens, and which of them end it."""

    prompt: tuple[int, ...]
    outputs: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    """EOS included."""
    markers: Markers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """A row of logits as it is drawn from."""

    values: FloatArray
    """[vocab_size]. Float32 numbers; -inf for what is cut."""
    size: FloatArray
    """[vocab_size]. Largest magnitude that each had on its way, scaled as the logit was since. This
    is where a difference of the raw logits, and a rounding since, must be measured."""
    undecided: BoolArray
    """[vocab_size]. Whether rounding decides that the token is kept or cut."""

    @property
    def weightless(self) -> BoolArray:
        """[vocab_size]. Tokens that are not cut and whose probability float32 may hold as 0."""
        return np.isfinite(self.values) & (self.values < self.values.max() - LIGHTEST)


def processed_logits(
    logits: npt.NDArray[Any], parameters: Parameters, history: History, noise: float
) -> Processed:
    """Return what a token must be drawn from.

    Args:
        logits: [vocab_size]. As the model made them.
        parameters: Of the request.
        history: The request's tokens before the one that is drawn.
        noise: How far the logits may be off, in spacings of float32 at their size. It decides
            nothing but which tokens are undecided.
    """
    row = _Row(np.asarray(logits, dtype=np.float64))
    for change in _CHANGES:
        change(row, parameters, history)
    if parameters.temperature >= GREEDY_BELOW:
        row.divide(_single(parameters.temperature))
        for cut in _CUTS:
            cut(row, parameters, noise)
    return Processed(values=row.values, size=row.size, undecided=row.undecided)


def log_softmax(logits: npt.NDArray[Any]) -> FloatArray:
    """Return log probabilities of rows of logits, [..., vocab_size]."""
    wide = np.asarray(logits, dtype=np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


class _Row:
    """A row of logits on its way."""

    def __init__(self, logits: FloatArray) -> None:
        self.values = logits.copy()
        finite = np.abs(logits[np.isfinite(logits)])
        self.size = np.full(len(logits), max(1.0, float(finite.max(initial=0.0))))
        self.undecided = np.zeros(len(logits), dtype=np.bool_)

    def set(self, token_ids: Any, values: Any) -> None:
        """Give some tokens new logits, rounded to float32."""
        rounded = np.asarray(values, dtype=np.float64).astype(np.float32).astype(np.float64)
        self.values[token_ids] = rounded
        magnitude = np.where(np.isfinite(rounded), np.abs(rounded), 0.0)
        self.size[token_ids] = np.maximum(self.size[token_ids], magnitude)

    def mask(self, token_ids: Iterable[int]) -> None:
        """Cut tokens; an id outside the vocabulary is nobody's."""
        ids = [token_id for token_id in token_ids if 0 <= token_id < len(self.values)]
        self.values[ids] = -np.inf

    def divide(self, divisor: float) -> None:
        """Divide the whole row."""
        self.size = self.size / divisor
        self.set(slice(None), self.values / divisor)

    def error(self, noise: float) -> FloatArray:
        """Return how far each logit may be off."""
        spacing: FloatArray = np.spacing(self.size.astype(np.float32)).astype(np.float64)
        return (noise + 2.0) * spacing

    def cut(self, below: BoolArray, undecided: BoolArray) -> None:
        """Cut tokens; what is undecided is left in, for later cuts to know that it may be there."""
        self.undecided |= undecided & (self.values > -np.inf)
        self.values[below & ~self.undecided] = -np.inf


def _single(value: float) -> float:
    return float(np.float32(value))


# ---------------------------------------------------------------- what changes logits


def _allow(row: _Row, parameters: Parameters, _: History) -> None:
    if parameters.allowed_token_ids is None:
        return
    forbidden = np.ones(len(row.values), dtype=np.bool_)
    forbidden[list(parameters.allowed_token_ids)] = False
    row.mask(np.flatnonzero(forbidden).tolist())


def _forbid_words(row: _Row, parameters: Parameters, history: History) -> None:
    for word in parameters.bad_words:
        *prefix, last = word
        if len(prefix) <= len(history.outputs) and _ends_in(history.outputs, prefix):
            row.mask([last])


def _ends_in(tokens: list[int], suffix: list[int]) -> bool:
    return not suffix or tokens[-len(suffix) :] == suffix


def _keep_going(row: _Row, parameters: Parameters, history: History) -> None:
    if len(history.outputs) < parameters.min_tokens:
        row.mask(history.stop_token_ids)


def _bias(row: _Row, parameters: Parameters, _: History) -> None:
    for token_id, bias in parameters.logit_bias.items():
        row.size[token_id] = max(row.size[token_id], abs(bias))
        row.set(token_id, row.values[token_id] + _single(bias))


def _penalise(row: _Row, parameters: Parameters, history: History) -> None:
    counts = np.bincount(
        np.array(history.outputs, dtype=np.int64), minlength=len(row.values)
    ).astype(np.float64)
    if parameters.repetition_penalty != 1.0:
        penalty = _single(parameters.repetition_penalty)
        seen = counts > 0
        seen[list(history.prompt)] = True
        by = np.where(row.values > 0.0, 1.0 / penalty, penalty)[seen]
        row.size[seen] *= np.maximum(by, 1.0)
        row.set(seen, row.values[seen] * by)
    for penalty, times in (
        (parameters.frequency_penalty, counts),
        (parameters.presence_penalty, (counts > 0).astype(np.float64)),
    ):
        if penalty != 0.0:
            row.set(slice(None), row.values - _single(penalty) * times)


def _end_thinking(row: _Row, parameters: Parameters, history: History) -> None:
    forced = forced_by_budget(parameters.thinking_token_budget, history)
    if forced is not None:
        row.set(forced, FORCED)


_CHANGES: tuple[Callable[[_Row, Parameters, History], None], ...] = (
    _allow,
    _forbid_words,
    _keep_going,
    _bias,
    _penalise,
    _end_thinking,
)


def forced_by_budget(budget: int | None, history: History) -> int | None:
    """Return the token that a thinking budget forces next; None where it forces none.

    A section begins behind a start marker: the last one of the prompt, where no end follows it
    there, or one of the output outside of a section. Until it has as many tokens as the budget, the
    end marker ends it wherever the model writes it; from then on the end marker is forced, token by
    token, and ends it. Markers lie in the prompt or in the output, not in both.

    Args:
        budget: Tokens of a section; None sets no bound.
        history: The request's tokens, with the markers.
    """
    markers = history.markers
    if budget is None or markers is None:
        return None
    tokens, scanned = [*history.prompt, *history.outputs], len(history.prompt)
    begin = _open_in_prompt(history.prompt, markers)
    while True:
        if begin is None:
            opened = _first_place(tokens, markers.start, scanned, len(tokens))
            if opened is None:
                return None
            begin, scanned = opened + len(markers.start), opened + 1
        spent = max(begin + budget, len(history.prompt))
        closed = _first_place(tokens, markers.end, scanned, min(spent, len(tokens)))
        if closed is None:
            closed = _first_place(tokens, markers.end, spent, len(tokens))
        if closed is None:
            return _next_of_end(tokens[spent:], markers.end) if len(tokens) >= spent else None
        begin, scanned = None, closed + len(markers.end)


def _open_in_prompt(prompt: tuple[int, ...], markers: Markers) -> int | None:
    starts = _places(prompt, markers.start)
    ends = _places(prompt, markers.end)
    if not starts or (ends and ends[-1] > starts[-1]):
        return None
    return starts[-1] + len(markers.start)


def _next_of_end(given: list[int], end: tuple[int, ...]) -> int:
    """Return what follows as much of the end marker as the tokens given since end in."""
    for length in range(min(len(end) - 1, len(given)), 0, -1):
        if tuple(given[-length:]) == end[:length]:
            return end[length]
    return end[0]


def _first_place(tokens: list[int], marker: tuple[int, ...], begin: int, end: int) -> int | None:
    places = _places(tuple(tokens[begin:end]), marker)
    return begin + places[0] if places else None


def _places(tokens: tuple[int, ...], marker: tuple[int, ...]) -> list[int]:
    last = len(tokens) - len(marker)
    return [at for at in range(last + 1) if tokens[at : at + len(marker)] == marker]


# ---------------------------------------------------------------- what cuts tokens


def _cut_min_p(row: _Row, parameters: Parameters, noise: float) -> None:
    if parameters.min_p <= 0.0 or not np.isfinite(row.values.max()):
        return
    error = row.error(noise)
    largest = int(row.values.argmax())
    distance = row.values - (row.values[largest] + np.log(_single(parameters.min_p)))
    doubt = error + error[largest] + MASS_ERROR
    undecided = np.abs(distance) <= doubt
    undecided[row.values == row.values[largest]] = False
    row.cut(distance < 0.0, undecided)


def _cut_top_k(row: _Row, parameters: Parameters, noise: float) -> None:
    vocab_size = len(row.values)
    if not 0 < parameters.top_k < vocab_size:
        return
    order = np.argsort(-row.values, kind="stable")
    last = order[parameters.top_k - 1]
    cutoff = row.values[last]
    if not np.isfinite(cutoff):
        return  # fewer are left than may be kept
    error = row.error(noise)
    undecided = np.abs(row.values - cutoff) <= error + error[last]
    equal = row.values == cutoff
    if int(undecided.sum()) == 1 or (noise == 0.0 and not (undecided & ~equal).any()):
        undecided[:] = False  # the last token alone, or with others that are just as likely
    row.cut(row.values < cutoff, undecided)


def _cut_top_p(row: _Row, parameters: Parameters, noise: float) -> None:
    if parameters.top_p >= 1.0 or not np.isfinite(row.values.max()):
        return
    order = np.argsort(-row.values, kind="stable")
    values, error = row.values[order], row.error(noise)[order]
    mass = np.exp(values - values[0])
    mass /= mass.sum()
    ends = np.searchsorted(-values, -values, side="left")  # tokens that are likelier, by number
    before = np.concatenate(([0.0], np.cumsum(mass)))
    above = before[ends]
    weighted = np.concatenate(([0.0], np.cumsum(mass * np.where(mass > 0.0, error, 0.0))))
    doubt = (1.0 - above) * weighted[ends] + above * (weighted[-1] - weighted[ends])
    # Tokens so near that rounding changes their order, and those that may not be there at all.
    first = np.searchsorted(-values, -(values + 2.0 * error), side="left")
    beyond = np.searchsorted(-values, -(values - 2.0 * error), side="right")
    equal = np.searchsorted(-values, -values, side="right")
    doubt += (before[ends] - before[first]) + (before[beyond] - before[equal])
    doubt += MASS_ERROR + float(mass[row.undecided[order]].sum())
    limit = _single(parameters.top_p)
    undecided = np.empty(len(values), dtype=np.bool_)
    below = np.empty(len(values), dtype=np.bool_)
    undecided[order] = np.abs(above - limit) <= doubt
    below[order] = above >= limit
    undecided[row.values == values[0]] = False
    below[row.values == values[0]] = False
    row.cut(below, undecided)


_CUTS: tuple[Callable[[_Row, Parameters, float], None], ...] = (
    _cut_min_p,
    _cut_top_k,
    _cut_top_p,
)
