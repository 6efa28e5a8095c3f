"""What the host asks of one step.

A `StepPlan` is the runner's only input: who left, who arrived, who goes on and with which new
blocks, and how many tokens each scheduled request runs. It knows nothing of rows, devices or vLLM.
Preemption is a departure and resumption an arrival, so there are only three lifecycle events.
Checks that cost no more than they save stand here, at the boundary.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import add, attrgetter
from types import MappingProxyType

from mrv2.errors import ConfigError

NO_EXTRAS: Mapping[str, object] = MappingProxyType({})

ALL_LOGPROBS = -1
"""`Sampling.num_logprobs` and `num_prompt_logprobs` for the whole vocabulary."""

_INF = 3.4028235e38
"""Rounds to the largest float32; what is larger is infinite on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request draws its tokens, and which logprobs it wants.

    Every default asks for nothing. Token ids are checked against the vocabulary where the request
    arrives, since it is not known here.

    Raises:
        ConfigError: A value is outside its range.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; larger values flatten the distribution."""
    seed: int = 0
    """64 bits. Noise is a pure function of (seed, position, token id)."""
    top_k: int = 0
    """Only the k likeliest tokens are drawn, and those that are equal to the last of them. 0 and
    anything from the vocabulary's size on leave all."""
    top_p: float = 1.0
    """In (0, 1]. Only the likeliest tokens are drawn that together have this probability."""
    min_p: float = 0.0
    """In [0, 1]. Only tokens at least this fraction as likely as the likeliest are drawn."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was output."""
    repetition_penalty: float = 1.0
    """Above 0. Divides positive logits of tokens in the prompt or the output, multiplies others."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is drawn. None allows all; the empty tuple is an error."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences whose last token is not drawn where the output ends in the tokens before it."""
    min_tokens: int = 0
    """Outputs before which none of `stop_token_ids` is drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, EOS included. They matter here only until `min_tokens`."""
    is_structured: bool = False
    """Whether a grammar constrains the request. Where a grammar allows nothing but stop tokens,
    `min_tokens` yields."""
    thinking_budget: int | None = None
    """Tokens of one thinking section after which its end is forced. None sets no bound."""
    num_logprobs: int | None = None
    """None returns no logprobs, 0 the sampled token's, n the n likeliest beside it, -1 all of the
    vocabulary."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Return the logprobs of exactly these tokens beside the sampled one's, in this order."""
    num_prompt_logprobs: int | None = None
    """As `num_logprobs`, for each token of the prompt but the first."""

    def __post_init__(self) -> None:
        self._require("temperature", 0.0 <= self.temperature < _INF, "finite and at least 0")
        self._require("seed", -(2**63) <= self.seed < 2**64, "an integer of 64 bits")
        if not self.is_plain:
            self._check()

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for but a temperature and a seed, as in most requests."""
        return bool(_beside_temperature_and_seed(self) == _NOTHING)

    def _check(self) -> None:
        self._require("top_k", self.top_k >= 0, "0 (all) or more")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -_INF < getattr(self, name) < _INF, "finite")
        positive = 0.0 < self.repetition_penalty < _INF
        self._require("repetition_penalty", positive, "finite and above 0")
        biases = self.logit_bias.values()
        self._require("logit_bias", all(-_INF < bias < _INF for bias in biases), "finite")
        self._require("allowed_token_ids", self.allowed_token_ids != (), "None (all) or not empty")
        self._require("bad_words", all(self.bad_words), "made of sequences that are not empty")
        self._require("min_tokens", self.min_tokens >= 0, "0 or more")
        budget = self.thinking_budget
        self._require("thinking_budget", budget is None or budget >= 0, "None or at least 0")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            self._require(name, count is None or count >= ALL_LOGPROBS, "-1 (all), 0, or more")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigError(f"{name} is {getattr(self, name)}; it must be {what}")


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
    named: dict[str, Collection[int]] = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": tuple(chain.from_iterable(sampling.bad_words)),
        "stop_token_ids": sampling.stop_token_ids,
        "logprob_token_ids": sampling.logprob_token_ids or (),
    }
    faults = []
    for name, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            outside = sorted({i for i in token_ids if not 0 <= i < vocab_size})
            faults.append(
                f"{name} has {_some(outside)}; the vocabulary is 0 to {vocab_size - 1}: leave out "
                "what is outside"
            )
    for name in ("num_logprobs", "num_prompt_logprobs"):
        count = getattr(sampling, name)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that takes a row: new, or resumed after a preemption."""

    req_id: str
    token_ids: list[int]
    """Every token known so far: the prompt, and after a preemption the outputs too."""
    prompt_len: int
    """How many of `token_ids` are the prompt. The split is lost on a resume unless it is told;
    penalties, bad words and a least number of tokens count outputs from here."""
    num_computed_tokens: int
    """Tokens whose KV is already in the blocks (a prefix-cache hit)."""
    block_ids: tuple[list[int], ...]
    """Blocks held, for each KV group."""
    sampling: Sampling
    extras: Mapping[str, object] = field(default_factory=lambda: NO_EXTRAS)
    """What extensions are told of the request, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A live request that was given more blocks. Requests that only run on have none."""

    req_id: str
    new_block_ids: tuple[list[int], ...]
    """Blocks to append, for each KV group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The requests that run in this step, as parallel lists in the host's order."""

    req_ids: list[str]
    num_tokens: list[int]
    """Tokens to run, each at least 1."""
    num_computed_tokens: list[int]
    """Tokens before this step's; authoritative, and may have gone down. While drafts are in flight
    it is a bound: as if all of them were accepted."""
    num_known_tokens: list[int]
    """Prompt and output tokens that exist before this step, outputs still in flight counted in.
    A request draws a token in this step exactly if it runs its last known token. What it runs
    behind that are drafts; each of them draws one, too."""

    def next_decode(self) -> "NextDecode":
        """Return the plain decode after this work, in which every request must draw."""
        return NextDecode(base=self, num_steps=1)


