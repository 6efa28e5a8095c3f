"""Every parameter of a request in a real engine: its effect, its bounds, and processors of others.

One engine of each runner answers all of it. Both must give what each parameter asks for, shown by
a check that a reply without the parameter does not pass; ours gives V1's tokens wherever a request
is greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mrv2_compat.vllm_v1.requests import refusals
from mrv2_diff.drivers.asks import Ask, Replies, Reply, ask_engine
from mrv2_diff.drivers.one_engine import OURS
from mrv2_diff.models import ModelSpec, cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROCESSORS = [f"mrv2_diff.drivers.processors:{name}" for name in ("Climbs", "ClimbsEach", "Keeps")]
THINKS, THINKS_NO_MORE = ord("{") - ord("!"), ord("}") - ord("!")
"""Printable bytes are the tokenizer's first ids, in order."""
EOS_ID = 330
VOCAB_SIZE = 331
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 80,
    "logits_processors": PROCESSORS,
    "reasoning_config": {"reasoning_start_str": "{", "reasoning_end_str": "}"},
}
PROMPT = [4, 9, 60, 7, 21, THINKS]
LENGTH = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
RANDOM: dict[str, Any] = {**GREEDY, "temperature": 1.5, "seed": 5}


def tokens(reply: Reply) -> list[int]:
    """The one sequence of a request."""
    (sequence,) = reply.token_ids
    return sequence


Check = Callable[[Reply, Reply, Reply], bool]


@dataclass(frozen=True)
class Effect:
    """Two requests that differ in one parameter, and what must differ between their replies."""

    value: Any
    shows: Check
    """Given the reply with the parameter, the one without, and that of a plain greedy request."""
    base: dict[str, Any]


def as_greedy(with_it: Reply, without: Reply, plain: Reply) -> bool:
    """Narrowed to one token, a draw is greedy."""
    return tokens(with_it) == tokens(plain) != tokens(without)


def repeats_less(with_it: Reply, without: Reply, _: Reply) -> bool:
    return len(set(tokens(with_it))) > len(set(tokens(without)))


def differs(with_it: Reply, without: Reply, _: Reply) -> bool:
    return tokens(with_it) != tokens(without)


LETTER = ord("a") - ord("!")
DIGITS = {ord(digit) - ord("!") for digit in "0123456789"}
ALWAYS_A: dict[str, Any] = {**GREEDY, "logit_bias": {LETTER: 100.0}}

EFFECTS: dict[str, Effect] = {
    "temperature": Effect(1.5, differs, {**GREEDY, "seed": 5}),
    "seed": Effect(6, differs, RANDOM),
    "top_k": Effect(1, as_greedy, RANDOM),
    "top_p": Effect(1e-6, as_greedy, RANDOM),
    "min_p": Effect(1.0, as_greedy, RANDOM),
    "presence_penalty": Effect(2.0, repeats_less, GREEDY),
    "frequency_penalty": Effect(2.0, repeats_less, GREEDY),
    "repetition_penalty": Effect(2.0, repeats_less, GREEDY),
    "logit_bias": Effect(
        {LETTER: 100.0},
        lambda one, _, plain: {*tokens(one)} == {LETTER} != {*tokens(plain)},
        GREEDY,
    ),
    "allowed_token_ids": Effect(
        [60, 61, 62], lambda one, *_: {*tokens(one)} <= {60, 61, 62}, GREEDY
    ),
    "bad_words": Effect(
        ["a"],
        lambda one, other, _: LETTER not in tokens(one) and {*tokens(other)} == {LETTER},
        ALWAYS_A,
    ),
    "_bad_words_token_ids": Effect(
        [[LETTER, LETTER]],
        lambda one, other, _: (
            tokens(one).count(LETTER) > 2
            and (LETTER, LETTER) not in zip(tokens(one), tokens(one)[1:], strict=False)
            and {*tokens(other)} == {LETTER}
        ),
        ALWAYS_A,
    ),
    "min_tokens": Effect(
        3,
        lambda one, other, _: (
            len(tokens(other)) == 1 and len(tokens(one)) > 3 and LETTER not in tokens(one)[:3]
        ),
        {**ALWAYS_A, "stop_token_ids": [LETTER]},
    ),
    "structured_outputs": Effect(
        {"regex": "[0-9]{5}"},
        lambda one, *_: {*tokens(one)[:5]} <= DIGITS and tokens(one)[5:] == [EOS_ID],
        {**GREEDY, "ignore_eos": False},
    ),
    "thinking_token_budget": Effect(
        3,
        lambda one, other, _: (
            tokens(one)[:4] == [*tokens(other)[:3], THINKS_NO_MORE]
            and THINKS_NO_MORE not in tokens(other)
        ),
        GREEDY,
    ),
    "logprobs": Effect(
        2,
        lambda one, other, _: (
            len(one.logprobs) == LENGTH
            and {len(row) for row in one.logprobs} <= {2, 3}
            and not other.logprobs
        ),
        GREEDY,
    ),
    "logprob_token_ids": Effect(
        [5, 9],
        lambda one, other, _: (
            len(one.logprobs) == LENGTH
            and all({"5", "9"} <= row.keys() for row in one.logprobs)
            and not other.logprobs
        ),
        GREEDY,
    ),
    "prompt_logprobs": Effect(
        1,
        lambda one, other, _: (
            len(one.prompt_logprobs) == len(PROMPT)
            and one.prompt_logprobs[0] is None
            and all(row for row in one.prompt_logprobs[1:])
            and not other.prompt_logprobs
        ),
        GREEDY,
    ),
    "extra_args": Effect(
        {"climbs": True},
        lambda one, *_: tokens(one) == [THINKS + 1 + place for place in range(LENGTH)],
        GREEDY,
    ),
}
SERVED = sorted(refusals.SERVED_BY_RUNNER)

