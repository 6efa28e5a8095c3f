"""The device decides on worker, runner and generators, and no CPU worker is imported elsewhere."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

_AS_CUDA = """
import sys
from mrv2_diff import process
process.prepare()
from mrv2_diff.lockstep import device
device.kind = lambda: "cuda"
from mrv2_diff.lockstep.worker import LockstepWorker
from mrv2_diff.lockstep import subjects
made = device.v1_runner_class()
print(*(f"{each.__module__}.{each.__qualname__}" for each in (LockstepWorker.__base__, made)))
print([name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")])
"""


def test_on_cuda_there_are_vllms_cuda_classes_and_nothing_of_its_cpu_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AS_CUDA], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    classes, cpu_modules = done.stdout.splitlines()[-2:]
    assert classes == (
        "vllm.v1.worker.gpu_worker.Worker vllm.v1.worker.gpu_model_runner.GPUModelRunner"
    )
    assert cpu_modules == "[]"


def test_another_kind_of_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from mrv2.errors import ConfigError
    from mrv2_diff.lockstep import device

    monkeypatch.setattr(device, "current_platform", SimpleNamespace(device_type="xpu"))
    with pytest.raises(ConfigError, match="'xpu'; cases run on cpu and cuda"):
        device.kind()


def test_graphs_need_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from mrv2.errors import ConfigError
    from mrv2_diff.lockstep import device

    monkeypatch.setattr(device, "kind", lambda: "cpu")
    device.check_graphs("none")
    with pytest.raises(ConfigError, match="--graphs FULL_DECODE_ONLY needs a CUDA device"):
        device.check_graphs("FULL_DECODE_ONLY")
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    device.check_graphs("FULL_DECODE_ONLY")


@pytest.mark.parametrize(
    ("kind", "dtype", "default", "named"),
    [
        ("cpu", "float32", None, "float32"),
        ("cuda", "bfloat16", None, "bfloat16"),
        ("cuda", "float32", None, "tf32"),
        ("cuda", "float32", "tf32", "tf32"),
        ("cuda", "float32", "ieee", "float32"),
    ],
)
def test_float32_on_cuda_is_tf32_unless_triton_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, default: str | None, named: str
) -> None:
    from triton import knobs

    from mrv2_diff.lockstep import device

    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(knobs.language, "fp32_default", default)
    assert device.arithmetic(dtype) == named


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_draws_between_the_two_calls_leave_no_trace(on: str) -> None:
    import torch

    from mrv2_diff.lockstep import device

    where = torch.device(on)
    state = device.random_state(where)
    first = torch.rand(4), torch.rand(4, device=where)
    device.restore_random_state(where, state)
    assert torch.equal(torch.rand(4), first[0])
    assert torch.equal(torch.rand(4, device=where), first[1])
