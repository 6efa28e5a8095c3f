"""What holds of a runner after every step, whatever happened to its requests.

`check_invariants` looks at host state alone, so it may be called while the device is behind;
`check_device` reads the device's rows, once they are up to date. Both go through every object of
the runner that is defined in `mrv2`, so state that a new feature adds is looked at without being
named here. `PoisonFreed` makes a stale read show: what a freed row holds is overwritten at once.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mrv2 import Arrival, GenerateHead, Runner, Sampling, Scheduled, StepPlan
from mrv2.features.prompt_logprobs import PromptScores
from mrv2.memory.arena import Arena
from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.ragged import MirroredLists
from mrv2.memory.transfers import Transfers
from mrv2.sampling.sampler import Sampler

POISON_BLOCK = 0
"""A block that the host never hands out; a freed row's table is full of it."""
_PLANS = (StepPlan, Scheduled, Arrival, Sampling)
"""What the host gave; its containers are the host's."""
_SPARE = 16
"""Entries that a container may have beyond the rows: groups, stages, staging buffers."""

_BY_SIZE = "runner._executor._graphs._captured"
"""Its entries are sizes of batches, as many as were captured at the start."""
_VIEWS = ("runner._parts.buffers._views", "runner._parts.buffers._shape")


class InvariantError(AssertionError):
    """An invariant does not hold.

    Args:
        name: Which one.
        what: What was seen.
    """

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        super().__init__(f"{name}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """What the host knows of a request that has a row."""

    num_computed: int
    """Tokens that will have run once everything queued has."""
    blocks: Sequence[Sequence[int]]
    """For each KV group."""
    token_ids: Sequence[int]
    """Those that the host has seen."""


LiveRequests = Mapping[str, LiveRequest]


class PoisonFreed:
    """Overwrites a row when its request leaves; a `RowState` that stands before all others."""

    def __init__(self, runner: Runner) -> None:
        self._requests, self._tables = runner.requests, runner.block_tables.tables
        self._num_tokens = runner.config.max_model_len
        self._groups = runner.config.kv_groups
        runner.lifecycle.states = (self, *runner.lifecycle.states)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Nothing: the row's new owner overwrites what it needs."""

    def evict(self, row: int) -> None:
        """Stage poison for the row's tokens, progress and blocks."""
        self._requests.token_ids.stage_write(row, 0, [-1] * (self._num_tokens + 1))
        self._requests.num_computed_tokens.stage_write(row, 0, [self._num_tokens - 1])
        self._requests.prompt_len.set(row, self._num_tokens)
        for table, group in zip(self._tables, self._groups, strict=True):
            table.stage_write(row, 0, [POISON_BLOCK] * group.max_blocks)

    def flush(self) -> None:
        """Nothing: the owners of the tensors flush them."""


def check_invariants(runner: Runner, live: LiveRequests, *, flushed: bool = True) -> None:
    """Raise where the runner's host state is not what its host knows.

    Args:
        runner: Between two steps.
        live: Requests with a row.
        flushed: Whether the last step ran something, so that nothing may be left staged.

    Raises:
        InvariantError: Named `rows`, `freed`, `counters`, `idle`, `staged` or `bounded`.
    """
    _check_rows(runner, live)
    _check_freed(runner)
    _check_counters(runner, live)
    _check_idle(runner)
    for path, value in owned(runner):
        if flushed:
            _check_staged(path, value)
        _check_bounded(path, value, runner, live)


def check_device(runner: Runner, scheduled: LiveRequests) -> None:
    """Raise where a row on the device is not what its host knows.

    Args:
        runner: With nothing queued that has not acted.
        scheduled: Requests that the last step ran. The device is told of another's progress only
            when it runs next.

    Raises:
        InvariantError: Named `idle` or `device`.
    """
    requests = runner.requests
    idle = requests.idle_row
    progress = int(requests.num_computed_tokens.tensor[idle])
    _require("idle", progress == 0, f"the idle row has computed {progress} tokens")
    for table in runner.block_tables.tables:
        held = table.tensor[idle].tolist()
        _require("idle", not any(held), f"the idle row has blocks {held}")
    for req_id, request in scheduled.items():
        row = runner.rows.row(req_id)
        seen = int(requests.num_computed_tokens.tensor[row])
        _require("device", seen == request.num_computed, f"{req_id!r} has computed {seen} tokens")
        tokens = requests.token_ids.tensor[row, : len(request.token_ids)].tolist()
        _require("device", tokens == list(request.token_ids), f"{req_id!r} has tokens {tokens}")
        for table, blocks in zip(runner.block_tables.tables, request.blocks, strict=True):
            held = table.tensor[row, : len(blocks)].tolist()
            _require("device", held == list(blocks), f"{req_id!r} has blocks {held}, not {blocks}")


def owned(runner: Runner) -> Iterator[tuple[str, object]]:
    """Yield what a runner holds, each object once, with the shortest path to it.

    Gone through are the attributes of objects of `mrv2`, and the entries of containers.
    """
    seen: set[int] = set()
    pending = deque[tuple[str, object]]([("runner", runner)])
    while pending:
        path, value = pending.popleft()
        if id(value) in seen and not _is_scalar(value):
            continue
        seen.add(id(value))
        yield path, value
        pending.extend((path + name, held) for name, held in _held(value))


def snapshot(runner: Runner) -> dict[str, object]:
    """Return a copy of every value that a runner holds, by path.

    Left out are what carries copies; scores of prompts, which are not whole before they are given
    away; and the views that a step of the last shape uses, of buffers that are looked at: a graph
    that is played makes views, too, whenever it runs.
    """
    left_out = (Transfers, PromptScores)
    carriers = [path for path, value in owned(runner) if isinstance(value, left_out)]
    values: dict[str, object] = {}
    for path, value in owned(runner):
        if path.startswith((*carriers, *_VIEWS)):
            continue
        if isinstance(value, Tensor):
            values[path] = value.numpy().tobytes()
        elif isinstance(value, np.ndarray | array):
            values[path] = value.tobytes()
        elif isinstance(value, dict | set | frozenset):
            values[path] = sorted(map(repr, value))
        elif isinstance(value, list | deque):
            values[path] = len(value)
        elif _is_scalar(value):
            values[path] = value
    return values


def _held(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", entry) for key, entry in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", entry) for index, entry in enumerate(value))
    elif type(value).__module__.split(".")[0] == "mrv2" and not isinstance(value, _PLANS):
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        names = [*getattr(value, "__dict__", ()), *slots]
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _require(name: str, holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(name, what)


def _check_rows(runner: Runner, live: LiveRequests) -> None:
    row_of, free = runner.rows._row_of, runner.rows._free
    _require("rows", set(row_of) == set(live), f"{sorted(row_of)} have rows, not {sorted(live)}")
    taken = sorted([*row_of.values(), *free])
    _require("rows", taken == list(range(runner.config.max_num_reqs)), f"rows are {taken}")


def _check_counters(runner: Runner, live: LiveRequests) -> None:
    counted, num_blocks = runner.requests.progress.upper, runner.block_tables._num_blocks
    _require("counters", bool((counted >= 0).all()), f"progress is {counted.tolist()}")
    _require("counters", bool((num_blocks >= 0).all()), f"blocks are {num_blocks.tolist()}")
    for req_id, request in live.items():
        row = runner.rows.row(req_id)
        held = num_blocks[:, row].tolist()
        expected = [len(blocks) for blocks in request.blocks]
        _require("counters", held == expected, f"{req_id!r} holds {held} blocks, not {expected}")


def _check_freed(runner: Runner) -> None:
    free = np.array(runner.rows._free, dtype=np.int32)
    if not len(free):
        return
    held = runner.block_tables._num_blocks[:, free]
    _require("freed", not held.any(), f"free rows {free.tolist()} hold blocks {held.tolist()}")
    counted = runner.requests.progress.upper[free]
    _require("freed", not counted.any(), f"free rows {free.tolist()} have run {counted.tolist()}")
    for part in _sampling_parts(runner):
        _require("freed", not part.wants(free), f"{part} has work for free rows {free.tolist()}")


def _sampling_parts(runner: Runner) -> tuple[Any, ...]:
    head = runner.head
    if not isinstance(head, GenerateHead):
        return ()
    return (*head.sampler._stages, head.sampler._logprobs)


def _check_idle(runner: Runner) -> None:
    idle = np.array([runner.requests.idle_row], dtype=np.int32)
    held = runner.block_tables._num_blocks[:, idle]
    _require("idle", not held.any(), f"the idle row holds {held.tolist()} blocks")
    counted = runner.requests.progress.upper[idle]
    _require("idle", not counted.any(), f"the idle row has run {counted.tolist()}")
    for part in _sampling_parts(runner):
        _require("idle", not part.wants(idle), f"{part} has work for the idle row")


def _check_staged(path: str, value: object) -> None:
    if isinstance(value, Arena):
        _require("staged", value.num_staged == 0, f"{path} holds {value.num_staged} writes")
    elif isinstance(value, MirroredTensor):
        _require("staged", value._first >= value._end, f"{path} was not flushed")
    elif isinstance(value, MirroredLists):
        _require("staged", not value._dirty, f"{path} was not flushed")
    elif isinstance(value, Sampler):
        _require("staged", not value._changed, f"{path} was not flushed")


def _check_bounded(path: str, value: object, runner: Runner, live: LiveRequests) -> None:
    if not isinstance(value, list | dict | set | deque) or path == _BY_SIZE:
        return
    bound = runner.config.max_num_reqs + _SPARE
    _require("bounded", len(value) <= bound, f"{path} has {len(value)} entries, of {bound} at most")
    keys: Any = value if isinstance(value, dict | set) else ()
    rows = {key for key in keys if type(key) is int}
    stale = rows - {runner.rows.row(req_id) for req_id in live}
    _require("bounded", not stale, f"{path} has entries for free rows {sorted(stale)}")
    ids = {key for key in keys if type(key) is str}
    if ids & set(live):  # other names are not those of requests
        stale_ids = sorted(ids - set(live))
        _require("bounded", not stale_ids, f"{path} has entries for {stale_ids}")
