"""Bytes that a call allocates, on either device."""

import pytest
import torch

from mrv2_diff.instruments import MemoryMeter

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_peak_counts_what_a_call_gave_back_and_what_the_first_half_left(on: str) -> None:
    device = torch.device(on)
    held: list[torch.Tensor] = []

    def execute() -> None:
        held.append(torch.empty(2 * MEBIBYTE, dtype=torch.uint8, device=device))

    def sample() -> None:
        for _ in range(2):  # the second uses what the first gave back
            torch.empty(3 * MEBIBYTE, dtype=torch.uint8, device=device)

    meter = MemoryMeter(every=2, device=device)
    with meter:
        meter("candidate", 0, execute)
        meter("candidate", 0, sample)
        meter("candidate", 1, lambda: torch.empty(64 * MEBIBYTE, dtype=torch.uint8, device=device))
        meter("reference", 0, lambda: None)
    assert meter.memory("candidate", 7).step_peak_tensor_bytes == 5 * MEBIBYTE
    assert meter.memory("candidate", 7).state_held_bytes == 7
    assert meter.memory("reference", 0).step_peak_tensor_bytes == 0
