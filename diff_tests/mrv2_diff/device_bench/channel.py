"""The parent's end of a runner's process: commands with a limit, and failures with their cause."""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mrv2_diff.drivers.variables import clean_environment

CHILD = "mrv2_diff.device_bench.child"

COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the child
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # the streams of all runners name the same ids
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Of every child."""

RUNNERS: dict[str, dict[str, str]] = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "mrv2": {"MRV2_RUNNER": "mrv2", "VLLM_USE_V2_MODEL_RUNNER": "0"},
    "vllm-v2": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
}
"""What makes a child's engine have each runner. v1 and vllm-v2 run without this project."""
BEFORE = "before"
"""The runner of another installation of this project, to compare two states of it."""


def environ_of(runner: str, before: str) -> dict[str, str]:
    """Return the variables of a runner's process, on top of those of all.

    Args:
        runner: A key of RUNNERS, or BEFORE.
        before: Folders of the other installation, as in PYTHONPATH; they come before all others.
    """
    if runner != BEFORE:
        return RUNNERS[runner]
    path = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH", ""))))
    return {**RUNNERS["mrv2"], "PYTHONPATH": path}


_LOG_TAIL = 4000
_END_S = 15


class RunnerFailed(Exception):
    """A runner's process failed, ended or took too long; the message says which and why."""

    def __init__(self, runner: str, why: str) -> None:
        super().__init__(f"{runner}: {why}")
        self.runner = runner


class RunnerProcess:
    """One runner's process.

    Args:
        runner: A key of RUNNERS, or BEFORE; for messages.
        log: File that takes what the process prints.
        environ: Variables, on top of the parent's cleaned ones.
        command: The program, which gets two file descriptors as its last arguments.
    """

    def __init__(
        self,
        runner: str,
        log: Path,
        environ: dict[str, str],
        command: tuple[str, ...] = (sys.executable, "-m", CHILD),
    ) -> None:
        self.runner = runner
        self._log = log
        to_child, self._to_child = os.pipe()
        self._from_child, from_child = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(to_child), str(from_child)],
                env={**clean_environment(os.environ), **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(to_child, from_child),
            )
        os.close(to_child)
        os.close(from_child)
        self._unread = b""
        self._asked = ""

    def ask(self, do: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer.

        Raises:
            RunnerFailed: See `answer`.
        """
        self.send(do, **arguments)
        return self.answer(limit_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command whose answer is asked for later."""
        self._asked = do
        line = json.dumps({"do": do, **arguments}) + "\n"
        with suppress(BrokenPipeError):  # the process is gone: `answer` tells, with the reason
            os.write(self._to_child, line.encode())

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the answer to the last command.

        Raises:
            RunnerFailed: The command failed, the process ended, or there is no answer after
                `limit_s` seconds. The process is ended in each case.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from_child], [], [], max(0.0, left))
            if not ready:
                raise self._failed(f"no answer to {self._asked!r} after {limit_s:.0f} s; ended")
            part = os.read(self._from_child, 1 << 16)
            if not part:
                raise self._failed(self._how_it_ended())
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        values: dict[str, Any] = json.loads(line)
        if "error" in values:
            raise self._failed(f"{self._asked!r} failed:\n{values['error']}")
        return values

    def _failed(self, why: str) -> RunnerFailed:
        self.end(wait_s=0)
        return RunnerFailed(self.runner, why)

    def _how_it_ended(self) -> str:
        try:
            status: object = self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            status = "unknown"
        return f"the process ended in {self._asked!r} with status {status}; {self.log_tail()}"

    def log_tail(self) -> str:
        """Return the end of what the process printed."""
        text = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        return f"the end of {self._log.name}:\n{text}"

    def end(self, wait_s: float = _END_S) -> None:
        """Close the pipe, which ends an idle process, and kill one that does not end."""
        for descriptor in (self._to_child, self._from_child):
            if descriptor >= 0:
                os.close(descriptor)
        self._to_child = self._from_child = -1
        try:
            self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._to_child >= 0:
            self.end(wait_s=0 if kind else _END_S)
