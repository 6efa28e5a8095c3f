"""The small form of a case: what is left of it for a runner that takes 0.1 to 0.3 s a step.

The rule, for every case alike:

- Cases: those in lockstep with a greedy request and without a grammar, whose masks V2 applies by a
  kernel that Triton's interpreter refuses.
- Requests: the greedy ones only, so that every runner must draw the same tokens; at most
  `MAX_REQUESTS`: the first with each set of parameters, then those that are aborted, then others.
  Where none of these is aborted, no abort is expected.
- Steps: what arrives or is aborted does so within `LAST_EVENT` steps, in the same proportions; no
  request has more than `MAX_OUTPUTS` tokens, or must have more than half of them. So nearly all end
  within `MAX_STEPS`.
- Prompts stay whole: chunks and cached prefixes depend on them.
- Where V1 is expected to leave the right values, it may, and need not.
- Where a case expects preemptions, there are `SHARE_OF_BLOCKS` of the blocks that its requests need
  at their ends, no less than what one needs; and each prompt is cut to end `BEFORE_BLOCK` tokens
  before a block does, so that requests soon want another one; and all arrive at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mrv2_diff.case import Abort, Add, Case, EngineSpec, Event

MAX_REQUESTS = 4
MAX_OUTPUTS = 10
SCORED_OUTPUTS = 9
"""Of a request with prompt logprobs where preemptions are expected: it takes the most steps."""
LAST_EVENT = 8
MAX_STEPS = 30
"""Of one pass; a longer one is still judged, and its record says so."""
SHARE_OF_BLOCKS = Fraction(1, 2)
LEAST_BLOCKS = 6
"""Enough for the longest request of the noise floor's probe."""

BEFORE_BLOCK = 2

REMARK = f"in its small form, at most {MAX_REQUESTS} greedy requests of {MAX_OUTPUTS} tokens"


def has_small_form(case: Case) -> bool:
    """Whether anything is left of a case: a greedy request, in lockstep, and no grammar."""
    events = case.workload()
    return case.apart is None and bool(_adds(events)) and not any(map(_has_grammar, events))


def is_small(case: Case) -> bool:
    """Whether a case is in its small form already."""
    return case.remark.startswith(REMARK)


def small_form(case: Case) -> Case:
    """Return a case cut down; one that is small already stays as it is.

    Raises:
        ValueError: Nothing is left of it.
    """
    if is_small(case):
        return case
    if not has_small_form(case):
        raise ValueError(f"{case.id} has no greedy request that runs in lockstep, or has a grammar")
    events = _small_workload(case.workload())
    engine = case.engine
    if "preemptions" in case.expects:
        events = tuple(_cut_before_block(event, engine.block_size) for event in events)
        engine = _tight(events, engine)
    expects = case.expects
    if not any(isinstance(event, Abort) for event in events):
        expects -= {"aborts"}
    departure = case.departure
    if departure is not None:
        departure = replace(departure, is_certain=False)
    remark = f"{REMARK}; {case.remark}" if case.remark else REMARK
    return replace(
        case,
        workload=lambda: events,
        engine=engine,
        expects=expects,
        remark=remark,
        departure=departure,
    )


def _has_grammar(event: Event) -> bool:
    return isinstance(event, Add) and bool(event.further.get("structured_outputs"))


def _adds(events: Sequence[Event]) -> list[Add]:
    return [event for event in events if isinstance(event, Add) and event.temperature == 0.0]


def _small_workload(events: tuple[Event, ...]) -> tuple[Event, ...]:
    adds, aborts = _adds(events), _aborts(events)
    firsts = list({(add.logprobs, add.options): add for add in reversed(adds)}.values())[::-1]
    aborted = [add for add in adds if id(add) in aborts]
    by_rank = list({id(add): add for add in (*firsts, *aborted, *adds)}.values())[:MAX_REQUESTS]
    chosen = {id(add) for add in by_rank} | {id(aborts.get(id(add))) for add in by_rank}
    kept = [event for event in events if id(event) in chosen]
    begin, end = kept[0].step, kept[-1].step
    pace = Fraction(min(LAST_EVENT, end - begin), max(1, end - begin))
    return tuple(_cut(event, int((event.step - begin) * pace)) for event in kept)


def _aborts(events: Sequence[Event]) -> dict[int, Abort]:
    """Return the abort of each request, by the identity of its arrival; ids are used again."""
    latest: dict[str, Add] = {}
    found: dict[int, Abort] = {}
    for event in events:
        if isinstance(event, Add):
            latest[event.req_id] = event
        elif event.req_id in latest:
            found[id(latest.pop(event.req_id))] = event
    return found


def _cut(event: Event, step: int) -> Event:
    if isinstance(event, Abort):
        return replace(event, step=step)
    options = tuple(
        (name, min(value, MAX_OUTPUTS // 2) if isinstance(value, int) else value)
        if name == "min_tokens"
        else (name, value)
        for name, value in event.options
    )
    return replace(event, step=step, max_tokens=min(event.max_tokens, MAX_OUTPUTS), options=options)


def _cut_before_block(event: Event, block_size: int) -> Event:
    if isinstance(event, Abort):
        return event
    length = (len(event.prompt) + BEFORE_BLOCK) // block_size * block_size - BEFORE_BLOCK
    outputs = SCORED_OUTPUTS if event.further.get("prompt_logprobs") is not None else MAX_OUTPUTS
    return replace(
        event,
        step=0,
        prompt=event.prompt[: length if length > 0 else None],
        max_tokens=min(event.max_tokens, outputs),
    )


def _tight(events: Sequence[Event], engine: EngineSpec) -> EngineSpec:
    """Return an engine with too few blocks for all requests at once; one is vLLM's own."""
    needs = [
        -(-(len(event.prompt) + event.max_tokens) // engine.block_size)
        for event in events
        if isinstance(event, Add)
    ]
    share = int(sum(needs) * SHARE_OF_BLOCKS)
    usable = max(LEAST_BLOCKS, *needs, share - share % 2)  # even: cases then share engines
    num_groups = len(set(engine.model.layer_types))
    return replace(
        engine,
        num_blocks=1 + num_groups * usable,
        max_model_len=min(engine.max_model_len, usable * engine.block_size),
    )
