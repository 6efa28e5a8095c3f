"""Bytes that a call allocates, on either device, and times on a device that a stand-in tells."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrv2_diff.instruments import DeviceMeter, MemoryMeter

MEBIBYTE = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _meter(on: str, every: int = 1) -> tuple[MemoryMeter, list[torch.Tensor]]:
    return MemoryMeter(every=every, device=torch.device(on)), []


@pytest.mark.parametrize("on", DEVICES)
def test_a_peak_counts_what_a_call_gave_back_and_what_the_first_half_left(on: str) -> None:
    meter, held = _meter(on, every=2)
    device = meter.device

    def execute() -> None:
        held.append(torch.empty(2 * MEBIBYTE, dtype=torch.uint8, device=device))

    def sample() -> None:
        for _ in range(2):  # the second uses what the first gave back
            torch.empty(3 * MEBIBYTE, dtype=torch.uint8, device=device)

    def large() -> torch.Tensor:
        return torch.empty(64 * MEBIBYTE, dtype=torch.uint8, device=device)

    with meter:
        meter("candidate", 0, "execute", execute)
        meter("reference", 0, "execute", lambda: None)
        meter("candidate", 0, "sample", sample)
        meter("candidate", 5, "execute", large)  # of a window that is not measured
    memory = meter.memory("candidate", 7)
    assert memory.step_peak_tensor_bytes == 5 * MEBIBYTE
    assert memory.phases["execute"].peak_bytes == 2 * MEBIBYTE
    assert memory.state_held_bytes == 7
    assert meter.memory("reference", 0).step_peak_tensor_bytes == 0


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("stacks", [False, True])
def test_a_peak_names_the_operation_and_the_function(on: str, stacks: bool) -> None:
    meter, held = _meter(on)
    meter.stacks = stacks

    def greedy_allocation() -> None:
        held.append(torch.zeros(4 * MEBIBYTE, dtype=torch.uint8, device=meter.device))
        torch.ones(MEBIBYTE, dtype=torch.uint8, device=meter.device)

    with meter:
        meter("candidate", 0, "sample", greedy_allocation)
    (first, second) = meter.memory("candidate", 0).phases["sample"].held_by
    where = " in test_instruments.py: greedy_allocation" if stacks else ""
    assert (first.op, first.bytes) == (f"aten::zeros{where}", 4 * MEBIBYTE)
    assert (second.op.partition(" in ")[0], second.bytes) == ("aten::ones", MEBIBYTE)


def test_what_each_step_leaves_adds_up_and_what_is_freed_elsewhere_does_not() -> None:
    meter, leaked = _meter("cpu")
    kept: dict[str, torch.Tensor] = {}

    def leak() -> None:
        leaked.append(torch.empty(MEBIBYTE, dtype=torch.uint8))

    def replace() -> None:
        kept["last"] = torch.empty(MEBIBYTE, dtype=torch.uint8)

    with meter:
        for step in range(5):
            meter("candidate", step, "sample", leak)
            meter("reference", step, "sample", replace)
            kept.clear()  # between the calls
    assert meter.memory("candidate", 0).step_peak_tensor_bytes == 5 * MEBIBYTE
    assert meter.memory("reference", 0).step_peak_tensor_bytes == MEBIBYTE


class StandInTimer:
    """Says that each call took a millisecond more than the last one, and when it was read."""

    def __init__(self) -> None:
        self.calls = self.reads = 0

    def call(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        self.calls += 1
        number = self.calls

        def read() -> float:
            self.reads += 1
            return number / 1000

        return call(), read


def test_times_on_a_device_are_read_when_they_are_asked_for() -> None:
    timer = StandInTimer()
    meter = DeviceMeter(timer)
    assert meter("reference", 3, "execute", lambda: "logits") == "logits"
    meter("reference", 3, "sample", lambda: None)
    meter("candidate", 3, "execute", lambda: None)
    assert timer.reads == 0
    assert meter.seconds("reference", 3) == [0.001, 0.002]
    assert meter.seconds("candidate", 3) == [0.003]
    assert meter.seconds("candidate", 4) == []


@pytest.mark.gpu
def test_a_wait_of_the_device_is_its_time_and_not_its_hosts() -> None:
    from mrv2_diff.instruments import CudaTimer

    torch.cuda.synchronize()
    _, seconds = CudaTimer().call(lambda: torch.cuda._sleep(50_000_000))
    assert seconds() > 0.01
