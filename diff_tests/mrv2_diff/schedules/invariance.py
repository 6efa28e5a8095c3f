"""Do requests return the same tokens however they are scheduled? One table that answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from mrv2_compat.vllm_v1.refusals import request_refusals
from mrv2_diff.schedules.actions import Arrive, Drain, Reset, Setup
from mrv2_diff.schedules.driver import Driver, sampling_params
from mrv2_diff.schedules.result import InvarianceResult, Row

_SETUP = Setup(max_num_reqs=32, max_num_tokens=2000, num_blocks=600, prefix_caching=False)
"""Room for everything at once; a way of scheduling takes away what it is about."""

_PARAMETERS: Mapping[str, Mapping[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "temperature, another seed": {"temperature": 0.8, "seed": 11},
    "top-k": {"temperature": 0.9, "options": {"top_k": 4}},
    "top-p": {"temperature": 0.9, "options": {"top_p": 0.7}},
    "min-p": {"temperature": 0.9, "options": {"min_p": 0.2}},
    "presence and frequency": {"options": {"presence_penalty": 0.7, "frequency_penalty": 0.4}},
    "repetition, random": {"temperature": 0.7, "options": {"repetition_penalty": 1.4}},
    "a least number of tokens": {"stop": 5, "options": {"min_tokens": 6}},
    "logit bias": {"options": {"logit_bias": {3: 2.5, 7: -4.0}}},
    "allowed tokens, random": {"temperature": 1.2, "options": {"allowed_token_ids": [1, 4, 9, 25]}},
    "all together": {
        "temperature": 0.9,
        "stop": 5,
        "options": {
            "presence_penalty": 0.5,
            "repetition_penalty": 1.2,
            "min_tokens": 4,
            "logit_bias": {2: 1.0},
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of scheduling the same requests."""

    name: str
    setup: Setup = _SETUP
    happens: str
    """Kind of event without which this way is none."""
    reset_after: int | None = None
    """Steps after which every request is preempted."""
    is_warm: bool = False
    """Whether the same requests ran before, and left their blocks in the prefix cache."""


WAYS: tuple[Way, ...] = (
    Way(name="all in one batch", happens="arrivals"),
    *(
        Way(
            name=f"{size} tokens a step",
            setup=replace(_SETUP, max_num_tokens=size),
            happens="chunks of a prompt",
        )
        for size in (3, 7, 16)
    ),
    *(
        Way(name=f"preempted after step {step}", happens="resumes", reset_after=step)
        for step in (1, 4, 9)
    ),
    Way(
        name="preempted for want of blocks",
        setup=replace(_SETUP, num_blocks=60, max_num_tokens=24),
        happens="resumes",
    ),
    Way(
        name="from a warm prefix cache",
        setup=replace(_SETUP, prefix_caching=True),
        happens="arrivals with a cached prefix",
        is_warm=True,
    ),
    Way(
        name="queued ahead of outputs",
        setup=replace(_SETUP, is_async=True),
        happens="steps queued ahead of an output",
    ),
    Way(
        name="queued ahead, chunked, scarce",
        setup=replace(_SETUP, is_async=True, num_blocks=44, max_num_tokens=30, max_num_reqs=8),
        happens="resumes",
    ),
)


def requests() -> tuple[list[Arrive], list[str]]:
    """Return the requests that are compared, and the parameters that the runner refuses."""
    served, refused = [], []
    for number, (name, fields) in enumerate(_PARAMETERS.items()):
        request = msgspec.convert(
            {
                "type": "Arrive",
                "name": name,
                "prefix": number % 2,
                "prefix_len": 9 + 2 * number,
                "tail": number,
                "tail_len": 1 + number % 4,
                "max_tokens": 14,
                **fields,
            },
            Arrive,
        )
        (refused.append(name) if request_refusals(sampling_params(request)) else
         served.append(request))  # fmt: skip
    return served, refused


def invariance() -> InvarianceResult:
    """Run every request alone, then all of them in every way."""
    served, refused = requests()
    alone = {request.name: _alone(request) for request in served}
    rows = [_row(way, served, alone) for way in WAYS]
    return InvarianceResult(num_requests=len(served), refused=refused, rows=rows)


def _alone(request: Arrive) -> list[int]:
    driver = Driver(replace(_SETUP, max_num_reqs=1), compares=False)
    driver.play([request, Drain()])
    return driver.ended[-1][1]


def _row(way: Way, served: Sequence[Arrive], alone: Mapping[str, Sequence[int]]) -> Row:
    driver = Driver(way.setup, compares=False)
    if way.is_warm:
        driver.play([*served, Drain()])
        driver.ended.clear()
    driver.play(served)
    if way.reset_after is not None:
        for _ in range(way.reset_after):
            driver.step()
        driver.do(Reset())
    driver.drain()
    found = dict(driver.ended)
    differing = {
        name: f"{name}: {found.get(name)}, alone {tokens}"
        for name, tokens in alone.items()
        if found.get(name) != tokens
    }
    return Row(
        way=way.name,
        happens=way.happens,
        times=driver.events.counts[way.happens],
        num_same=len(alone) - len(differing),
        differing=list(differing.values()),
    )
