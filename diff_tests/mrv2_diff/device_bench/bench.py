"""Starts the runners' processes, gives each its turn, and keeps what they measured.

The record is written anew after every task, so that a run which is cut short leaves what it had.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrv2_diff.catalog.prompts import TINY as TINY_MODEL
from mrv2_diff.device_bench.channel import COMMON, RunnerFailed, RunnerProcess, environ_of
from mrv2_diff.device_bench.growth_plot import growth_plot
from mrv2_diff.device_bench.host_plot import host_plot
from mrv2_diff.device_bench.options import NEEDS_GPU, TINY, Options, Task
from mrv2_diff.device_bench.rounds import Figures, Rounds, describe, interleave
from mrv2_diff.device_bench.table import ratio_text, table
from mrv2_diff.models.checkpoint import cached_model
from mrv2_diff.models.shapes import SHAPES, write_shape

FORMAT = 1
"""Of the record."""

DECIDES = {
    "steady": ("host_us",),
    "churn": ("host_us",),
    "replay": ("host_us", "wall_us"),
    "throughput": ("tokens_per_s",),
    "growth": ("host_us", "wall_us"),
}
"""Metrics of each part whose ratios are made; all but those of growth must become narrow."""

_RESERVE_S = 20.0
"""Of the limit, to end the processes in."""
_SHORTEST_START_S = 30.0
"""With less left no engine is started alone."""
_CLOCKS = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"

Start = Callable[[str, Path, dict[str, str]], RunnerProcess]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run gave."""

    record: dict[str, Any]
    table: str
    passes: bool
    """Whether every runner went through everything, on equal streams, and all ratios are narrow."""


