"""What a plan can get wrong, found before anything changes.

A plan that is refused leaves the runner as it was, so the host may send a better one. The checks
look at host values only; their cost grows with a step's requests, not with their tokens.
"""

from collections import Counter
from operator import add, le

import numpy as np
import numpy.typing as npt

from mrv2.config import RunnerConfig
from mrv2.errors import CapacityError, ConfigError, ProtocolError
from mrv2.params import sampling_faults
from mrv2.plan import Arrival, NextDecode, Scheduled, StepPlan
from mrv2.state.block_tables import BlockTables
from mrv2.state.rows import RowTable


def check_events(
    plan: StepPlan, config: RunnerConfig, rows: RowTable, block_tables: BlockTables
) -> None:
    """Refuse lifecycle events that cannot all be applied.

    Raises:
        CapacityError: More requests, tokens or blocks than there is room for.
        ConfigError: An arrival asks for what this runner cannot give.
        ProtocolError: A request arrives while it is live, or with counts beyond its tokens, or
            continues without a row.
    """
    if not plan.arrivals and not plan.continuations:
        return
    departed, arriving = set(plan.departed), set[str]()
    for arrival in plan.arrivals:
        req_id = arrival.req_id
        if req_id in arriving or (req_id in rows and req_id not in departed):
            raise ProtocolError(f"request {req_id!r} arrived twice; let it depart first")
        arriving.add(req_id)
        _check_arrival(arrival, config)
        block_tables.check(req_id, None, arrival.block_ids)
    if arriving:
        num_staying = len(rows) - sum(req_id in rows for req_id in departed)
        _check_room(num_staying, len(arriving), config.max_num_reqs)
    continuing = set[str]()
    for continuation in plan.continuations:
        req_id = continuation.req_id
        if req_id in arriving or req_id in departed or req_id in continuing:
            raise ProtocolError(f"request {req_id!r} continues in the step of another event of its")
        continuing.add(req_id)
        block_tables.check(req_id, rows.row(req_id), continuation.new_block_ids)


Int32 = npt.NDArray[np.int32]
_ABSENT = -1
"""In place of the row of a request that has none."""


def check_work(
    plan: StepPlan, config: RunnerConfig, rows: RowTable, block_tables: BlockTables
) -> tuple[Int32 | None, int]:
    """Refuse work that does not fit the requests as they are after the plan's events.

    Returns:
        [num_reqs] int32, the rows of the scheduled requests; None where the plan's events have yet
        to move some of them. And how many tokens more each of them can run in its blocks.

    Raises:
        CapacityError: More tokens than a step, a row or a request's blocks can hold.
        ProtocolError: A request has no row or is named twice, runs no token or one that is not
            known, or the parallel lists differ in length.
    """
    scheduled = plan.scheduled
    places = _check_lists(scheduled)
    total = sum(scheduled.num_tokens)
    if total > config.max_num_tokens:
        raise CapacityError(
            f"the step has {total} tokens; max_num_tokens is {config.max_num_tokens}"
        )
    moves = bool(plan.arrivals or plan.departed)
    found = _check_rows(plan, places, rows) if moves else rows.rows(scheduled.req_ids)
    _check_first_positions(plan, places)
    ends = list(map(add, scheduled.num_computed_tokens, scheduled.num_tokens))
    fits = (
        min(scheduled.num_tokens) > 0
        and min(scheduled.num_computed_tokens) >= 0
        and max(ends) <= config.max_model_len
        and all(map(le, ends, _runnable(scheduled, config)))
    )
    if not fits:
        _refuse_work(scheduled, config)
    held = _held_after(plan, places, found, rows, block_tables)
    room = _check_room_in_blocks(plan, np.array(ends, dtype=np.int32), held, block_tables)
    return None if moves else found, room


def check_blocks(
    plan: StepPlan, ends: Int32, found: Int32, rows: RowTable, block_tables: BlockTables
) -> int:
    """Refuse tokens that no block is there for, in a step in which no row changes hands.

    Args:
        plan: Its new blocks have not been appended; they count.
        ends: [num_reqs] int32. Tokens of each scheduled request with this step's.
        found: [num_reqs] int32, their rows.
        rows: Finds the rows of requests that are given blocks.
        block_tables: Knows what each row holds.

    Returns:
        How many tokens more each scheduled request can run in its blocks.

    Raises:
        CapacityError: A request's blocks end before its tokens do.
    """
    going = plan.continuations
    held = block_tables.num_held(
        found,
        [rows.row(continuation.req_id) for continuation in going],
        [continuation.new_block_ids for continuation in going],
    )
    return _check_room_in_blocks(plan, ends, held, block_tables)


def _check_room_in_blocks(
    plan: StepPlan, ends: Int32, held: Int32, block_tables: BlockTables
) -> int:
    """Return what `check_blocks` does, from the blocks that each request will hold."""
    req_ids = plan.scheduled.req_ids
    rooms = [
        held[index] * group.block_size - ends for index, group in enumerate(block_tables.groups)
    ]
    room = min((int(room.min()) for room in rooms), default=0)
    if room < 0:
        group, index = next((at, int(room.argmin())) for at, room in enumerate(rooms)
                            if room.min() < 0)  # fmt: skip
        raise CapacityError(
            f"request {req_ids[index]!r} is to run up to token {ends[index]}; its "
            f"{held[group, index]} blocks of KV group {group} hold "
            f"{held[group, index] * block_tables.groups[group].block_size}: give it more blocks"
        )
    return room


