"""The serving process's side of a shadow: a queue, a thread that empties it, and a child process.

The thread that serves only appends to a queue. Whatever the shadow does (it raises, it hangs, it
runs out of memory, it dies), the other thread finds out, ends the child, writes why, and V1 serves
on. Nothing here imports vLLM.

The two threads share the interpreter, so the other one wakes rarely: it gathers steps for a while
and sends them together, in lots.
"""

import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from mrv2_diff.shadow.counters import Counters
from mrv2_diff.shadow.messages import Done, Failed, Lot, Ready, Start
from mrv2_diff.shadow.settings import Settings
from mrv2_diff.shadow.slices import Slice, Slicer
from mrv2_diff.shadow.weights import release

START_LIMIT_S = 300.0
"""For the child to import vLLM, load the model and allocate."""
MAX_WAITING_BYTES = 64 << 20
"""Of steps that wait for the shadow; it may have as many besides. With more it gives up what it
follows and goes on with the next requests; long before, it takes no further ones."""
LOT = 64
LOT_BYTES = 1 << 20
"""Most steps, and bytes of more than one step, that are sent at once: while they are pickled, the
serving thread cannot run."""

_logger = logging.getLogger(f"vllm.{__name__}")


class ShadowFault(Exception):
    """The child failed, hung or died."""


