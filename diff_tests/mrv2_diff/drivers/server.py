"""A `vllm serve` process on a free port, and the proof of which runner answers there."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mrv2_diff.drivers.one_engine import OURS
from mrv2_diff.drivers.variables import clean_environment

START_LIMIT_S = 240
STOP_LIMIT_S = 20
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, by which a worker is asked for its report
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is not always there, and draws otherwise
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than a test's answers
    "HF_HUB_OFFLINE": "1",
}


class ServerError(RuntimeError):
    """A server did not start, or answered what it should not; with the end of its log."""


class NotServedByMrv2Error(AssertionError):
    """A server's report does not show that our runner answered."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up."""

    url: str
    log: Path
    pid: int = 0
    """The process that answers; the engine's is a child of it."""

    def report(self) -> dict[str, Any] | None:
        """Return what its worker says of its runner; None where the worker has no such method."""
        answer = httpx.post(
            f"{self.url}/collective_rpc", json={"method": "mrv2_report"}, timeout=60
        )
        if answer.status_code >= 500:
            return None
        (report,) = answer.raise_for_status().json()["results"]
        return dict(report)


def assert_mrv2_served(report: Mapping[str, Any] | None) -> None:
    """Prove by its worker's own report that a server ran its steps on our runner.

    Raises:
        NotServedByMrv2Error: There is no report, it names another class, or no step was executed.
    """
    if report is None:
        raise NotServedByMrv2Error("the worker has no mrv2_report: it is not one of ours")
    if report["runner_class"] != OURS:
        raise NotServedByMrv2Error(f"the worker's runner is {report['runner_class']}, not {OURS}")
    if report["steps_executed"] < 1:
        raise NotServedByMrv2Error("the worker's runner has executed no step")


def serve_command(model: Path, port: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that serves `model` on a port of this machine."""
    vllm = (sys.executable, "-m", "vllm.entrypoints.cli.main")  # a script is not always installed
    place = ("--host", "127.0.0.1", "--port", str(port))
    return [*vllm, "serve", str(model), *place, *arguments]


def serve_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server's process, with `environ` in the last place."""
    return {**clean_environment(os.environ), **_ENVIRONMENT, **environ}


def free_port() -> int:
    """Return a port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    model: Path, log: Path, arguments: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it and all that it started.

    Args:
        model: The checkpoint.
        log: File for its output.
        arguments: More arguments of `vllm serve`.
        environ: More variables, `MRV2_RUNNER` among them.

    Raises:
        ServerError: It ended, or did not answer in time.
    """
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            serve_command(model, port, arguments),
            env=serve_environment(environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process.pid)
    try:
        _wait_until_up(server, process)
        yield server
    finally:
        _end(process)


def _wait_until_up(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"ended with {process.returncode}:\n{_end_of(server.log)}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise ServerError(f"did not answer within {START_LIMIT_S} s:\n{_end_of(server.log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, then kill whatever is left of the session that it leads."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
