"""Do requests return the same however they are scheduled? One table that answers."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from mrv2_compat.vllm_v1.requests.refusals import request_refusals
from mrv2_diff.parameters import PARAMETERS
from mrv2_diff.schedules.actions import Arrive, Drain, Reset, Setup
from mrv2_diff.schedules.driver import Driver, Logprobs, Turn
from mrv2_diff.schedules.params import sampling_params
from mrv2_diff.schedules.result import InvarianceResult, Row

# isort: split
import torch

_MAX_TOKENS = 14
_SOME = 0.3
"""How likely a request is to have each of the parameters."""


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.sample(range(Setup().vocab_size), count)


_DRAWN = sorted(
    ((place, row, value) for row in PARAMETERS for place, value in row.invariance.items()),
    key=itemgetter(0),
)
"""Parameters that a request may have, in order, and how the value of each is drawn."""


def _request(number: int) -> Arrive:
    """Return a request whose prompt and parameters were drawn from its number."""
    draw = random.Random(f"request {number}")
    asked = [
        (row, value(draw, partial(_tokens, draw)))
        for _, row, value in _DRAWN
        if draw.random() < _SOME
    ]
    options: dict[str, Any] = {row.attribute or row.name: value for row, value in asked}
    if "logprob_token_ids" in options:
        options.pop("logprobs", None)
    has_grammar = draw.random() < _SOME and all(row.goes_with_grammars for row, _ in asked)
    return Arrive(
        name=f"r{number}",
        prefix=number % 3,
        prefix_len=draw.randint(0, 30),
        tail=number,
        tail_len=draw.randint(1, 6),
        max_tokens=_MAX_TOKENS,
        stop=draw.randrange(Setup().vocab_size) if draw.random() < _SOME else None,
        temperature=draw.choice([0.0, 0.7, 1.0, 1.6]),
        seed=draw.getrandbits(63),
        options=options,
        grammar=number if has_grammar else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of scheduling the same requests."""

    name: str
    setup: Setup
    happens: str
    """Kind of event without which this way is none."""
    reset_after: int | None = None
    """Steps after which every request is preempted."""
    grammars_last: bool = False
    """Whether requests with a grammar come when the others have ended. A step that has one waits
    for the outputs before it, and nothing is queued ahead."""
    is_warm: bool = False
    """Whether the same requests ran before, and left their blocks in the prefix cache."""


