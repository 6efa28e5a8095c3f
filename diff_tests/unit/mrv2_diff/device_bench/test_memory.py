"""Each phase of a start has what it left allocated and its peak above what was there before."""

from types import SimpleNamespace

import pytest
import torch

from mrv2_diff.device_bench.memory import PHASES, MemoryWatch, reported


class Device:
    """Memory of a made-up device of 1,000 bytes."""

    def __init__(self) -> None:
        self.held = self.peak = self.reserved = 0

    def take(self, size: int, *, beside: int = 0) -> None:
        """Allocate for good, and some more that goes at once."""
        self.peak = max(self.peak, self.held + size + beside)
        self.held += size
        self.reserved = max(self.reserved, self.peak)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    def reset() -> None:
        device.peak = device.held

    fakes = {
        "reset_peak_memory_stats": reset,
        "mem_get_info": lambda: (1000 - device.reserved, 1000),
        "memory_allocated": lambda: device.held,
        "memory_reserved": lambda: device.reserved,
        "max_memory_allocated": lambda: device.peak,
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return device


def test_phases_are_told_apart(device: Device) -> None:
    class Runner:
        def capture_model(self) -> int:
            device.take(20, beside=50)
            return 20

    class Worker:
        model_runner = Runner()

        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            device.take(100)

        def determine_available_memory(self) -> int:
            device.take(0, beside=300)
            return 5

        def initialize_from_config(self, config: object) -> None:
            device.take(400)

        def compile_or_warm_up_model(self) -> None:
            assert self.model_runner.capture_model() == 20

    watch, worker = MemoryWatch(Worker), Worker()
    worker.load_model(load_dummy_weights=False)
    assert worker.determine_available_memory() == 5
    worker.initialize_from_config(object())
    worker.compile_or_warm_up_model()
    assert list(watch.phases) == list(PHASES.values())
    left = {phase: sizes["allocated"] for phase, sizes in watch.phases.items()}
    assert left == {"weights": 100, "profile": 0, "kv": 400, "graphs": 20}
    peaks = {phase: sizes["peak"] for phase, sizes in watch.phases.items()}
    assert peaks == {"weights": 100, "profile": 300, "kv": 400, "graphs": 70}
    assert watch.captured == 20
    assert sum(sizes["device"] for sizes in watch.phases.values()) == device.reserved


def test_what_a_worker_does_not_say_is_left_out() -> None:
    worker = SimpleNamespace(
        peak_activation_memory=7.5, model_runner=SimpleNamespace(model_memory_usage=3)
    )
    assert reported(worker) == {"peak_activation_memory": 7, "model_memory_usage": 3}
