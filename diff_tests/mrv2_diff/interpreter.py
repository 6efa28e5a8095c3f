"""Triton on a CPU for the whole process, under its interpreter, so that vLLM's own V2 runner runs.

vLLM uses Triton where one of its backends says that it can serve the device. The wheel has none for
a CPU, though its interpreter needs none. So one is named here that compiles nothing, before vLLM
looks. Everything in such a process runs interpreted, V1's and our kernels too: it is for values,
never for times.
"""

import os
import sys
from typing import Any

VARIABLE = "TRITON_INTERPRET"
_LIMITS = {"VLLM_MAX_NUM_BAD_WORDS": "1024", "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "4096"}
"""V2's own limits, below what V1 and the cases have; both are settings of vLLM."""


def prepare() -> None:
    """Interpret all Triton kernels of this process, and let vLLM find a backend for the CPU.

    Call it before anything imports Triton's kernels or vLLM.

    Raises:
        ConfigError: It is too late, or this machine has a CUDA device, on which vLLM would run.
    """
    if is_prepared():
        return
    late = [name for name in ("vllm", "mrv2.ops.twin") if name in sys.modules]
    if late:
        raise _refusal(
            f"{late[0]} is imported already, and vllm-v2 needs a process that interprets Triton "
            "from its start: run it by itself, mrv2-diff run --pair v1,vllm-v2"
        )
    import torch  # a second; only this command needs it before vLLM does

    if torch.cuda.is_available():
        raise _refusal(
            "vllm-v2 in the lockstep runs on a CPU, under Triton's interpreter, and this machine "
            "has a CUDA device; hide it: CUDA_VISIBLE_DEVICES= mrv2-diff run ..."
        )
    os.environ[VARIABLE] = "1"
    for name, limit in _LIMITS.items():
        os.environ.setdefault(name, limit)
    _backends()["cpu"] = _backend()


def is_prepared() -> bool:
    """Whether this process interprets Triton and has a backend for the CPU."""
    return (
        os.environ.get(VARIABLE) == "1"
        and "triton.backends" in sys.modules
        and "cpu" in _backends()
    )


def _refusal(message: str) -> Exception:
    from mrv2.errors import ConfigError  # imports kernels, which must come after the variable

    return ConfigError(message)


def _backends() -> dict[str, Any]:
    import triton.backends  # untyped, and a second to import

    return triton.backends.backends


def _backend() -> Any:
    """Return a backend that says it is active, and can do nothing else."""
    from triton.backends import Backend
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpretedCpu(DriverBase):
        """A driver without a device."""

        def __init__(self) -> None:
            """Hold nothing."""

        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise RuntimeError(
                "kernels are interpreted here, and their time says nothing; measure on a GPU"
            )

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

    return Backend(compiler=None, driver=InterpretedCpu)