class Bench:
    """One run.

    Args:
        options: What is asked for.
        say: Takes a line on how it goes.
        start: Starts a runner's process; a test has its own.
        clock: Seconds.
    """

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None],
        start: Start = RunnerProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._say, self._start, self._clock = options, say, start, clock
        self._began = clock()
        self._deadline = self._began + options.limit_s - _RESERVE_S
        self._live: dict[str, RunnerProcess] = {}
        self._ready: dict[str, str] = {}
        """Device of each runner's process that has loaded vLLM."""
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "kind": "bench",
            "options": options.values(),
            "environment": {},
            "runners": {},
            "memory": {},
            "tasks": {},
            "failures": {},
            "clocks": [],
        }

    def run(self) -> Outcome:
        """Do every part and return what came of it."""
        with tempfile.TemporaryDirectory(prefix="mrv2-bench-") as scratch:
            logs = self._options.out.parent if self._options.out is not None else Path(scratch)
            logs.mkdir(parents=True, exist_ok=True)
            if "memory" in self._options.parts:
                self._alone(logs, Path(scratch))
            tasks = list(self._options.tasks())
            if tasks:
                with ExitStack() as processes:
                    self._start_all(processes, logs, Path(scratch))
                    self._do(tasks)
        self._keep()
        return Outcome(record=self.record, table=table(self.record), passes=self._passes())

    # Starts.

    def _alone(self, logs: Path, scratch: Path) -> None:
        """Start each runner's engine with the device to itself, for what it leaves to the KV."""
        for runner in self._options.runners:
            if self._left() < _SHORTEST_START_S:
                self.record["memory"][runner] = {"skipped": "no time was left"}
                continue
            try:
                with self._process(runner, logs) as process:
                    self._load(process)
                    if self._skips_memory(process):
                        return
                    answer = self._start_engine(process, scratch, alone=True)
            except RunnerFailed as failure:
                self._fail(failure, "memory")
                continue
            self.record["memory"][runner] = answer
            self._keep()
            self._say(f"{runner} alone: {answer['kv_tokens']:,} KV tokens")

    def _skips_memory(self, process: RunnerProcess) -> bool:
        if self._ready[process.runner] == "cuda":
            return False
        self.record["memory"] = {"skipped": "needs a CUDA device"}
        self._say("memory: skipped, it needs a CUDA device")
        return True

    def _start_all(self, processes: ExitStack, logs: Path, scratch: Path) -> None:
        """Have all processes import at the same time, then start one engine after the other.

        Engines measure the device's free memory as they start, so they must not do so at once.
        """
        started = []
        for runner in self._options.runners:
            process = processes.enter_context(self._process(runner, logs))
            process.send("load")
            started.append(process)
        for process in started:
            try:
                self._loaded(process, process.answer(self._limit(self._options.start_limit_s)))
            except RunnerFailed as failure:
                self._fail(failure, "load")
                continue
            self._live[process.runner] = process
        for runner, process in list(self._live.items()):
            try:
                answer = self._start_engine(process, scratch, alone=False)
            except RunnerFailed as failure:
                self._fail(failure, "start")
                continue
            self.record["runners"][runner] = answer
            self._say(f"{runner}: {answer['runner_class']} in {answer['start_s']:.0f} s")
            self._keep()

    def _process(self, runner: str, logs: Path) -> RunnerProcess:
        stem = self._options.out.stem if self._options.out is not None else "bench"
        log = logs / f"{stem}.{runner}.log"
        log.write_bytes(b"")
        return self._start(runner, log, {**COMMON, **environ_of(runner, self._options.before)})

    def _load(self, process: RunnerProcess) -> None:
        self._loaded(process, process.ask("load", self._limit(self._options.start_limit_s)))

    def _loaded(self, process: RunnerProcess, answer: Mapping[str, Any]) -> None:
        self._ready[process.runner] = answer["device"]
        self.record["environment"] = answer["environment"]

    def _start_engine(
        self, process: RunnerProcess, scratch: Path, *, alone: bool
    ) -> dict[str, Any]:
        device = self._ready[process.runner]
        arguments = self._options.engine_arguments(
            process.runner, device, self._model(device, scratch), alone=alone
        )
        answer = process.ask(
            "start", self._limit(self._options.start_limit_s), engine=arguments
        )  # fmt: skip
        return {**answer, "engine": {**arguments, "model": self._model_name(device)}}

    def _model_name(self, device: str) -> str:
        name = self._options.model or ("qwen3-0.6b" if device == "cuda" else TINY)
        return name if name in SHAPES or name == TINY else Path(name).name

    def _model(self, device: str, scratch: Path) -> str:
        name = self._options.model or self._model_name(device)
        if name in SHAPES:
            return str(write_shape(scratch / name, name))
        return str(cached_model(TINY_MODEL)) if name == TINY else name

    # Tasks.

    def _do(self, tasks: list[Task]) -> None:
        weight = sum(task.weight for task in tasks)
        for task in tasks:
            if not self._live:
                return
            share = self._left() * task.weight / weight
            weight -= task.weight
            if task.part in NEEDS_GPU and "cuda" not in self._ready.values():
                self._put(task, {"skipped": "needs a CUDA device"})
                continue
            if share < 1:
                self._put(task, {"skipped": "no time was left"})
                continue
            self._clock_reading(task)
            self._put(task, self._task(task, self._clock() + share))
            self._keep()

    def _task(self, task: Task, deadline: float) -> dict[str, Any]:
        if task.part == "profile":
            return self._profile(task)
        began = self._clock()
        streams = self._streams(task)
        round_s = self._clock() - began
        if len(set(streams.values())) > 1:
            return {
                "refused": "the scheduler did not send every runner the same steps; hashes: "
                + ", ".join(f"{name} {digest}" for name, digest in streams.items())
            }
        done = interleave(
            list(self._live),
            lambda runner: self._block(task, self._live[runner]),
            DECIDES[task.part],
            deadline=deadline,
            expected_s=round_s if task.part == "throughput" else 0.0,
            fixed_rounds=self._options.growth_rounds if task.part == "growth" else None,
        )
        for failure in done.failures:
            self._fail(failure, task.name)
        for process in list(self._live.values()):
            with self._failing(task):
                process.ask("forget", self._block_limit())
        return {"stream": next(iter(streams.values()), None), **describe(done), **_medians(done)}

    def _streams(self, task: Task) -> dict[str, str]:
        """Have every runner go through the task once, unmeasured; return what each was sent."""
        streams = {}
        for runner, process in list(self._live.items()):
            with self._failing(task):
                if task.part == "throughput":
                    answer = self._throughput(process, stream=True)
                else:
                    answer = process.ask("record", self._block_limit(), **self._of(task))
                streams[runner] = answer["stream"]
        return streams

    def _block(self, task: Task, process: RunnerProcess) -> Figures:
        if task.part == "throughput":
            answer = self._throughput(process, stream=False)
            return {
                "tokens_per_s": answer["tokens_per_s"],
                "seconds": answer["seconds"],
                "steps": answer["steps"],
                "ttft_ms_median": statistics.median(answer["ttft_ms"]),
                "ttft_ms_p99": _quantile(answer["ttft_ms"], 0.99),
            }
        do = "replay" if task.part == "replay" else "block"
        answer = process.ask(do, self._block_limit(), **self._of(task))
        figures = {name: statistics.median(values) for name, values in answer["columns"].items()}
        figures["wall_mean_us"] = statistics.fmean(answer["columns"]["wall_us"])
        figures["host_p90_us"] = _quantile(answer["columns"]["host_us"], 0.9)
        figures["other_threads_us"] = answer["other_threads_us"]
        if answer["peak_allocated"] is not None:
            figures["peak_allocated"] = answer["peak_allocated"]
        return figures

    def _throughput(self, process: RunnerProcess, *, stream: bool) -> dict[str, Any]:
        workload = self._options.workload.values()
        return process.ask("throughput", self._block_limit(), workload=workload, stream=stream)

    def _profile(self, task: Task) -> dict[str, Any]:
        found = {}
        for runner, process in list(self._live.items()):
            with self._failing(task):
                found[runner] = process.ask("profile", self._block_limit(), **self._of(task))
        return {"profiles": found}

    def _of(self, task: Task) -> dict[str, Any]:
        """Return the arguments of a task's command."""
        if task.point is None:
            raise ValueError(f"{task.name} has no point")
        return {"point": task.point.values(), "steps": self._options.steps}

    # Bookkeeping.

    @contextmanager
    def _failing(self, task: Task) -> Iterator[None]:
        """Note a failure and go on."""
        try:
            yield
        except RunnerFailed as failure:
            self._fail(failure, task.name)

    def _fail(self, failure: RunnerFailed, during: str) -> None:
        self._live.pop(failure.runner, None)
        self.record["failures"].setdefault(failure.runner, []).append(
            {"during": during, "message": str(failure)}
        )
        self._say(f"{during}: {failure}")
        self._keep()

    def _put(self, task: Task, values: dict[str, Any]) -> None:
        entry: dict[str, Any] = {"part": task.part, "series": task.series}
        if task.point is not None:
            entry["point"] = task.point.values()
        self.record["tasks"][task.name] = {**entry, **values}
        state = values.get("skipped") or values.get("refused") or _state(values)
        self._say(f"[{self._clock() - self._began:4.0f} s] {task.name}: {state}")

    def _clock_reading(self, task: Task) -> None:
        reading = device_clocks()
        if reading:
            self.record["clocks"].append({"before": task.name, "reading": reading})

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _block_limit(self) -> float:
        """Return the seconds for one answer; at the end of the run's time it is cut, too."""
        return max(1.0, min(self._options.answer_limit_s, self._left() + _RESERVE_S / 2))

    def _limit(self, seconds: float) -> float:
        return max(1.0, min(seconds, self._left()))

    def _keep(self) -> None:
        out = self._options.out
        if out is None:
            return
        self.record["seconds"] = round(self._clock() - self._began, 1)
        half = out.with_name(out.name + ".half")
        half.write_text(json.dumps(self.record, indent=1) + "\n")
        half.replace(out)
        out.with_suffix(".txt").write_text(table(self.record) + "\n")
        tasks = self.record["tasks"].values()
        for suffix, picture in {".svg": growth_plot(tasks), ".host.svg": host_plot(tasks)}.items():
            if picture:
                out.with_suffix(suffix).write_text(picture)

    def _passes(self) -> bool:
        entries = self.record["tasks"].values()
        judged = [entry for entry in entries if entry["part"] not in ("growth", "profile")]
        return (
            not self.record["failures"]
            and not any("skipped" in entry or "refused" in entry for entry in entries)
            and "skipped" not in self.record["memory"]
            and all(entry["conclusive"] for entry in judged)
        )


def _medians(done: Rounds) -> dict[str, Any]:
    """Return each runner's medians over its blocks, by metric."""
    return {
        "medians": {
            runner: {
                name: statistics.median(figures[name] for figures in blocks) for name in blocks[0]
            }
            for runner, blocks in done.blocks.items()
            if blocks
        }
    }


def _state(values: Mapping[str, Any]) -> str:
    """Return a task's outcome in a few words."""
    if "profiles" in values:
        return f"{len(values['profiles'])} profiles"
    parts = [
        f"{metric} {pair} {ratio_text(ratio)}"
        for metric, pairs in values["ratios"].items()
        for pair, ratio in pairs.items()
    ]
    return f"{values['rounds']} rounds; {'; '.join(parts)}"


def _quantile(values: list[float], part: float) -> float:
    """Return the smallest value that at least so large a part of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def device_clocks() -> str:
    """Return what nvidia-smi reads of the device; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
