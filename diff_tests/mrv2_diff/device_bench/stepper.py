"""One engine in this process, driven step by step, and a trace of it replayed to its runner."""

import copy
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from mrv2_diff.device_bench.points import WARM_UP, Point, Workload, arrivals, prompt
from mrv2_diff.device_bench.stopwatch import Row, Stopwatch
from mrv2_diff.device_bench.trace import StepProfile
from mrv2_diff.device_bench.tracing import traced

_MAX_DRAIN = 64
"""Steps that an engine may take until it holds nothing, once all requests were aborted."""


class Stepper:
    """An engine that runs blocks of steps.

    Args:
        engine: Arguments of vLLM's `LLM`.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._llm = LLM(**engine)
        self.engine: Any = self._llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.worker: Any = self.engine.model_executor.driver_worker.worker
        self.runner: Any = self.worker.model_runner
        self.on_gpu: bool = self.worker.device.type == "cuda"
        self._watch = Stopwatch(self.runner)
        if self.on_gpu:
            self._watch.watch_waits(torch.cuda.Event)
        self._budget: int = self.engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._traces: dict[tuple[Point, int], tuple[list[Any], int]] = {}
        self._streams: dict[tuple[Point, int], str] = {}

    # Blocks of the whole engine.

    def record(self, point: Point, steps: int) -> str:
        """Run a block once, keep what the scheduler sent, and return its hash."""
        key = (point, steps)
        if key not in self._streams:
            start = self._pass(point, steps, _Marks(), record=True)
            watch = self._watch
            if watch.recorded is None or watch.stream is None:
                raise RuntimeError("the pass was not recorded")
            self._traces[key] = (watch.recorded, start)
            self._streams[key] = watch.stream.hexdigest()
            gc.collect()
            gc.freeze()  # what stands now is not gone through again; a trace is large
        return self._streams[key]

    def forget(self) -> None:
        """Let go of all traces, which are large."""
        self._traces.clear()
        self._streams.clear()

    def block(self, point: Point, steps: int) -> dict[str, Any]:
        """Run a block of the whole engine and return its figures by column and step."""
        gc.collect()
        marks = _Marks()
        start = self._pass(point, steps, marks, record=False)
        return marks.figures(self._rows(point, start, steps))

    def profile(self, point: Point, steps: int) -> StepProfile:
        """Run a block under torch's profiler. Times of the host are not to be trusted in it."""
        if not self.on_gpu:
            raise RuntimeError("a profile needs a CUDA device; leave the part out")
        marks = _Marks(trace=True)
        start = self._pass(point, steps, marks, record=False)
        self._rows(point, start, steps)
        if marks.profile is None:
            raise RuntimeError("the profiler gave nothing")
        return marks.profile

    def _pass(self, point: Point, steps: int, marks: "_Marks", *, record: bool) -> int:
        """Run a block from an empty engine to an empty engine; return its first measured row."""
        self._watch.begin(record=record, stream=record)
        before = point.steps_to_decode(self._budget) + WARM_UP
        waiting = [
            (arrival.step, self._request(f"r{number}", arrival.prompt, arrival.max_tokens, point))
            for number, arrival in enumerate(arrivals(point, before + steps + 4))
        ]
        waiting.reverse()
        step = 0

        def advance() -> None:
            nonlocal step
            while waiting and waiting[-1][0] <= step:
                self.core.add_request(*waiting.pop()[1])
            self.core.step_fn()
            step += 1

        while step < before:
            advance()
        start = len(self._watch.rows)
        with marks.around(steps):
            for _ in range(steps):
                marks.step()
                advance()
        self._drain()
        return start

    def _rows(self, point: Point, start: int, steps: int) -> list[Row]:
        """Return the measured steps.

        Raises:
            RuntimeError: A step is not what the point says, such as one that the scheduler cut.
        """
        rows = self._watch.rows[start : start + steps]
        odd = [row for row in rows if row.num_reqs != point.batch]
        if not point.churn:
            odd += [row for row in rows if row.num_tokens != point.batch]
        if len(rows) != steps or odd:
            shapes = sorted({(row.num_reqs, row.num_tokens) for row in odd})
            raise RuntimeError(
                f"{point.name}: {len(rows)} of {steps} steps ran, and {len(odd)} were not of "
                f"{point.batch} requests; (requests, tokens) of the odd ones: {shapes[:5]}. Give "
                f"the engine more blocks, max_num_seqs or max_num_batched_tokens"
            )
        return rows

    def _request(self, req_id: str, token_ids: list[int], max_tokens: int, point: Point) -> Any:
        params = SamplingParams(
            temperature=point.temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        request = self.engine.input_processor.process_inputs(
            req_id, {"prompt_token_ids": token_ids}, params, ("generate",)
        )
        return self.core.preprocess_add_request(request)

    def _drain(self) -> None:
        scheduler = self.core.scheduler
        self.core.abort_requests(list(scheduler.requests))
        for _ in range(_MAX_DRAIN):
            if not scheduler.has_requests() and not self.core.batch_queue:
                return
            self.core.step_fn()
        raise RuntimeError(f"{len(scheduler.requests)} requests are left after {_MAX_DRAIN} steps")

    # The runner alone.

    def replay(self, point: Point, steps: int) -> dict[str, Any]:
        """Send the runner what it was sent in `record`, with no scheduler in between.

        As in an engine with async scheduling, an output is read after the next step is queued.
        """
        trace, start = self._traces[point, steps]
        outputs = copy.deepcopy(trace)
        self._watch.begin()
        gc.collect()
        marks, pending, number = _Marks(), None, 0
        for output in outputs:
            marks.edge(number, start, steps)
            runs = output.total_num_scheduled_tokens > 0
            number += runs
            result = self.worker.execute_model(output)
            if not runs:
                continue
            if result is None:
                result = self.worker.sample_tokens(None)
            if pending is not None:
                pending.get_output()
            pending = result if hasattr(result, "get_output") else None
        marks.edge(number, start, steps)
        if pending is not None:
            pending.get_output()
        return marks.figures(self._rows(point, start, steps))

    # Throughput.

    def throughput(self, workload: Workload, *, stream: bool) -> dict[str, Any]:
        """Run a workload end to end; return output tokens a second and times to the first token.

        Args:
            workload: What is asked for.
            stream: Return the hash of what the scheduler sent as well, which takes time.
        """
        self._watch.begin(stream=stream)
        gc.collect()
        prepared = [
            ({"prompt_token_ids": prompt(number, length)}, _sampling(workload, output))
            for number, (length, output) in enumerate(workload.lengths())
        ]
        began = time.perf_counter()
        for number, (tokens, params) in enumerate(prepared):
            self.engine.add_request(f"w{number}", tokens, params)
        first: dict[str, float] = {}
        num_tokens = steps = 0
        while self.engine.has_unfinished_requests():
            steps += 1
            for output in self.engine.step():
                num_tokens += len(output.outputs[0].token_ids)
                first.setdefault(output.request_id, time.perf_counter() - began)
        seconds = time.perf_counter() - began
        self._drain()
        digest = self._watch.stream.hexdigest() if self._watch.stream is not None else None
        self._watch.begin()
        return {
            "stream": digest,
            "tokens_per_s": num_tokens / seconds,
            "seconds": seconds,
            "output_tokens": num_tokens,
            "steps": steps,
            "ttft_ms": [1e3 * value for value in first.values()],
        }


def _sampling(workload: Workload, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=workload.temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class _Marks:
    """Where the measured steps begin, and what they cost the process."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace
        self._stamps: list[float] = []
        self._process = self._thread = 0.0
        self._peak: int | None = None
        self.profile: StepProfile | None = None

    @contextmanager
    def around(self, steps: int) -> Iterator[None]:
        """Hold the measured steps of a pass."""
        if self._trace:
            with traced(steps) as found:
                yield
            self.profile = found[0]
            return
        self._begin()
        yield
        self._end()

    def step(self) -> None:
        """Mark the beginning of a measured step."""
        self._stamps.append(time.perf_counter())

    def edge(self, number: int, start: int, steps: int) -> None:
        """Mark step `number` of a trace, of which `steps` from `start` on are measured.

        A step is marked once, however often this is called before the next one runs.
        """
        place = number - start
        if place != len(self._stamps):
            return
        if place == 0:
            self._begin()
        if place < steps:
            self.step()
        elif place == steps:
            self._end()

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._process, self._thread = time.process_time(), time.thread_time()

    def _end(self) -> None:
        self.step()
        self._process = time.process_time() - self._process
        self._thread = time.thread_time() - self._thread
        if torch.cuda.is_available():
            self._peak = torch.cuda.max_memory_allocated()

    def figures(self, rows: list[Row]) -> dict[str, Any]:
        """Return the columns of the rows, each a list by step, and what is known of all steps."""
        columns: dict[str, list[float]] = {}
        for row in rows:
            for name, value in row.values().items():
                columns.setdefault(name, []).append(round(value, 2))
        columns["wall_us"] = [
            round(1e6 * (after - before), 2)
            for before, after in zip(self._stamps, self._stamps[1:], strict=False)
        ]
        return {
            "columns": columns,
            "other_threads_us": round(1e6 * (self._process - self._thread) / len(rows), 2),
            "read_elsewhere": any(row.read_elsewhere for row in rows),
            "peak_allocated": self._peak,
        }
