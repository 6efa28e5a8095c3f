"""Say which backend this session proves, and keep GPU tests off machines without one."""

from __future__ import annotations

import importlib.util
import os

import pytest

VLLM_DEFAULTS = {
    # Compiling takes minutes on two cores; a test of the compiled path sets this to 0 itself.
    "TORCH_COMPILE_DISABLE": "1",
    # GiB. vLLM's own default is a share of the machine, which tests must not depend on.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    """Give vLLM small, quick defaults, where the caller did not set them."""
    for name, value in VLLM_DEFAULTS.items():
        os.environ.setdefault(name, value)


def pytest_report_header(config: pytest.Config) -> str:
    """Name the backend that the kernels of this session run on."""
    backend = _backend()
    reason = "" if backend == "gpu" else " (gpu tests are skipped: no CUDA device)"
    vllm = "" if importlib.util.find_spec("vllm") else "; vLLM is not installed"
    return f"mrv2 backend: {backend}{reason}{vllm}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu, with the reason, where there is no device to run them."""
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    if waiting and not _has_cuda():
        for item in waiting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _backend() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpret"
    return "gpu" if _has_cuda() else "reference"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