SERVED_BY_V1_TOO = [
    {**GREEDY, "extra_args": {"climbs_each": True}},
    {**GREEDY, "extra_args": {"keeps": 3}},
    {**GREEDY, "extra_args": {"climbs": True}, "presence_penalty": 1.0},
    {**GREEDY, "_bad_words_token_ids": [[VOCAB_SIZE], [VOCAB_SIZE + 3], [3, VOCAB_SIZE + 3]]},
    {**RANDOM, "extra_args": {"keeps": 1}},
]
"""Beside the effects: requests that V1 answers with the same tokens."""
SEVERAL = {**RANDOM, "seed": 7, "n": 4}
SEQUENCES = [SEVERAL, SEVERAL, *({**RANDOM, "seed": 7 + index} for index in range(4))]

RAISING: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "extra_args": {"climbs": True}},
    {**GREEDY, "extra_args": {"climbs": True, "raises": "late"}},
    {**GREEDY, "extra_args": {"climbs_each": True, "raises": "late"}},
    {**GREEDY, "extra_args": {"climbs": True, "raises": "added"}},
    {**GREEDY, "extra_args": {"climbs": True, "raises": "apply"}, "logprobs": 2},
    GREEDY,
]

VLLMS_OWN: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature must be non-negative"),
    ({"temperature": 2.5}, "temperature must be in [0, 2]"),
    ({"top_p": 0.0}, "top_p must be in (0, 1]"),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1"),
    ({"min_p": 1.5}, "min_p must be in [0, 1]"),
    ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2]"),
    ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than zero"),
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0"),
    ({"min_tokens": 20}, "min_tokens must be less than or equal to max_tokens=16"),
    ({"logprobs": -2}, "logprobs must be non-negative or -1"),
    ({"logprobs": 21}, "greater than max allowed: 20"),
    ({"prompt_logprobs": 21}, "greater than max allowed: 20"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"[{VOCAB_SIZE}] in logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids contains out-of-vocab token id"),
    ({"stop_token_ids": [VOCAB_SIZE]}, f"[{VOCAB_SIZE}] in stop_token_ids"),
    ({"logprob_token_ids": [-1]}, "[-1] in logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [1, 2]}, "logprobs must equal len(logprob_token_ids)"),
    ({"bad_words": [""]}, "bad_words cannot contain an empty string"),
    ({"thinking_token_budget": -2}, "`thinking_token_budget` must be a non-negative integer"),
    ({"n": 2}, "n must be 1 when using greedy sampling"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "only use one kind"),
    ({"extra_args": {"climbs": "down"}}, "climbs is 'down'; it must be true"),
]
OUR_OWN: list[tuple[dict[str, Any], str]] = [
    ({"seed": 2**64}, f"seed is {2**64}; it must be an integer of 64 bits"),
    ({"logit_bias": {3: float("inf")}}, "logit_bias is {3: inf}; it must be finite"),
    (
        {"allowed_token_ids": [EOS_ID], "min_tokens": 2},
        "min_tokens is 2 and forbids every one of allowed_token_ids",
    ),
    (
        {"allowed_token_ids": [5], "_bad_words_token_ids": [[5]]},
        "bad_words forbid every one of allowed_token_ids",
    ),
    (
        {"allowed_token_ids": [LETTER, EOS_ID], "bad_words": ["a"], "min_tokens": 1},
        "min_tokens is 1 and forbids every one of allowed_token_ids",
    ),
    (
        {"bad_words": ["a"], "allowed_token_ids": [LETTER]},
        "bad_words forbid every one of allowed_token_ids",
    ),
    (
        {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
        "skip_reading_prefix_cache is False",
    ),
    ({"watermarking": True}, "watermarking (watermarking=True): leave it out"),
]
IMPOSSIBLE = [*VLLMS_OWN, *OUR_OWN]


def asks(parameters: Sequence[dict[str, Any]]) -> list[Ask]:
    """The same prompt with each of these parameters."""
    return [Ask(prompt=PROMPT, params=params) for params in parameters]


def effects() -> list[dict[str, Any]]:
    """For each served parameter the request with it and the one without, and a plain one last."""
    pairs: list[dict[str, Any]] = []
    for name in SERVED:
        effect = EFFECTS[name]
        pairs += [{**effect.base, name: effect.value}, effect.base]
    return [*pairs, GREEDY]


@pytest.fixture(scope="module")
def ours() -> Replies:
    groups = [
        asks([*effects(), *SERVED_BY_V1_TOO]),
        asks(SEQUENCES),
        asks(RAISING),
        asks([GREEDY, *({**GREEDY, **params} for params, _ in IMPOSSIBLE), GREEDY]),
    ]
    return ask_engine(cached_model(ModelSpec()), ENGINE, groups, "mrv2")


@pytest.fixture(scope="module")
def v1s() -> Replies:
    groups = [asks([*effects(), *SERVED_BY_V1_TOO])]
    return ask_engine(cached_model(ModelSpec()), ENGINE, groups, "v1")


def test_each_engine_had_its_runner(ours: Replies, v1s: Replies) -> None:
    assert ours.runner_class == OURS
    assert v1s.runner_class == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"


def test_every_served_parameter_has_an_effect_to_show() -> None:
    assert set(EFFECTS) == refusals.SERVED_BY_RUNNER


def pair_of(replies: Replies, name: str) -> tuple[Reply, Reply, Reply]:
    """Return the reply with a parameter, the one without, and that of a plain greedy request."""
    effect_replies, place = replies.groups[0], 2 * SERVED.index(name)
    return effect_replies[place], effect_replies[place + 1], effect_replies[2 * len(SERVED)]


@pytest.fixture(params=["ours", "v1s"])
def replies(request: pytest.FixtureRequest) -> Replies:
    answered: Replies = request.getfixturevalue(request.param)
    return answered


@pytest.mark.parametrize("name", SERVED)
def test_a_parameter_has_its_effect(replies: Replies, name: str) -> None:
    assert EFFECTS[name].shows(*pair_of(replies, name))


@pytest.mark.parametrize("name", SERVED)
def test_a_parameter_that_is_ignored_would_be_seen(replies: Replies, name: str) -> None:
    _, without, plain = pair_of(replies, name)
    assert not EFFECTS[name].shows(without, without, plain)


def test_greedy_requests_give_v1s_tokens(ours: Replies, v1s: Replies) -> None:
    asked = [*effects(), *SERVED_BY_V1_TOO]
    compared = 0
    for params, mine, theirs in zip(asked, ours.groups[0], v1s.groups[0], strict=True):
        if params["temperature"] == 0.0 or params.get("extra_args") == {"keeps": 1}:
            assert (mine.token_ids, mine.finish_reasons) == (
                theirs.token_ids,
                theirs.finish_reasons,
            ), params
            compared += len(tokens(mine))
    assert compared > 300


def test_a_bad_word_without_a_logit_forbids_nothing(ours: Replies) -> None:
    index = next(i for i, params in enumerate(SERVED_BY_V1_TOO) if "_bad_words_token_ids" in params)
    plain, *too = ours.groups[0][2 * len(SERVED) :]
    assert tokens(too[index]) == tokens(plain)


def test_the_sequences_of_a_request_are_its_own_and_come_again(ours: Replies) -> None:
    first, again, *alone = ours.groups[1]
    assert len(first.token_ids) == 4
    assert first.token_ids == again.token_ids
    assert first.token_ids == [tokens(reply) for reply in alone]
    assert len(set(map(tuple, first.token_ids))) == 4


def test_a_processor_that_raises_fails_its_request_and_no_other(ours: Replies) -> None:
    plain, climbs, late, late_each, added, apply, after = ours.groups[2]
    climb = [THINKS + 1 + place for place in range(LENGTH)]
    assert tokens(plain) == tokens(after)
    assert (plain.finish_reasons, climbs.finish_reasons) == (["length"], ["length"])
    assert tokens(climbs) == climb
    for reply, kind, error, drawn in (
        (late, "Climbs", "RuntimeError: raises is 'late'", climb[:2]),
        (late_each, "ClimbsEach", "RuntimeError: raises is 'late'", climb[:2]),
        (added, "Climbs", "KeyError", []),
        (apply, "Climbs", "RuntimeError: raises is 'apply'", []),
    ):
        assert reply.finish_reasons == ["error"]
        assert f"processors.{kind} raised {error}" in reply.stop_reasons[0]
        assert tokens(reply) == drawn


@pytest.mark.parametrize(
    "index", range(len(IMPOSSIBLE)), ids=lambda i: next(iter(IMPOSSIBLE[i][0]))
)
def test_what_cannot_be_is_refused_as_the_clients_error(ours: Replies, index: int) -> None:
    params, message = IMPOSSIBLE[index]
    error = ours.groups[3][1 + index].error
    assert error is not None, params
    assert message in error
    assert "VLLMClientError" in error.split(":")[0].split()


def test_an_engine_that_refused_requests_goes_on(ours: Replies) -> None:
    before, *_, after = ours.groups[3]
    assert tokens(before) == tokens(after) == tokens(ours.groups[2][0])