def ways(num_requests: int) -> tuple[Way, ...]:
    """Return the ways of scheduling so many requests."""
    scale = max(1, num_requests // 12)
    # Room for everything at once; a way of scheduling takes away what it is about.
    ample = Setup(
        max_num_reqs=num_requests,
        max_num_tokens=64 * num_requests,
        num_blocks=16 * num_requests + 1,
        prefix_caching=False,
        thinking=True,
    )
    return (
        Way(name="all in one batch", setup=ample, happens="arrivals"),
        *(
            Way(
                name=f"{size * scale} tokens a step",
                setup=replace(ample, max_num_tokens=size * scale),
                happens="chunks of a prompt",
            )
            for size in (3, 7, 16)
        ),
        *(
            Way(
                name=f"preempted after step {step}",
                setup=ample,
                happens="resumes",
                reset_after=step,
            )
            for step in (1, 4, 9)
        ),
        Way(
            name="preempted for want of blocks",
            setup=replace(ample, num_blocks=5 * num_requests, max_num_tokens=24 * scale),
            happens="resumes",
        ),
        Way(
            name="from a warm prefix cache",
            setup=replace(ample, prefix_caching=True),
            happens="arrivals with a cached prefix",
            is_warm=True,
        ),
        Way(
            name="queued ahead of outputs",
            setup=replace(ample, is_async=True),
            grammars_last=True,
            happens="steps queued ahead of an output",
        ),
        Way(
            name="queued ahead, chunked, scarce",
            setup=replace(ample, is_async=True, num_blocks=44, max_num_tokens=30, max_num_reqs=8),
            happens="resumes",
        ),
    )


def requests(num_requests: int) -> tuple[list[Arrive], list[str]]:
    """Return the requests that are compared, and the names of those that the runner refuses."""
    drawn = [_request(number) for number in range(num_requests)]
    refused = {request.name for request in drawn if request_refusals(sampling_params(request))}
    return [request for request in drawn if request.name not in refused], sorted(refused)


def invariance(num_requests: int) -> InvarianceResult:
    """Run every request alone, then all of them in every way.

    Args:
        num_requests: How many; each has prompt and parameters of its own.
    """
    served, refused = requests(num_requests)
    alone = {request.name: _alone(request) for request in served}
    return InvarianceResult(
        num_requests=len(served),
        refused=refused,
        rows=[_row(way, served, alone) for way in ways(num_requests)],
        parameters=Counter(name for request in served for name in _parameters(request)),
    )


def _parameters(request: Arrive) -> list[str]:
    names = [name.strip("_") for name in request.options]
    names += ["temperature"] if request.temperature else []
    names += ["stop"] if request.stop is not None else []
    return names + (["grammar"] if request.grammar is not None else [])


def _alone(request: Arrive) -> Turn:
    setup = Setup(max_num_reqs=1, max_num_tokens=64, prefix_caching=False, thinking=True)
    driver = Driver(setup, compares=False)
    driver.play([request, Drain()])
    return driver.turns[request.name]


def _row(way: Way, served: Sequence[Arrive], alone: Mapping[str, Turn]) -> Row:
    driver = Driver(way.setup, compares=False)
    if way.is_warm:
        driver.play([*served, Drain()])
        driver.turns.clear()
    before = driver.events.counts[way.happens]  # a warming run does not count
    if way.grammars_last:
        driver.play([*(request for request in served if request.grammar is None), Drain()])
        driver.play([request for request in served if request.grammar is not None])
    else:
        driver.play(served)
    if way.reset_after is not None:
        for _ in range(way.reset_after):
            driver.step()
        driver.do(Reset())
    driver.drain()
    differing, difference = [], 0.0
    for name, turn in alone.items():
        found = driver.turns[name]
        if found.received != turn.received:
            differing.append(f"{name}: {found.received}, alone {turn.received}")
            continue
        apart = max(
            _apart(_joined(found.logprobs), _joined(turn.logprobs)),
            _apart(found.prompt_logprobs, turn.prompt_logprobs),
        )
        if math.isinf(apart):
            differing.append(f"{name}: its logprobs are of other tokens or ranks than alone")
        else:
            difference = max(difference, apart)
    return Row(
        way=way.name,
        happens=way.happens,
        times=driver.events.counts[way.happens] - before,
        num_same=len(alone) - len(differing),
        differing=differing,
        logprob_difference=difference,
    )


def _joined(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Return the logprobs of all tokens; a row has as many columns as the narrowest part."""
    if not parts:
        return None
    width = min(part[0].shape[1] for part in parts)
    return (
        torch.cat([part[0][:, :width] for part in parts]),
        torch.cat([part[1][:, :width] for part in parts]),
        torch.cat([part[2] for part in parts]),
    )


def _apart(ours: Logprobs | None, alone: Logprobs | None) -> float:
    """Return the largest difference of two values; infinity where tokens or ranks differ.

    A batch returns as many columns as its most demanding request wants: those of `alone` count.
    """
    if ours is None or alone is None:
        return 0.0 if ours is alone else math.inf
    width = alone[0].shape[1]
    ids, values, ranks = ours[0][:, :width], ours[1][:, :width], ours[2]
    if not (
        torch.equal(ids.long(), alone[0].long()) and torch.equal(ranks.long(), alone[2].long())
    ):
        return math.inf
    same = values == alone[1]  # infinities among them
    differences = (values - alone[1]).abs().masked_fill(same, 0.0)
    return float(differences.max()) if len(differences) else 0.0
