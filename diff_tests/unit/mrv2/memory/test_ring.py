"""The ring: each step's slot, results that are read late, and steps that are queued too far."""

import gc

import pytest
import torch

from mrv2 import ProtocolError
from mrv2.memory.ring import NUM_SLOTS, REJECTED, ResultRing, Slot, publish

CPU = torch.device("cpu")


class Flag:
    """An event that passes when it is told to."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        raise AssertionError("the ring never waits")


def run_step(ring: ResultRing, values: list[int], ready: Flag | None = None) -> Slot:
    ring.make_room()
    slot = ring.begin(len(values))
    slot.ready = ready
    counts = torch.ones(len(values), dtype=torch.int32)
    publish(torch.tensor(values).unsqueeze(1), counts, ring.cursor, ring.values)
    return slot


def test_each_step_has_the_slot_that_the_device_writes() -> None:
    ring = ResultRing(3, CPU)
    for number in range(3 * NUM_SLOTS):
        slot = run_step(ring, [number, number + 1])
        assert slot.take() == [number, number + 1]


def test_results_outlive_their_slots() -> None:
    ring = ResultRing(2, CPU)
    slots = [run_step(ring, [number]) for number in range(5 * NUM_SLOTS)]
    assert [slot.take() for slot in slots] == [[number] for number in range(5 * NUM_SLOTS)]


def test_a_step_is_refused_while_the_results_in_its_slot_are_on_their_way() -> None:
    ring, ready = ResultRing(2, CPU), Flag()
    first = run_step(ring, [7], ready)
    others = [run_step(ring, [number], Flag()) for number in range(1, NUM_SLOTS)]
    with pytest.raises(ProtocolError, match=f"{NUM_SLOTS} steps are queued"):
        ring.make_room()
    ready.has_passed = True
    run_step(ring, [99])
    assert first.take() == [7]
    assert len(others) == NUM_SLOTS - 1


def test_a_slot_that_nobody_holds_is_free() -> None:
    ring = ResultRing(2, CPU)
    for _ in range(2 * NUM_SLOTS):
        run_step(ring, [1], Flag())
        gc.collect(0)


def test_a_restart_brings_host_and_device_together() -> None:
    ring = ResultRing(2, CPU)
    for number in range(3):  # as the runs of a capture, which the host does not count
        one = torch.ones(1, dtype=torch.int32)
        publish(torch.tensor([[number]]), one, ring.cursor, ring.values)
    ring.restart()
    assert run_step(ring, [5]).take() == [5]


def test_what_was_rejected_is_told_from_tokens() -> None:
    ring = ResultRing(6, CPU)
    slot = ring.begin(6, may_reject=True)
    tokens = torch.tensor([[0, 7, 8], [5, 6, 0]])
    publish(tokens, torch.tensor([1, 3], dtype=torch.int32), ring.cursor, ring.values)
    assert slot.take() == [0, REJECTED, REJECTED, 5, 6, 0]