@dataclass(slots=True, kw_only=True)
class NextDecode:
    """The plain decode that follows another step: `Scheduled` without its lists.

    The same requests run in the same order, each the token that it drew there. The runner sees in
    no more time than for one request that this follows what it executed last. If it does not, the
    lists are taken as those of `Scheduled` are. They are made when somebody reads them.

    A chain of these keeps its base, not every link. Not frozen, since one is made at every step.
    """

    base: Scheduled
    """The work that the chain began with; every request of it drew a token."""
    num_steps: int
    """Steps since the base, at least 1."""

    def next_decode(self) -> "NextDecode":
        """Return the plain decode after this one."""
        return NextDecode(base=self.base, num_steps=self.num_steps + 1)

    def follows(self, last: "Scheduled | NextDecode") -> bool:
        """Say whether this was made as what comes next after `last`, that very object or chain."""
        if isinstance(last, NextDecode):
            return self.base is last.base and self.num_steps == last.num_steps + 1
        return self.base is last and self.num_steps == 1

    @property
    def req_ids(self) -> list[str]:
        """The base's own list."""
        return self.base.req_ids

    @property
    def num_tokens(self) -> list[int]:
        """One for each request."""
        return [1] * len(self.base.req_ids)

    @property
    def num_computed_tokens(self) -> list[int]:
        """What the base had computed and ran, and a token more for each step since."""
        ran = map(add, self.base.num_computed_tokens, self.base.num_tokens)
        return [end + self.num_steps - 1 for end in ran]

    @property
    def num_known_tokens(self) -> list[int]:
        """A token more for each step since the base."""
        return [known + self.num_steps for known in self.base.num_known_tokens]

    def listed(self) -> Scheduled:
        """Return the same work with its lists."""
        return Scheduled(
            req_ids=self.req_ids,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_known_tokens=self.num_known_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: lifecycle events in the order in which they are applied, then the work."""

    departed: tuple[str, ...] = ()
    """Finished, aborted, preempted or replaced. Applied first; ids without a row are skipped."""
    arrivals: tuple[Arrival, ...] = ()
    continuations: tuple[Continuation, ...] = ()
    scheduled: Scheduled | NextDecode
    extras: Mapping[str, object] = field(default_factory=lambda: NO_EXTRAS)
    """What extensions are told of the step, by their names."""
