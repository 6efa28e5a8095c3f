"""Device memory by phase of a worker's start, taken from outside so that it means the same for all.

vLLM's worker goes through four calls: it loads the weights, runs the largest step to see its peak,
allocates the KV cache, and warms up and captures.
"""

from typing import Any

import torch

PHASES = {
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv",
    "compile_or_warm_up_model": "graphs",
}
"""Methods of vLLM's CUDA worker, in order, and the phase that each one is."""

_REPORTED = (
    "total_consumed",
    "peak_activation_memory",
    "non_torch_memory",
    "cudagraph_memory_estimate",
    "available_kv_cache_memory_bytes",
)
"""What the worker itself says, where it does."""


class MemoryWatch:
    """Takes what each phase of a start leaves allocated, and its peak.

    Args:
        worker_class: vLLM's worker for CUDA; its methods are replaced.
    """

    def __init__(self, worker_class: Any) -> None:
        self.phases: dict[str, dict[str, int]] = {}
        self.captured: int | None = None
        """Bytes that the runner says its graphs took, to set beside what it estimated."""
        for method, phase in PHASES.items():
            setattr(worker_class, method, self._watched(getattr(worker_class, method), phase))

    def _watched(self, call: Any, phase: str) -> Any:
        def watched(worker: Any, *arguments: Any, **named: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            free, _ = torch.cuda.mem_get_info()
            held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            if phase == "graphs":
                self._watch_capture(worker.model_runner)
            result = call(worker, *arguments, **named)
            torch.cuda.synchronize()
            self.phases[phase] = {
                "device": free - torch.cuda.mem_get_info()[0],
                "allocated": torch.cuda.memory_allocated() - held,
                "reserved": torch.cuda.memory_reserved() - reserved,
                "peak": torch.cuda.max_memory_allocated() - held,
            }
            return result

        return watched

    def _watch_capture(self, runner: Any) -> None:
        capture = runner.capture_model

        def watched(*arguments: Any, **named: Any) -> Any:
            result = capture(*arguments, **named)
            self.captured = int(result) if isinstance(result, int | float) else None
            return result

        runner.capture_model = watched


def reported(worker: Any) -> dict[str, int]:
    """Return the bytes that a worker and its runner say they take, as far as they say it."""
    found = {name: getattr(worker, name, None) for name in _REPORTED}
    found["model_memory_usage"] = getattr(worker.model_runner, "model_memory_usage", None)
    return {name: int(value) for name, value in found.items() if value is not None}
