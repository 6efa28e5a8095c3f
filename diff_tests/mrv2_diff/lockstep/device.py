"""What the device of this process decides: vLLM's worker, V1's runner, and who draws at random.

A class is imported when it is asked for: importing vLLM's CPU worker replaces functions of torch in
the whole process, so it happens on a CPU alone.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from mrv2.errors import ConfigError

WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
}
V1_RUNNERS = {
    "cpu": "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    "cuda": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
}


def kind() -> str:
    """Return `cpu` or `cuda`, as vLLM chose.

    Raises:
        ConfigError: vLLM runs on another kind of device.
    """
    name = str(current_platform.device_type)
    if name not in WORKERS:
        raise ConfigError(
            f"vLLM's device is {name!r}; cases run on {' and '.join(WORKERS)}: install vLLM for one"
        )
    return name


def worker_class() -> Any:
    """Return the class of vLLM's own worker."""
    return resolve_obj_by_qualname(WORKERS[kind()])


def v1_runner_class() -> Any:
    """Return the class of V1's runner."""
    return resolve_obj_by_qualname(V1_RUNNERS[kind()])


def settle_interpreter() -> None:
    """Take back what vLLM concludes too much where Triton is interpreted.

    Its kernel for top-k and top-p does not run so; it has operations of torch in its place, as on a
    CPU without Triton.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


def check_graphs(graphs: str) -> None:
    """Refuse CUDA graphs where there is no CUDA device.

    Raises:
        ConfigError: Names what was asked for and what to do.
    """
    if graphs != "none" and kind() != "cuda":
        raise ConfigError(
            f"--graphs {graphs} needs a CUDA device, and vLLM's device here is {kind()!r}: "
            "leave the option out, or run on a machine with a GPU and a vLLM for it"
        )


def arithmetic(dtype: str) -> str:
    """Return the name of the arithmetic that a model of a dtype is computed in.

    Triton multiplies float32 matrices with 10 bits of fraction (TF32) unless it is told not to, and
    attention in float32 is Triton's on a CUDA device.
    """
    if kind() == "cpu" or dtype != "float32":
        return dtype
    from triton import knobs  # part of a vLLM for CUDA

    return "tf32" if knobs.language.fp32_default in (None, "tf32") else dtype


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that V1's draws come from where a request has no seed."""
    states = [torch.random.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def restore_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Put the generators back into states that `random_state` returned."""
    torch.random.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
