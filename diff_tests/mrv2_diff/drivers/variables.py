"""The environment of a child process: what a parent set for its own vLLM is not the child's."""

from collections.abc import Mapping

PREFIXES = ("VLLM_", "MRV2_", "KINETO_", "TORCH_CPP_")
"""Of variables that steer vLLM, the choice of a runner, and what torch logs."""

NAMES = ("TORCH_COMPILE_DISABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def clean_environment(parent: Mapping[str, str]) -> dict[str, str]:
    """Return a parent's variables without those that decide how vLLM runs or what it logs.

    A child is given all of these by whoever starts it, so it does the same whatever ran in the
    parent before.
    """
    return {
        name: value
        for name, value in parent.items()
        if not name.startswith(PREFIXES) and name not in NAMES
    }
