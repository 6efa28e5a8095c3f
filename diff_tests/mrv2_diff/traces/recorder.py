"""Records what a worker is called with and what it returns, beside the steps and not in them.

The engine's thread encodes each event, since vLLM goes on to change the lists in it, and puts the
bytes into a queue. A thread of its own replaces contents where a recording is private, compresses,
and writes. Nothing that goes wrong here reaches a step: recording ends, the log says why, and
what was written until then is a whole trace.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import msgspec

from mrv2.errors import ConfigError
from mrv2_diff.traces.events import Event, Head
from mrv2_diff.traces.format import FRAME_BYTES, FrameWriter
from mrv2_diff.traces.privacy import Noise
from mrv2_diff.traces.saying import executed_event, output_event, sampled_event

MAX_QUEUED_BYTES = 64 << 20
"""Encoded and not yet written. A disk that is slower than that for long ends the recording: an
engine never waits for it."""
IDLE_S = 0.5
"""After which what is there is written though no frame is full."""
PAUSE_S = 0.02
CLOSE_LIMIT_S = 30.0

Say = Callable[[str], None]


class Recorder:
    """Takes the calls of one worker into a file.

    Args:
        path: A file that is not there yet.
        head: What is recorded from; its `is_private` says whether contents become noise.
        say: Told once, why and where recording ended, if it was not at the engine's end.

    Raises:
        ConfigError: The file is there, or cannot be made.
    """

    def __init__(self, path: Path, head: Head, say: Say) -> None:
        self._say = say
        self._noise = Noise(head.model.vocab_size) if head.is_private else None
        try:
            self._file = path.open("xb")
            self._writer = FrameWriter(self._file, head)
        except OSError as error:
            raise ConfigError(
                f"MRV2_TRACE={str(path)!r} cannot be written: {error.strerror or error}; name a "
                "file that is not there yet, in a folder that is, and one for each engine"
            ) from error
        self._encode = msgspec.msgpack.Encoder().encode
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._put = self._queue.put
        self._queued = self._written = 0
        self._steps = 0
        self._why: str | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="mrv2-trace", daemon=True)
        self._thread.start()
        # Runs at the end of a forked process as well, where atexit does not.
        self._at_exit = util.Finalize(None, self.close, exitpriority=100)

    def attach(self, worker: Any) -> None:
        """Stand before a worker's `execute_model` and `sample_tokens`, and behind `shutdown`."""
        from vllm.v1.outputs import AsyncModelRunnerOutput

        execute, sample, shutdown = worker.execute_model, worker.sample_tokens, worker.shutdown
        recorder = self

        class Recorded(AsyncModelRunnerOutput):
            """An output that is recorded when it is there."""

            def __init__(self, step: int, inner: AsyncModelRunnerOutput) -> None:
                self._step, self._inner = step, inner

            def get_output(self) -> Any:
                output = self._inner.get_output()
                recorder.take(output_event, self._step, output)
                return output

        def returned(output: Any) -> Any:
            step = recorder.last_step
            if isinstance(output, AsyncModelRunnerOutput):
                return Recorded(step, output)
            recorder.take(output_event, step, output)
            return output

        def execute_model(scheduler_output: Any) -> Any:
            recorder.take_step(scheduler_output)
            output = execute(scheduler_output)
            return output if output is None else returned(output)

        def sample_tokens(grammar_output: Any) -> Any:
            if grammar_output is not None:  # else the output says that there was this call
                recorder.take(sampled_event, recorder.last_step, grammar_output)
            return returned(sample(grammar_output))

        def shut_down() -> None:
            recorder.close()
            shutdown()

        worker.execute_model, worker.sample_tokens = execute_model, sample_tokens
        worker.shutdown = shut_down

    @property
    def last_step(self) -> int:
        """Number of the step that was begun last, from 0."""
        return self._steps - 1

    def take_step(self, scheduler_output: Any) -> None:
        """Take the beginning of a step."""
        self._steps += 1
        self.take(executed_event, scheduler_output)

    def take(self, event_of: Callable[..., Event], *arguments: Any) -> None:
        """Encode an event now, for later."""
        if self._why is not None:
            return
        try:
            data = self._encode(event_of(*arguments))
        except Exception as error:  # noqa: BLE001  (a step must not notice)
            self.stop(f"{type(error).__name__}: {error}")
            return
        self._queued += len(data)
        if self._queued - self._written > MAX_QUEUED_BYTES:
            self.stop(f"more than {MAX_QUEUED_BYTES} bytes wait to be written: the disk is slow")
            return
        self._put(data)

    def stop(self, why: str) -> None:
        """Take no more, and say why."""
        if self._why is None:
            self._why = why
            self._say(f"recording ended at step {self.last_step}: {why}")
            self._put(None)

    def close(self) -> None:
        """End the file. Called again, it does nothing."""
        with self._lock:
            if self._why is None:
                self._why = "the engine ended"
                self._put(None)
        self._thread.join(CLOSE_LIMIT_S)

    # In the writing thread.

    def _write(self) -> None:
        try:
            self._write_frames()
            self._writer.end(self._why or "")
        except Exception as error:  # noqa: BLE001  (there is nobody to raise it to)
            self._why = f"{type(error).__name__}: {error}"
            self._say(f"recording failed, and its last steps are lost: {self._why}")
        finally:
            with suppress(OSError):  # what is not written by now was said to be lost
                self._file.close()

    def _write_frames(self) -> None:
        waiting: list[bytes] = []
        size = steps = 0
        since = time.monotonic()
        going = True
        while going:
            for data in self._arrived():
                if data is None:
                    going = False
                    break
                self._written += len(data)
                steps += is_output(data)
                size += len(data)
                waiting.append(self._cleaned(data))
                if size >= FRAME_BYTES:
                    self._writer.events(waiting, steps)
                    waiting, size, steps = [], 0, 0
            if not going or time.monotonic() - since > IDLE_S:
                self._writer.events(waiting, steps)
                waiting, size, steps, since = [], 0, 0, time.monotonic()

    def _arrived(self) -> Iterator[bytes | None]:
        """Yield what is in the queue, after a pause: a thread that wakes for each event is felt."""
        time.sleep(PAUSE_S)
        with suppress(queue.Empty):
            yield self._queue.get(timeout=IDLE_S)
            while True:
                yield self._queue.get_nowait()

    def _cleaned(self, data: bytes) -> bytes:
        if self._noise is None:
            return data
        return self._encode(self._noise.of(_decode(data)))


_decode: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
_OUTPUT = b"\x94\xa6output"
"""How the bytes of an `Output` begin: an array of four, and its tag."""


def is_output(data: bytes) -> bool:
    """Return whether an encoded event is the output of a step."""
    return data.startswith(_OUTPUT)
