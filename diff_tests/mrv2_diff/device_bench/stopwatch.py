"""Host time of a runner's calls, taken from outside: any runner of vLLM's worker can be watched.

A step's host time is what `execute_model`, `sample_tokens` and reading the output take, less every
wait for an event inside them. A runner that waits for the device while it prepares a step (V1 does)
is so given the benefit: its waits stand in a column of their own.
"""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrv2_diff.device_bench.streams import StreamHash

COLUMNS = ("host_us", "cpu_us", "execute_us", "sample_us", "read_us", "wait_us")


@dataclass(slots=True)
class Row:
    """Seconds of one step, as they come in."""

    num_tokens: int
    num_reqs: int
    execute: float = 0.0
    sample: float = 0.0
    read: float = 0.0
    wait: float = 0.0
    """In all three, for events."""
    cpu: float = 0.0
    """Time of the threads themselves, waits left out. What other processes take does not count."""
    read_elsewhere: bool = False
    """Whether another thread read the output."""

    def values(self) -> dict[str, float]:
        """Return microseconds by column."""
        seconds = {
            "host_us": self.execute + self.sample + self.read - self.wait,
            "cpu_us": self.cpu,
            "execute_us": self.execute,
            "sample_us": self.sample,
            "read_us": self.read,
            "wait_us": self.wait,
        }
        return {name: 1e6 * value for name, value in seconds.items()}


class _Waits(threading.local):
    """Seconds that a thread has waited for events, by its clock and by its own time."""

    wall = 0.0
    cpu = 0.0


class Stopwatch:
    """Stands before a runner's calls.

    Args:
        runner: Of vLLM's worker; its two methods are replaced.
    """

    def __init__(self, runner: Any) -> None:
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._waits = _Waits()
        self._thread = threading.get_ident()
        self._open: Row | None = None
        self.rows: list[Row] = []
        self.recorded: list[Any] | None = None
        """SchedulerOutputs of the pass under way, where it is recorded."""
        self.stream: StreamHash | None = None
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def begin(self, *, record: bool = False, stream: bool = False) -> None:
        """Start a pass, and keep or hash what the scheduler sends in it; forget the last one."""
        self.rows = []
        self._open = None
        self.recorded = [] if record else None
        self.stream = StreamHash() if stream else None

    def watch_waits(self, event_class: type) -> None:
        """Take the time of every wait for an event of a class on the thread that waits."""
        wait, waits = event_class.synchronize, self._waits  # type: ignore[attr-defined]

        def timed(event: Any) -> None:
            cpu, began = time.thread_time(), time.perf_counter()
            try:
                wait(event)
            finally:
                waits.wall += time.perf_counter() - began
                waits.cpu += time.thread_time() - cpu

        event_class.synchronize = timed  # type: ignore[attr-defined]

    def _execute_model(self, scheduler_output: Any, *rest: Any, **options: Any) -> Any:
        if options:  # a dummy run of the runner's own
            return self._execute(scheduler_output, *rest, **options)
        if self.recorded is not None:  # V1 keeps the lists that it is sent, and adds to them
            self.recorded.append(copy.deepcopy(scheduler_output))
        if self.stream is not None:
            self.stream.add(scheduler_output)
        self._open = Row(
            scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        )
        if self._open.num_tokens:
            self.rows.append(self._open)
        result, self._open.execute = self._timed(self._open, self._execute, scheduler_output, *rest)
        return result

    def _sample_tokens(self, grammar_output: Any) -> Any:
        row = self._open
        if row is None:  # a dummy run of the engine's own
            return self._sample(grammar_output)
        result, row.sample = self._timed(row, self._sample, grammar_output)
        read = getattr(result, "get_output", None)
        if read is not None:
            result.get_output = self._reading(row, read)
        return result

    def _reading(self, row: Row, read: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            row.read_elsewhere = threading.get_ident() != self._thread
            result, row.read = self._timed(row, read)
            return result

        return timed

    def _timed(self, row: Row, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        waits = self._waits
        waited, waited_cpu, cpu = waits.wall, waits.cpu, time.thread_time()
        began = time.perf_counter()
        result = call(*arguments)
        seconds = time.perf_counter() - began
        row.cpu += time.thread_time() - cpu - (waits.cpu - waited_cpu)
        row.wait += waits.wall - waited
        return result, seconds
