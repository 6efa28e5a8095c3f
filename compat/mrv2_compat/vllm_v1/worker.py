"""vLLM's workers with our runner inside: the construction of the runner is replaced, nothing else.

`CpuWorker` and `CudaWorker` are made when they are first asked for, because importing vLLM's CPU
worker replaces functions of torch in the whole process, and must happen in no other than a CPU
worker's.

On CUDA vLLM has a method for this. On CPU it builds V1's runner in the middle of `init_device`, so
that runner is built first and dropped: at start, once, for the memory of its input tables
(`max_num_seqs` x `max_model_len` token ids and some) and some milliseconds. Nothing that it does in
its constructor outlives it but vLLM's weight offloader, which is a null one because offloading is
refused. The alternatives are a copy of the method or a patch of vLLM.
"""

import gc
import os
from functools import cache
from typing import Any

from mrv2_compat.vllm_v1 import versions

CPU_WORKER = "CpuWorker"
CUDA_WORKER = "CudaWorker"


def __getattr__(name: str) -> Any:
    """Make `CpuWorker` or `CudaWorker` when it is first asked for."""
    if name == CPU_WORKER:
        return _cpu_worker()
    if name == CUDA_WORKER:
        return _cuda_worker()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _cpu_worker() -> type:
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CpuWorker(CPUWorker):
        """vLLM's CPU worker, running mrv2."""

        def init_device(self) -> None:
            super().init_device()
            self.model_runner = None
            gc.collect()  # V1's runner refers to itself; its tables would count as used memory
            self.model_runner = make_runner(self.vllm_config, self.device)

        def mrv2_report(self) -> dict[str, object]:
            """Return which runner this worker has and what it did (an RPC)."""
            return report(self.model_runner)

    CpuWorker.__qualname__ = CPU_WORKER
    return CpuWorker


@cache
def _cuda_worker() -> type:
    from vllm.v1.worker.gpu_worker import Worker

    class CudaWorker(Worker):
        """vLLM's CUDA worker, running mrv2."""

        def _make_model_runner(self) -> Any:
            return make_runner(self.vllm_config, self.device)

        def mrv2_report(self) -> dict[str, object]:
            """Return which runner this worker has and what it did (an RPC)."""
            return report(self.model_runner)

    CudaWorker.__qualname__ = CUDA_WORKER
    return CudaWorker


def make_runner(vllm_config: Any, device: Any) -> Any:
    """Build our runner and say which class and version it is."""
    from vllm.logger import init_logger

    from mrv2_compat.vllm_v1.runner import VllmRunner

    runner = VllmRunner(vllm_config, device)
    # A child of vLLM's logger: no other has a handler.
    init_logger(f"vllm.{__name__}").info(
        "runner: mrv2 %s class %s on %s", versions.runner_version(), class_name(runner), device
    )
    return runner


def report(runner: Any) -> dict[str, object]:
    """Return the evidence of which runner ran: class, version, steps by kind, process."""
    return {
        "runner_class": class_name(runner),
        "mrv2_version": versions.runner_version(),
        "steps_executed": runner.steps_executed,
        "steps_by_mode": runner.steps_by_mode,
        "pid": os.getpid(),
    }


def class_name(value: object) -> str:
    """Return the dotted name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
