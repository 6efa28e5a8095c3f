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
from mrv2.plan import Arrival, NextDecode, Scheduled, StepPlan, sampling_faults
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
    _check_lists(scheduled)
    total = sum(scheduled.num_tokens)
    if total > config.max_num_tokens:
        raise CapacityError(
            f"the step has {total} tokens; max_num_tokens is {config.max_num_tokens}"
        )
    found = _check_rows(plan, rows)
    _check_first_positions(plan)
    ends = list(map(add, scheduled.num_computed_tokens, scheduled.num_tokens))
    fits = (
        min(scheduled.num_tokens) > 0
        and min(scheduled.num_computed_tokens) >= 0
        and max(ends) <= config.max_model_len
        and all(map(le, ends, scheduled.num_known_tokens))
    )
    if not fits:
        _refuse_work(scheduled, config)
    return found, check_blocks(plan, np.array(ends, dtype=np.int32), found, rows, block_tables)


def check_blocks(
    plan: StepPlan, ends: Int32, found: Int32 | None, rows: RowTable, block_tables: BlockTables
) -> int:
    """Refuse tokens that no block is there for, the plan's new blocks counted in.

    Args:
        plan: Its events have not been applied.
        ends: [num_reqs] int32. Tokens of each scheduled request with this step's.
        found: [num_reqs] int32, their rows; None where the plan's events move some of them.
        rows: Finds the others.
        block_tables: Knows what each row holds.

    Returns:
        How many tokens more each scheduled request can run in its blocks.

    Raises:
        CapacityError: A request's blocks end before its tokens do.
    """
    req_ids = plan.scheduled.req_ids
    if found is None:
        held = _held_after(plan, rows, block_tables)
    else:  # no row changes hands
        going = plan.continuations
        held = block_tables.num_held(
            found,
            [rows.row(continuation.req_id) for continuation in going],
            [continuation.new_block_ids for continuation in going],
        )
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


def _held_after(plan: StepPlan, rows: RowTable, block_tables: BlockTables) -> Int32:
    """Return how many blocks the scheduled requests hold after the plan's events.

    [num_groups, num_reqs] int32.
    """
    req_ids = plan.scheduled.req_ids
    held = block_tables.num_held(rows.rows_if_live(req_ids))
    arriving = {arrival.req_id: arrival.block_ids for arrival in plan.arrivals}
    new = arriving | {going.req_id: going.new_block_ids for going in plan.continuations}
    if new:
        for index in [index for index, req_id in enumerate(req_ids) if req_id in new]:
            if req_ids[index] in arriving:
                held[:, index] = 0
            held[:, index] += [len(blocks) for blocks in new[req_ids[index]]]
    return held


def _refuse_work(scheduled: Scheduled | NextDecode, config: RunnerConfig) -> None:
    """Name the first request whose work does not fit."""
    for req_id, num_tokens, start, num_known in zip(
        scheduled.req_ids,
        scheduled.num_tokens,
        scheduled.num_computed_tokens,
        scheduled.num_known_tokens,
        strict=True,
    ):
        if not 0 <= start < start + num_tokens <= num_known:
            raise ProtocolError(
                f"request {req_id!r} is to run {num_tokens} tokens from position {start} on; "
                f"it has {num_known}"
            )
        if start + num_tokens > config.max_model_len:
            raise CapacityError(
                f"request {req_id!r} is to run up to token {start + num_tokens}; "
                f"max_model_len is {config.max_model_len}"
            )


def _check_lists(scheduled: Scheduled | NextDecode) -> None:
    num_reqs = len(scheduled.req_ids)
    lengths = (
        len(scheduled.num_tokens),
        len(scheduled.num_computed_tokens),
        len(scheduled.num_known_tokens),
    )
    if lengths != (num_reqs, num_reqs, num_reqs):
        raise ProtocolError(f"{num_reqs} requests are scheduled with lists of {lengths} entries")
    if len(set(scheduled.req_ids)) != num_reqs:
        twice = next(name for name, count in Counter(scheduled.req_ids).items() if count > 1)
        raise ProtocolError(f"request {twice!r} is scheduled twice in one step")


def _check_rows(plan: StepPlan, rows: RowTable) -> npt.NDArray[np.int32] | None:
    if not plan.arrivals and not plan.departed:
        # No row changes hands, so the look-up that the step needs anyway is the check.
        return rows.rows(plan.scheduled.req_ids)
    arriving = {arrival.req_id for arrival in plan.arrivals}
    scheduled = set(plan.scheduled.req_ids) - arriving
    absent = rows.absent(scheduled) | scheduled.intersection(plan.departed)
    if absent:
        req_id = next(name for name in plan.scheduled.req_ids if name in absent)
        raise ProtocolError(f"request {req_id!r} is scheduled but has no row")
    return None


def _check_first_positions(plan: StepPlan) -> None:
    if not plan.arrivals:
        return
    starts = dict(zip(plan.scheduled.req_ids, plan.scheduled.num_computed_tokens, strict=True))
    for arrival in plan.arrivals:
        start = starts.get(arrival.req_id, arrival.num_computed_tokens)
        if start != arrival.num_computed_tokens:
            raise ProtocolError(
                f"request {arrival.req_id!r} arrives with num_computed_tokens "
                f"{arrival.num_computed_tokens} and is to run from position {start}"
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
