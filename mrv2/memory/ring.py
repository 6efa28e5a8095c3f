"""Host memory that a captured step writes its results into, a slot for each step in turn.

A graph bakes in every address, so a step that is replayed cannot copy to fresh memory. It writes
into pinned memory instead, at the slot that a counter on the device names, and the host counts
along. A slot comes round again after all others; a result that nobody has read by then is copied
out of it first.
"""

import weakref

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrv2.errors import ProtocolError
from mrv2.memory.transfers import Event
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp

REJECTED = -1
"""In a slot, in the place of a token that was rejected or never drawn."""

NUM_SLOTS = 8
"""Steps whose results may be unread at once. vLLM queues one step ahead."""


class Slot:
    """The results of one step, on their way.

    Args:
        values: [num_values] int64. The part of the ring that the step writes.
        may_reject: Whether it may leave `REJECTED` in the place of a request's token.
    """

    def __init__(self, values: Tensor, *, may_reject: bool = False) -> None:
        self.may_reject = may_reject
        self._values = values
        self._taken: list[int] | None = None
        self.ready: Event | None = None
        """Behind the step; None where nothing is ever late."""

    def take(self) -> list[int]:
        """Return the values, read at the first call; the step must have passed by then."""
        if self._taken is None:
            self._taken = self._values.tolist()
        return self._taken

    @property
    def is_late(self) -> bool:
        """Whether the step has not passed, as far as the host can tell without waiting."""
        ready = self.ready  # another thread may take it away
        return self._taken is None and ready is not None and not ready.query()


class ResultRing:
    """The slots, and the counter of the device.

    Args:
        num_values: Values of the largest step.
        device: Of the counter, and of what writes the slots.
    """

    def __init__(self, num_values: int, device: torch.device) -> None:
        self.values = torch.zeros(
            (NUM_SLOTS, num_values), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        """[NUM_SLOTS, num_values] int64, on the host. Kernels write it in place."""
        self.cursor = torch.zeros(1, dtype=torch.int32, device=device)
        """[1] int32. The slot of the step that runs next on the device."""
        self._num_begun = 0
        self._owners: list[weakref.ref[Slot] | None] = [None] * NUM_SLOTS

    def make_room(self) -> None:
        """Read what the next step's slot still holds.

        Raises:
            ProtocolError: The step that wrote it has not passed. Nothing has changed.
        """
        owner = self._owner_of_next()
        if owner is not None:
            if owner.is_late:
                raise ProtocolError(
                    f"{NUM_SLOTS} steps are queued, and the output of the first is not there yet; "
                    "wait for outputs before queueing more"
                )
            owner.take()

    def read_all(self) -> None:
        """Read what every slot still holds, before steps that are nobody's write over it.

        Raises:
            ProtocolError: A step that wrote one has not passed.
        """
        slots = [owner() for owner in self._owners if owner is not None]
        unread = [slot for slot in slots if slot is not None]
        if any(slot.is_late for slot in unread):
            raise ProtocolError("a step's output is not there yet; wait for it before capturing")
        for slot in unread:
            slot.take()

    def begin(self, num_values: int, *, may_reject: bool = False) -> Slot:
        """Return the slot of a step that is queued next; `make_room` came before.

        Args:
            num_values: Tokens that it writes.
            may_reject: As in `Slot`.
        """
        index = self._num_begun % NUM_SLOTS
        slot = Slot(self.values[index, :num_values], may_reject=may_reject)
        self._owners[index] = weakref.ref(slot)
        self._num_begun += 1
        return slot

    def restart(self) -> None:
        """Queue the counter's return to the host's count, after steps that were not begun here."""
        self._num_begun = 0
        self._owners = [None] * NUM_SLOTS
        self.cursor.zero_()

    def _owner_of_next(self) -> Slot | None:
        owner = self._owners[self._num_begun % NUM_SLOTS]
        return None if owner is None else owner()


@triton.jit(do_not_specialize=["num_values", "width"])
def _publish_kernel(  # noqa: PLR0913 - a kernel takes pointers and strides, not objects
    token_ids_ptr: tl.tensor,
    num_sampled_ptr: tl.tensor,
    num_values: tl.tensor,
    width: tl.tensor,
    cursor_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    ring_stride: tl.tensor,
    NONE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    cursor = tl.load(cursor_ptr)
    slot_ptr = ring_ptr + (cursor % SLOTS).to(tl.int64) * ring_stride
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < num_values
        kept = index % width < tl.load(num_sampled_ptr + index // width, mask=mask, other=0)
        token_id = tl.load(token_ids_ptr + index, mask=mask & kept, other=NONE)
        tl.store(slot_ptr + index, token_id, mask=mask)
    tl.debug_barrier()
    tl.store(cursor_ptr, (cursor + 1) % SLOTS)


def _publish_launch(token_ids: Tensor, num_sampled: Tensor, cursor: Tensor, ring: Tensor) -> Launch:
    num_reqs, width = token_ids.shape
    args = (token_ids, num_sampled, num_reqs * width, width, cursor, ring, ring.stride(0))
    # One program: the counter moves on when everything is written.
    sizes = {"NONE": REJECTED, "SLOTS": ring.shape[0], "BLOCK": 1024}
    return Launch(_publish_kernel, (1,), args, sizes)


def _publish_reference(
    token_ids: Tensor, num_sampled: Tensor, cursor: Tensor, ring: Tensor
) -> None:
    """Write a step's tokens into the slot that the counter names, and count.

    Args:
        token_ids: [num_reqs, 1 + k] int64, contiguous.
        num_sampled: [num_reqs] int32. `REJECTED` is written for what is behind these.
        cursor: [1] int32, of [0, num_slots). Advanced by one, modulo num_slots.
        ring: [num_slots, at least num_reqs * (1 + k)] int64. It may be pinned memory of the host.
    """
    slot = int(cursor)
    kept = torch.arange(token_ids.shape[1]) < num_sampled[:, None]
    ring[slot, : token_ids.numel()] = torch.where(kept, token_ids, REJECTED).flatten()
    cursor.fill_((slot + 1) % ring.shape[0])


publish = TwinOp(
    "memory.publish",
    reference=_publish_reference,
    launch=_publish_launch,
    mutates=frozenset({"cursor", "ring"}),
)
