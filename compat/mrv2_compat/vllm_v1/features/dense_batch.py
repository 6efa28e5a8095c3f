"""A dense batch whose changes are told in the words of V1's logits processors."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A request as processors see it."""

    req_id: str
    params: SamplingParams
    prompt: list[int]
    outputs: list[int]
    """Shared with the processors, and appended to."""
    failure: str | None = None
    """Why it is not shown to processors any more."""


def batch_update(batch: list[Member], wanted: Sequence[Member]) -> BatchUpdate | None:
    """Turn a batch into another in place, and return what a processor must be told.

    Indices stay dense. Added requests take the lowest indices that became free, then new ones; what
    is free after that is filled from the end; swaps bring the rest into the order that is wanted.
    An index that an added request took is not among the removed ones.

    Args:
        batch: The members before, by index; becomes `wanted`.
        wanted: The members after.

    Returns:
        None if nothing changed.
    """
    if len(batch) == len(wanted) and all(map(is_, batch, wanted)):
        return None
    staying, before = set(map(id, wanted)), set(map(id, batch))
    free = [index for index, member in enumerate(batch) if id(member) not in staying]
    slots: list[Member | None] = [member if id(member) in staying else None for member in batch]
    added, moved = [], []
    for member in wanted:
        if id(member) in before:
            continue
        index = free.pop(0) if free else len(slots)
        slots[index : index + 1] = [member]
        added.append((index, member.params, member.prompt, member.outputs))
    for index in free:
        while slots and slots[-1] is None:
            slots.pop()
        if index >= len(slots):
            break
        slots[index] = slots.pop()
        moved.append((len(slots), index, MoveDirectionality.UNIDIRECTIONAL))
    index_of = {id(member): index for index, member in enumerate(slots)}
    for index, member in enumerate(wanted):
        other = index_of[id(member)]
        if other != index:
            slots[index], slots[other] = slots[other], slots[index]
            index_of[id(slots[other])] = other
            moved.append((index, other, MoveDirectionality.SWAP))
    batch[:] = wanted
    return BatchUpdate(batch_size=len(wanted), removed=free[::-1], added=added, moved=moved)