def _held_after(
    plan: StepPlan,
    places: dict[str, int],
    found: Int32,
    rows: RowTable,
    block_tables: BlockTables,
) -> Int32:
    """Return how many blocks the scheduled requests hold after the plan's events.

    Args:
        plan: Its events have not been applied.
        places: Where each request is in the step.
        found: [num_reqs] int32. Their rows; any for those that arrive.
        rows: Finds the rows of requests that are given blocks.
        block_tables: Knows what each row holds.

    Returns:
        [num_groups, num_reqs] int32.
    """
    held = block_tables.num_held(found)
    given = [(places.get(arrival.req_id), arrival.block_ids) for arrival in plan.arrivals]
    held[:, [place for place, _ in given if place is not None]] = 0
    given += [(places.get(going.req_id), going.new_block_ids) for going in plan.continuations]
    scheduled = [(place, blocks) for place, blocks in given if place is not None]
    if scheduled:
        counts = [[len(blocks) for blocks in block_ids] for _, block_ids in scheduled]
        held[:, [place for place, _ in scheduled]] += np.array(counts, dtype=np.int32).T
    return held


def _runnable(scheduled: Scheduled | NextDecode, config: RunnerConfig) -> list[int]:
    """Return how many tokens each request could have run after the step: drafts count."""
    known = scheduled.num_known_tokens
    if not config.max_drafts:
        return known
    return [num_known + config.max_drafts for num_known in known]


def _refuse_work(scheduled: Scheduled | NextDecode, config: RunnerConfig) -> None:
    """Name the first request whose work does not fit."""
    for req_id, num_tokens, start, num_known in zip(
        scheduled.req_ids,
        scheduled.num_tokens,
        scheduled.num_computed_tokens,
        scheduled.num_known_tokens,
        strict=True,
    ):
        if not 0 <= start < start + num_tokens <= num_known + config.max_drafts:
            drafts = f", and {config.max_drafts} drafts (max_drafts)" if config.max_drafts else ""
            raise ProtocolError(
                f"request {req_id!r} is to run {num_tokens} tokens from position {start} on; "
                f"it has {num_known}{drafts}"
            )
        if start + num_tokens > config.max_model_len:
            raise CapacityError(
                f"request {req_id!r} is to run up to token {start + num_tokens}; "
                f"max_model_len is {config.max_model_len}"
            )


def _check_lists(scheduled: Scheduled | NextDecode) -> dict[str, int]:
    """Return where each request is in the step."""
    num_reqs = len(scheduled.req_ids)
    lengths = (
        len(scheduled.num_tokens),
        len(scheduled.num_computed_tokens),
        len(scheduled.num_known_tokens),
    )
    if lengths != (num_reqs, num_reqs, num_reqs):
        raise ProtocolError(f"{num_reqs} requests are scheduled with lists of {lengths} entries")
    places = dict(zip(scheduled.req_ids, range(num_reqs), strict=True))
    if len(places) != num_reqs:
        twice = next(name for name, count in Counter(scheduled.req_ids).items() if count > 1)
        raise ProtocolError(f"request {twice!r} is scheduled twice in one step")
    return places


def _check_rows(plan: StepPlan, places: dict[str, int], rows: RowTable) -> Int32:
    """Return the rows of the scheduled requests, any for those that arrive."""
    found = rows.rows_if_live(plan.scheduled.req_ids)
    found[[places[req_id] for req_id in plan.departed if req_id in places]] = _ABSENT
    found[[places[each.req_id] for each in plan.arrivals if each.req_id in places]] = 0
    if found.min() == _ABSENT:
        req_id = plan.scheduled.req_ids[int(found.argmin())]
        raise ProtocolError(f"request {req_id!r} is scheduled but has no row")
    return found


def _check_first_positions(plan: StepPlan, places: dict[str, int]) -> None:
    starts = plan.scheduled.num_computed_tokens if plan.arrivals else ()
    for arrival in plan.arrivals:
        place = places.get(arrival.req_id)
        if place is not None and starts[place] != arrival.num_computed_tokens:
            raise ProtocolError(
                f"request {arrival.req_id!r} arrives with num_computed_tokens "
                f"{arrival.num_computed_tokens} and is to run from position {starts[place]}"
            )


def _check_arrival(arrival: Arrival, config: RunnerConfig) -> None:
    num_tokens = len(arrival.token_ids)
    if not 0 < num_tokens <= config.max_model_len:
        raise CapacityError(
            f"request {arrival.req_id!r} arrives with {num_tokens} tokens; it needs at least one, "
            f"and max_model_len is {config.max_model_len}"
        )
    for name, value in (
        ("num_computed_tokens", arrival.num_computed_tokens),
        ("prompt_len", arrival.prompt_len),
    ):
        if not 0 <= value <= num_tokens:
            raise ProtocolError(
                f"request {arrival.req_id!r} arrives with {name} {value}; "
                f"it has {num_tokens} tokens"
            )
    sampling = arrival.sampling
    faults = sampling_faults(sampling, config.vocab_size, has_markers=config.thinking is not None)
    given, prompt_len = arrival.num_computed_tokens, arrival.prompt_len
    if sampling.num_prompt_logprobs is not None and given and num_tokens == prompt_len:
        # Outputs that came back with the request would mean that these had been returned.
        faults.append(
            f"num_prompt_logprobs is {sampling.num_prompt_logprobs}, and {given} tokens of the "
            "prompt are computed already: let it run from its first token"
        )
    if faults:
        raise ConfigError(f"request {arrival.req_id!r} cannot be served: {'; '.join(faults)}")


def _check_room(num_staying: int, num_arriving: int, max_num_reqs: int) -> None:
    if num_staying + num_arriving > max_num_reqs:
        raise CapacityError(
            f"{num_arriving} requests arrive and {num_staying} stay, "
            f"but all rows are {max_num_reqs} (max_num_reqs)"
        )
