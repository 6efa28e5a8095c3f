"""Every kernel compiles for sm_90, without a GPU, with every signature that samples launch it with.

The interpreter runs kernels as Python, so it accepts what the compiler refuses: a global that is no
constexpr, for one. That is shown on a planted kernel.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2.ops.launch import Launch
from mrv2.ops.twin import INTERPRETED
from mrv2_diff.samples import SAMPLES, all_ops, samples_of

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="kernels of a session under TRITON_INTERPRET=1 cannot be compiled"
)


def launches() -> dict[str, Launch]:
    """One launch for each op and distinct signature, by a name that shows both."""
    found: dict[str, Launch] = {}
    for op in all_ops():
        for sample in samples_of(op.name) if op.name in SAMPLES else ():
            launch = op.launch(**sample.arguments)
            types = [kind for kind in launch.signature().values() if kind != "constexpr"]
            constants = [f"{name}={value}" for name, value in launch.constexprs.items()]
            found.setdefault(f"{op.name}({','.join(types + constants)})", launch)
    return found


LAUNCHES = {} if INTERPRETED else launches()


def test_every_op_is_compiled() -> None:
    assert {name.split("(")[0] for name in LAUNCHES} == {op.name for op in all_ops()}


@pytest.mark.parametrize("name", LAUNCHES, ids=list(LAUNCHES))
def test_kernel_compiles(name: str) -> None:
    cubin = LAUNCHES[name].compile_offline()
    assert cubin.startswith(b"\x7fELF")


PLANTED = """
import torch, triton, triton.language as tl
from mrv2.ops.launch import Launch

STEP = 3

@triton.jit
def planted_kernel(out_ptr, num_cells, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, offset * STEP, mask=offset < num_cells)

def launch(out):
    return Launch(planted_kernel, (1,), (out, out.numel()), {"BLOCK": 16})

def test_interpreted():
    out = torch.full((5,), -7, dtype=torch.int32)
    launch(out).run()
    assert out.tolist() == [0, 3, 6, 9, 12]
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A module whose kernel reads a plain global, and whose own test passes when interpreted."""
    path = tmp_path / "test_planted.py"
    path.write_text(PLANTED)
    return path


def test_interpreter_accepts_the_planted_kernel(planted: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(planted)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        cwd=planted.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_compiler_refuses_the_planted_kernel(planted: Path) -> None:
    spec = importlib.util.spec_from_file_location("planted", planted)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    launch: Launch = module.launch(torch.zeros(5, dtype=torch.int32))
    with pytest.raises(Exception, match="global variable"):
        launch.compile_offline()


def test_a_launch_with_a_missing_argument_is_refused() -> None:
    whole = next(iter(LAUNCHES.values()))
    short = Launch(whole.kernel, whole.grid, whole.args[:-1], whole.constexprs)
    with pytest.raises(TypeError, match="the launch gives"):
        short.compile_offline()
