"""Faults that are put into the runner from outside, one at a time, to see whether they are found.

Each names beforehand the first value of the step chain that must differ, and a case in which it
can. The runner has no switch for any of this: a fault replaces a method or one half of an op for as
long as it is applied.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mrv2 import output
from mrv2.batch import commit, inputs
from mrv2.memory.staged import StagedWriteTensor
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling import logprobs
from mrv2.sampling.logprobs import gather_logprobs
from mrv2.sampling.narrowing import Narrowing
from mrv2.state import block_tables
from mrv2.state.block_tables import BlockTables

Patch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault."""

    id: str
    title: str
    case: str
    """Case that must find it."""
    first: str
    """First value of the chain that must differ."""
    apply: Patch
    """Makes a context in which the runner has the fault."""


def _after(
    op: "TwinOp[...]", fault: Callable[[dict[str, Any]], None]
) -> AbstractContextManager[object]:
    """Let a fault change an op's arguments after its reference has run; CPU runs the reference."""
    reference = op.reference

    def faulty(*args: Any, **kwargs: Any) -> None:
        reference(*args, **kwargs)
        fault(dict(zip(op.parameters, args, strict=False)) | kwargs)

    return patch.object(op, "reference", faulty)


def _stale_row() -> AbstractContextManager[object]:
    return patch.object(BlockTables, "evict", lambda self, row: None)


def _off_by_one_position() -> AbstractContextManager[object]:
    return _after(inputs.gather_tokens, lambda arguments: arguments["positions"].add_(1))


def _slot_from_wrong_block() -> AbstractContextManager[object]:
    return _after(
        block_tables.slot_mapping,
        lambda arguments: arguments["slots"].add_(arguments["block_size"]),
    )


@contextmanager
def _lost_staged_write() -> Iterator[None]:
    apply_write = StagedWriteTensor.apply_write

    def faulty(self: StagedWriteTensor) -> None:
        del self._staged[-1:]
        apply_write(self)

    with patch.object(StagedWriteTensor, "apply_write", faulty):
        yield


def _sequence_length_one_short() -> AbstractContextManager[object]:
    return _after(inputs.gather_tokens, lambda arguments: arguments["seq_lens"].sub_(1))


def _swapped_logit_row() -> AbstractContextManager[object]:
    def swap(arguments: dict[str, Any]) -> None:
        indices: Tensor = arguments["logits_indices"]
        indices[:2] = indices[:2].flip(0)

    return _after(inputs.locate_logits, swap)


@contextmanager
def _wrong_rank() -> Iterator[None]:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        gathered = gather_logprobs(*args, **kwargs)
        return replace(gathered, ranks=gathered.ranks + 1)

    with patch.object(logprobs, "gather_logprobs", faulty):
        yield


@contextmanager
def _temperature_of_another_row() -> Iterator[None]:
    settle = Narrowing.settle

    def faulty(self: Narrowing, logits: Tensor, logit_rows: Tensor) -> None:
        settle(self, logits, logit_rows.roll(1))

    with patch.object(Narrowing, "settle", faulty):
        yield


def _token_committed_twice() -> AbstractContextManager[object]:
    def again(arguments: dict[str, Any]) -> None:
        rows, positions = arguments["logit_rows"], arguments["positions"]
        last = arguments["token_table"].shape[1] - 1
        arguments["token_table"][rows, (positions + 1).clamp(max=last)] = arguments["drawn"].to(
            torch.int32
        )
        arguments["num_computed_tokens"][rows] += 1

    return _after(commit.commit_step, again)


@contextmanager
def _resumed_keeps_old_block() -> Iterator[None]:
    admit = BlockTables.admit
    first_blocks: dict[str, int] = {}

    def faulty(self: BlockTables, row: int, arrival: Arrival) -> None:
        own = arrival.block_ids[0]
        old = first_blocks.setdefault(arrival.req_id, own[0])
        admit(self, row, replace(arrival, block_ids=([old, *own[1:]], *arrival.block_ids[1:])))

    with patch.object(BlockTables, "admit", faulty):
        yield


@contextmanager
def _outputs_in_another_order() -> Iterator[None]:
    split = output._split

    def faulty(*args: Any) -> Any:
        return list(reversed(split(*args)))

    with patch.object(output, "_split", faulty):
        yield


MUTANTS = (
    Mutant(
        id="stale-row",
        title="a row's blocks are not forgotten when its request leaves",
        case="lifecycle.abort_reuse",
        first="slots",
        apply=_stale_row,
    ),
    Mutant(
        id="off-by-one-position",
        title="every position is one too large",
        case="lifecycle.greedy",
        first="positions",
        apply=_off_by_one_position,
    ),
    Mutant(
        id="slot-from-wrong-block",
        title="slots point into the next block",
        case="lifecycle.greedy",
        first="slots",
        apply=_slot_from_wrong_block,
    ),
    Mutant(
        id="lost-staged-write",
        title="the last staged write of a step never reaches the device",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_lost_staged_write,
    ),
    Mutant(
        id="sequence-length-one-short",
        title="attention sees one token too few",
        case="lifecycle.greedy",
        first="seq_lens",
        apply=_sequence_length_one_short,
    ),
    Mutant(
        id="swapped-logit-row",
        title="two requests get each other's logits",
        case="lifecycle.greedy",
        first="logits",
        apply=_swapped_logit_row,
    ),
    Mutant(
        id="wrong-rank",
        title="ranks count one token too many",
        case="logprobs.counts",
        first="ranks",
        apply=_wrong_rank,
    ),
    Mutant(
        id="temperature-of-another-row",
        title="logits are divided by a neighbour's temperature",
        case="sampling.temperature_seeded",
        first="processed_logits",
        apply=_temperature_of_another_row,
    ),
    Mutant(
        id="token-committed-twice",
        title="a drawn token is appended, and counted, twice",
        case="lifecycle.greedy",
        first="positions",
        apply=_token_committed_twice,
    ),
    Mutant(
        id="outputs-in-another-order",
        title="the tokens of a step are returned to other requests",
        case="lifecycle.greedy",
        first="tokens",
        apply=_outputs_in_another_order,
    ),
    Mutant(
        id="resumed-keeps-old-block",
        title="a resumed request reads the first block that it held before",
        case="lifecycle.preemption",
        first="slots",
        apply=_resumed_keeps_old_block,
    ),
)
