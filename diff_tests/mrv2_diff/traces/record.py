"""Runs a program whose engine is recorded, and says what came of it."""

import os
import signal
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

from mrv2_diff.harness import Recording, RecordingOutcome
from mrv2_diff.traces.check import check_steps
from mrv2_diff.traces.format import TraceError, open_trace
from mrv2_diff.traces.plugin import ENTRY_POINT, PRIVATE_VAR, TRACE_VAR

_PLUGINS_VAR = "VLLM_PLUGINS"
_GROUP = "vllm.general_plugins"


def record(asked: Recording) -> RecordingOutcome:
    """Run the program to its end; an interrupt is the program's to act on.

    Raises:
        ValueError: Recording cannot act, or there is no such program.
    """
    _require_entry_point()
    environ = {
        **os.environ,
        TRACE_VAR: str(asked.out.resolve()),
        PRIVATE_VAR: str(int(asked.private)),
    }
    if asked.runner is not None:
        environ["MRV2_RUNNER"] = asked.runner
    try:
        process = subprocess.Popen(asked.program, env=environ)
    except OSError as error:
        raise ValueError(
            f"cannot run {asked.program[0]!r}: {error.strerror or error}; name a program"
        ) from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the program as well
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return _outcome(asked.out, code)


def _outcome(path: Path, code: int) -> RecordingOutcome:
    try:
        trace = open_trace(path)
        contents = check_steps(trace.head, trace.steps())
    except FileNotFoundError:
        text = f"no trace: {path} was not written, since no engine was ready to run a step"
        return RecordingOutcome(text=text, is_whole=False, exit_code=code)
    except TraceError as error:
        return RecordingOutcome(text=str(error), is_whole=False, exit_code=code)
    why = trace.end.why if trace.end is not None else ""
    text = (
        f"wrote {path}: {contents.steps} steps, {contents.requests} requests, {contents.tokens} "
        f"tokens, {path.stat().st_size} bytes; recording ended because: {why}\n"
        f"play it again: mrv2-diff replay {path}"
    )
    return RecordingOutcome(text=text, is_whole=contents.steps > 0, exit_code=code)


def _require_entry_point() -> None:
    """Refuse to run a program in which nothing would be recorded, without a word."""
    names = {point.name for point in entry_points(group=_GROUP)}
    if ENTRY_POINT not in names:
        raise ValueError(
            f"the installed mrv2 has no entry point {ENTRY_POINT!r} in {_GROUP}: install it again "
            "(make setup)"
        )
    listed = os.environ.get(_PLUGINS_VAR)
    if listed is not None and ENTRY_POINT not in listed.split(","):
        raise ValueError(
            f"{_PLUGINS_VAR}={listed!r} hides the entry point {ENTRY_POINT!r}: add it, or unset "
            "the variable"
        )