class Desk:
    """A shadow as the worker sees it. What the serving thread calls neither raises nor waits.

    Args:
        settings: What was asked for.
        counters: Where requests and findings are counted.
        command: Starts the child; the number of an inherited socket is added to it.
        environ: The child's environment.
    """

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        command: Sequence[str],
        environ: dict[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._waiting: deque[Slice] = deque()
        self._waiting_bytes = 0
        """Of those that are complete."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_busy = False
        self._is_closed = False
        self._hurry = threading.Condition(self._lock)
        """Told when steps are to be gathered no longer; each answer would be too often."""
        self._num_hurrying = 0
        """Callers that wait for the shadow to be idle."""
        self._sent: list[Slice] = []
        """Those that the child has not answered yet."""
        self._slicer: Slicer | None = None
        self._open: Slice | None = None
        """The slice of the step whose second half is due."""
        self._dropped: deque[str] = deque()
        """Requests that the child dropped; their room is given back by the serving thread."""
        self._ended: deque[str] = deque()
        """Requests that the child has ended, as V1 did before; likewise."""
        self.fault: str | None = None
        self._connection, theirs = Pipe()
        _limit_sending(self._connection, settings.limit_s)
        with theirs:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environ
            )
        self._thread: threading.Thread | None = None

    # The serving thread.

    def start(self, message: Start, refusal: Callable[[Any], str | None]) -> None:
        """Hand the child its model. Requests are followed once it is ready, none before.

        Args:
            message: All that it needs.
            refusal: As for `Slicer`.
        """
        self._thread = threading.Thread(
            target=self._run, args=(message, refusal), name="mrv2-shadow", daemon=True
        )
        self._thread.start()

    def _take_up(self, ready: Ready, refusal: Callable[[Any], str | None]) -> None:
        self._slicer = Slicer(self._settings.share, ready.room, refusal, self._counters.add)
        self._counters.set_up(True)
        _logger.info(
            "shadow: mrv2 follows %g %% of the requests in process %d; %d KV blocks; %d parameters "
            "shared, %d of its own; findings go to %s",
            self._settings.share * 100,
            self._child.pid,
            ready.room.num_blocks,
            ready.num_shared,
            ready.num_own,
            self._settings.file,
        )

    def begin(self, scheduler_output: Any) -> None:
        """Take note of a step's first half."""
        slicer = self._slicer
        if slicer is None:
            return
        try:
            while self._dropped:
                slicer.forget(self._dropped.popleft())
            while self._ended:
                slicer.give_back(self._ended.popleft())
            is_behind = len(self._waiting) >= self._settings.max_behind
            found = slicer.cut(scheduler_output, is_behind=is_behind)
            if found is None:
                return
            if found.work:
                self._open = found
            self._offer(found)
        except Exception as error:  # noqa: BLE001 - as above
            self.abandon(f"a step could not be cut: {type(error).__name__}: {error}")

    def end(self, grammar_output: Any) -> "Slice | None":
        """Return the slice of the step that `begin` saw, for `answer`; None if it has none."""
        found, self._open = self._open, None
        if found is None:
            return None
        try:
            found.constrain(grammar_output)
        except Exception as error:  # noqa: BLE001 - as above
            self.abandon(f"a grammar could not be cut: {type(error).__name__}: {error}")
        return found

    def answer(self, found: Slice, output: Any) -> None:
        """Take V1's answers; from any thread."""
        try:
            if found.is_given_up:
                return
            found.answer(output)
            with self._changed:
                self._waiting_bytes += found.num_bytes
                self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - as above
            self.abandon(f"an output could not be read: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the child and the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._hurry.notify_all()
        self._slicer = None
        self._counters.set_up(False)
        self._end_child()
        if self._thread is not None:
            self._thread.join(5)
        self._reap()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the shadow has started and done all that it was given, without gathering.

        Returns:
            Whether it is so, or the shadow was abandoned.
        """

        def idle() -> bool:
            started = self._slicer is not None and not (self._waiting or self._is_busy)
            return started or self._is_closed

        with self._changed:
            self._num_hurrying += 1
            self._hurry.notify_all()
            try:
                return self._changed.wait_for(idle, timeout_s)
            finally:
                self._num_hurrying -= 1

    def report(self) -> dict[str, object]:
        """Return the counters, and why the shadow was abandoned if it was."""
        return {**self._counters.as_dict(), "fault": self.fault, "pid": self._child.pid}

    def _offer(self, found: Slice) -> None:
        with self._changed:
            if self._waiting_bytes < MAX_WAITING_BYTES:
                self._waiting.append(found)
                if self._is_due():
                    self._hurry.notify_all()
                if found.is_complete:
                    self._waiting_bytes += found.num_bytes
                    self._changed.notify_all()
                return
        self._give_up_all(f"{len(self._waiting)} steps wait, which take {MAX_WAITING_BYTES} bytes")

    def _give_up_all(self, reason: str) -> None:
        """Drop every followed request, and go on with the next ones."""
        if self._slicer is None:
            return
        followed = list(self._slicer.followed)
        self._slicer.forget_all()
        with self._changed:
            for found in (*self._waiting, *self._sent):
                found.is_given_up = True
            self._waiting.clear()
            everything = Slice(forget_all=True, is_complete=True)
            self._waiting.append(everything)
            self._waiting_bytes = everything.num_bytes
            self._changed.notify_all()
        self._open = None
        self._counters.add("dropped_requests", len(followed))
        self._write({"kind": "behind", "reason": reason, "requests": followed})

    # The shadow's thread.

    def _run(self, message: Start, refusal: Callable[[Any], str | None]) -> None:
        try:
            try:
                self._send(message)
                ready: Ready = self._receive(Ready, START_LIMIT_S)
            finally:
                release(message.weights)
            self._take_up(ready, refusal)
            with self._changed:
                self._changed.notify_all()
            while (found := self._next()) is not None:
                self._hand_over(found)
                left = len(found)
                while left > 0:
                    done: Done = self._receive(Done, self._settings.limit_s)
                    self._take(done)
                    left -= done.num_slices
                with self._changed:
                    for part in found:
                        if not part.is_given_up:
                            self._ended += part.finished
                    self._sent = []
                    self._is_busy = False
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - as above
            if not self._is_closed:
                self.abandon(str(error) or type(error).__name__)
        finally:
            self._reap()

    def _next(self) -> list[Slice] | None:
        """Gather steps that are complete and return them in order; None once closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._waiting and self._waiting[0].is_complete)
            )
            self._hurry.wait_for(self._is_due, self._settings.gather_s)
            if self._is_closed:
                return None
            found: list[Slice] = []
            self._is_busy = True
            while self._waiting and self._waiting[0].is_complete:
                found.append(self._waiting.popleft())
                self._waiting_bytes -= found[-1].num_bytes
            self._sent = found
        return found

    def _is_due(self) -> bool:
        """Whether steps that wait are to be sent before their time."""
        many = 2 * len(self._waiting) >= self._settings.max_behind
        large = 2 * self._waiting_bytes >= MAX_WAITING_BYTES
        return bool(self._is_closed or self._num_hurrying or many or large)

    def _hand_over(self, found: list[Slice]) -> None:
        """Send steps in lots, each when the child has taken the one before.

        Raises:
            ShadowFault: As for `_send` and `_receive`.
        """
        sizes = [part.num_bytes for part in found]
        start = 0
        while start < len(found):
            end = start + 1
            while end < min(start + LOT, len(found)) and sum(sizes[start : end + 1]) <= LOT_BYTES:
                end += 1
            is_last = end == len(found)
            self._send(Lot(slices=found[start:end], is_last=is_last))
            if not is_last:
                self._receive(Done, self._settings.limit_s)
            start = end

    def _send(self, message: Start | Lot) -> None:
        """Send a message.

        Raises:
            ShadowFault: The child does not read it, or is no more.
        """
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except BlockingIOError:
            raise ShadowFault(
                f"hung: it took no step within {self._settings.limit_s:g} s"
            ) from None
        except OSError:
            raise ShadowFault(f"died: {self._how_it_ended()}") from None

    def _receive(self, kind: type, limit_s: float) -> Any:
        """Return the next answer.

        Raises:
            ShadowFault: There is none in time, it is another than `kind`, or the child failed.
        """
        try:
            self._wait_for_answer(limit_s)
            received = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise ShadowFault(f"died: {self._how_it_ended()}") from None
        try:
            answer = pickle.loads(received)
        except Exception as error:  # noqa: BLE001 - whatever bytes make of it
            raise ShadowFault(f"failed: its answer is no message ({error})") from None
        if isinstance(answer, Failed):
            raise ShadowFault(f"failed: {answer.error}")
        if not isinstance(answer, kind):
            raise ShadowFault(f"failed: its answer is a {type(answer).__name__}")
        return answer

    def _wait_for_answer(self, limit_s: float) -> None:
        """Wait as long as the child may take, leaving out what it waits for a core.

        Raises:
            ShadowFault: The time is over.
        """
        began = time.monotonic() - starved_s(self._child.pid)
        while (left := limit_s - (time.monotonic() - starved_s(self._child.pid) - began)) > 0:
            if self._connection.poll(left):
                return
        raise ShadowFault(f"hung: no answer within {limit_s:g} s")

    def _how_it_ended(self) -> str:
        try:
            code = self._child.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with {code}"

    def _take(self, done: Done) -> None:
        counters = self._counters
        counters.add("compared_tokens", done.compared_tokens)
        counters.add("compared_logprobs", done.compared_logprobs)
        for req_id, reason in done.dropped.items():
            counters.add("dropped_requests")
            self._dropped.append(req_id)
            self._write({"kind": "dropped", "request": req_id, "reason": reason})
        for finding in done.findings:
            is_tie = finding["verdict"] == "near tie"
            counters.add("near_ties" if is_tie else "mismatches")
            self._write(finding)

    # Both.

    def abandon(self, reason: str) -> None:
        """Follow nothing any more; V1 serves on."""
        if self.fault is not None or self._is_closed:
            return
        self.fault = reason
        self._slicer = None
        self._open = None
        self._counters.set_up(False)
        self._counters.add("faults")
        _logger.error("shadow: abandoned, V1 serves on: %s", reason)
        self._write({"kind": "abandoned", "reason": reason})
        self._end_child()
        with self._changed:
            for found in self._waiting:
                found.is_given_up = True
            self._waiting.clear()
            self._is_busy = False
            self._is_closed = True
            self._changed.notify_all()
            self._hurry.notify_all()

    def _end_child(self) -> None:
        if self._child.poll() is None:
            self._child.kill()

    def _reap(self) -> None:
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            if self._is_closed:
                _logger.error("shadow: process %d cannot be ended", self._child.pid)

    def _write(self, finding: dict[str, object]) -> None:
        """Append a line; a file that cannot be written any more stops nothing."""
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **finding}) + "\n"
        try:
            _append(self._settings.file, line.encode())
        except OSError as error:
            _logger.error("shadow: %s cannot be written: %s", self._settings.file, error)


def child_command(module: str, priority: str) -> list[str]:
    """Return the command that starts a child."""
    return [sys.executable, "-m", module, priority]


def starved_s(pid: int) -> float:
    """Return for how long a process was ready to run but had no core, in seconds.

    It is 0 where the kernel does not say.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _append(path: Path, line: bytes) -> None:
    """Append a line in one write, so that several workers may share a file."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def _limit_sending(connection: Connection, limit_s: float) -> None:
    """Let a send to a process that does not read fail in place of waiting for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        seconds = int(limit_s)
        limit = struct.pack("ll", seconds, int((limit_s - seconds) * 1e6))
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
