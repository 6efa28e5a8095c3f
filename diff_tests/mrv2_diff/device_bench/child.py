"""The program of one runner's process: it holds one engine and answers its parent, line by line.

usage: python -m mrv2_diff.device_bench.child READ_FD WRITE_FD

Each line is a JSON object. A command names itself under `do`; the answer is its result, or `error`
with a traceback, after which the process ends.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from mrv2_diff.device_bench.points import Point, Workload
from mrv2_diff.environment import collect

if TYPE_CHECKING:
    from mrv2_diff.device_bench.stepper import Stepper

_PR_SET_PDEATHSIG = 1

Answer = dict[str, Any]


class Child:
    """What a parent may ask for."""

    def __init__(self) -> None:
        self._stepper: Stepper | None = None
        self._memory: Any = None

    def load(self) -> Answer:
        """Import vLLM, which takes the longest beside the start of an engine."""
        import torch
        from vllm.platforms import current_platform

        from mrv2_diff.device_bench import stepper  # noqa: F401  (what start needs)

        device = str(current_platform.device_type)
        if device == "cuda":
            from vllm.v1.worker.gpu_worker import Worker

            from mrv2_diff.device_bench.memory import MemoryWatch

            self._memory = MemoryWatch(Worker)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        return {"device": device, "environment": collect(device)}

    def start(self, engine: dict[str, Any]) -> Answer:
        """Start the engine and say what it is."""
        from mrv2_diff.device_bench.memory import reported
        from mrv2_diff.device_bench.stepper import Stepper

        began = time.monotonic()
        stepper = self._stepper = Stepper(engine)
        config = stepper.engine.vllm_config
        cache = config.cache_config
        runner = type(stepper.runner)
        captured = self._memory.captured if self._memory is not None else None
        return {
            "runner_class": f"{runner.__module__}.{runner.__qualname__}",
            "start_s": time.monotonic() - began,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "block_size": cache.block_size,
            "num_gpu_blocks": cache.num_gpu_blocks,
            "kv_tokens": cache.num_gpu_blocks * cache.block_size,
            "memory": self._memory.phases if self._memory is not None else None,
            "memory_reported": {
                **reported(stepper.worker),
                **({"captured": captured} if captured is not None else {}),
            },
        }

    def record(self, point: dict[str, Any], steps: int) -> Answer:
        """Run a block once, unmeasured, and return the hash of what the scheduler sent."""
        return {"stream": self._require().record(Point(**point), steps)}

    def block(self, point: dict[str, Any], steps: int) -> Answer:
        """Run a measured block of the whole engine."""
        return self._require().block(Point(**point), steps)

    def replay(self, point: dict[str, Any], steps: int) -> Answer:
        """Run a measured block of the runner alone."""
        return self._require().replay(Point(**point), steps)

    def profile(self, point: dict[str, Any], steps: int) -> Answer:
        """Run a traced block."""
        found = self._require().profile(Point(**point), steps)
        return {**asdict(found), "num_calls": found.num_calls}

    def throughput(self, workload: dict[str, Any], stream: bool) -> Answer:
        """Run a workload end to end."""
        return self._require().throughput(Workload(**workload), stream=stream)

    def forget(self) -> Answer:
        """Let go of recorded traces."""
        self._require().forget()
        return {}

    def _require(self) -> "Stepper":
        if self._stepper is None:
            raise RuntimeError("there is no engine yet; send start first")
        return self._stepper


def serve(requests: IO[str], answers: IO[str], handlers: dict[str, Callable[..., Answer]]) -> None:
    """Answer until the parent closes its end; after an error, say it and stop."""
    for line in requests:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = handlers[name](**command)
        except Exception:  # noqa: BLE001  (the parent is told, whatever it was)
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer:
            return


def _end_with_parent() -> None:
    """Have the kernel end this process where its parent dies, in the middle of a step too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve the two pipes that the arguments name."""
    _end_with_parent()
    child = Child()
    names = ("load", "start", "record", "block", "replay", "profile", "throughput", "forget")
    handlers = {name: getattr(child, name) for name in names}
    with os.fdopen(int(sys.argv[1])) as requests, os.fdopen(int(sys.argv[2]), "w") as answers:
        serve(requests, answers, handlers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's teardown can hang, and there is nothing left to keep


if __name__ == "__main__":
    main()
