"""Triton is interpreted from a process's start, or not at all."""

import os
import subprocess
import sys

import pytest

import mrv2.ops.twin
from mrv2.errors import ConfigError
from mrv2_diff import interpreter

PROGRAM = """
import os
from mrv2_diff import interpreter, process
process.prepare()
interpreter.prepare()
interpreter.prepare()  # once is enough, and twice does no harm
from triton.backends import backends
from mrv2.ops import twin
print(interpreter.is_prepared(), backends["cpu"].driver.is_active(), twin.INTERPRETED)
"""


def test_it_is_too_late_once_kernels_are_imported() -> None:
    if mrv2.ops.twin.INTERPRETED:
        pytest.skip("this process interprets Triton already")
    with pytest.raises(ConfigError, match="is imported already, and vllm-v2 needs a process"):
        interpreter.prepare()
    assert not interpreter.is_prepared()


def test_a_new_process_has_a_backend_for_the_cpu_and_interprets_our_kernels_too() -> None:
    environment = {key: value for key, value in os.environ.items() if key != interpreter.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr[-2000:]
