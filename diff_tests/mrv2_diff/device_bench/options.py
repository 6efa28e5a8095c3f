"""What the user asks the side-by-side benchmark for, and the engine that follows from it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2_diff.device_bench.channel import BEFORE, RUNNERS
from mrv2_diff.device_bench.points import Point, Workload
from mrv2_diff.models.shapes import SHAPES

PARTS = ("memory", "steady", "churn", "replay", "throughput", "growth", "profile")
"""In the order in which they run. Once a process has traced, CUPTI may stay in the way of its later
calls, so tracing is last."""
NEEDS_GPU = ("memory", "profile")
DEFAULT_PARTS = ("steady", "churn", "replay", "profile")

TINY = "tiny"
"""The tiny checkpoint, for CPUs."""
BLOCK_SIZES = {"cuda": 16, "cpu": 32}
"""Least that FlashAttention and the CPU's attention take, by device."""
_MAX_WORKLOAD_TOKENS = 320_000
"""Of KV for the throughput workload at most, so that three engines fit; preemption is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run.

    Raises:
        ValueError: An option is unknown or out of its bounds. Names it and what there is.
    """

    runners: tuple[str, ...] = tuple(RUNNERS)
    before: str = ""
    """Folders of another installation of this project, as in PYTHONPATH; it is the runner
    `before`."""
    parts: tuple[str, ...] = DEFAULT_PARTS
    batches: tuple[int, ...] = (1, 32, 256)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    context: int = 64
    churn: float = 0.1
    steps: int = 48
    """Measured steps of a block."""
    limit_s: float = 560.0
    """For everything, starts included."""
    answer_limit_s: float = 90.0
    """For one block; a process that takes longer is ended."""
    start_limit_s: float = 200.0
    model: str | None = None
    """A name of SHAPES, `tiny`, or a folder. None: Qwen3-0.6B on a GPU, else tiny."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's `LLM`, for every runner."""
    engine_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More arguments, for one runner."""
    cudagraph_mode: str = "FULL_DECODE_ONLY"
    blocks: int | None = None
    """KV blocks of each engine. None: what the parts need."""
    workload: Workload = field(default_factory=Workload)
    growth_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    growth_contexts: tuple[int, ...] = (64, 512, 4096, 16384, 32000)
    growth_arrivals: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.5)
    growth_rounds: int = 2
    out: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run, before anything is started."""
        known = (*RUNNERS, BEFORE) if self.before else tuple(RUNNERS)
        _check_names("runner", self.runners, known)
        _check_names("runner of --engine-of", tuple(self.engine_of), known)
        _check_names("part", self.parts, PARTS)
        if not self.runners or not self.parts:
            raise ValueError("there is nothing to do: name a runner and a part")
        if self.steps < 2:
            raise ValueError(f"steps is {self.steps}; a block needs 2 or more")
        if self.model is not None and self.model not in SHAPES and self.model != TINY:
            folder = Path(self.model)
            if not (folder / "config.json").is_file():
                raise ValueError(
                    f"model {self.model!r} is no folder with config.json; name one, or one of "
                    f"{', '.join([*SHAPES, TINY])}"
                )
        for _ in self.tasks():
            pass  # each makes its point, which refuses what is out of bounds

    def tasks(self) -> "Iterator[Task]":
        """Yield what is done with all engines up, in order."""
        for part in PARTS:
            if part not in self.parts:
                continue
            if part == "throughput":
                yield Task(part=part)
            elif part == "growth":
                for series, point in self._growth():
                    yield Task(part=part, point=point, series=series)
            elif part != "memory":
                for point in self._points(self.churn if part == "churn" else 0.0):
                    yield Task(part=part, point=point)

    def _points(self, churn: float) -> Iterator[Point]:
        for temperature in self.temperatures:
            for batch in self.batches:
                yield Point(batch=batch, temperature=temperature, context=self.context, churn=churn)

    def _growth(self) -> Iterator[tuple[str, Point]]:
        for batch in self.growth_batches:
            yield "batch", Point(batch=batch, context=self.context)
        for context in self.growth_contexts:
            yield "context", Point(batch=_CONTEXT_BATCH, context=context)
        for arrivals in self.growth_arrivals:
            yield "arrivals", Point(batch=_ARRIVALS_BATCH, context=self.context, churn=arrivals)

    def engine_arguments(
        self, runner: str, device: str, model: str, *, alone: bool
    ) -> dict[str, Any]:
        """Return the arguments of a runner's engine.

        Args:
            runner: Whose.
            device: `cpu` or `cuda`.
            model: Folder.
            alone: Whether no other engine is up, so that it may have the memory.
        """
        on_gpu, block_size = device == "cuda", BLOCK_SIZES[device]
        budget = self._budget(on_gpu)
        points = [task.point for task in self.tasks() if task.point is not None]
        held = [point.tokens_held(self.steps, budget) for point in points]
        if "throughput" in self.parts:
            held.append(2 * self.workload.high)
        longest = max([*held, 2048 if on_gpu else 128])  # what is captured depends on it
        arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "seed": 0,
            "max_model_len": block_size * math.ceil(longest / block_size),
            "max_num_seqs": max([point.most_running for point in points] + [self._workload_seqs()]),
            "max_num_batched_tokens": budget,
            "block_size": block_size,
            "enable_prefix_caching": False,
        }
        if not alone:
            whole = math.ceil(longest / block_size) + 1  # vLLM wants room for one such request
            arguments["num_gpu_blocks_override"] = self.blocks or max(
                whole, self._blocks(points, budget, block_size)
            )
        if on_gpu:
            largest = max(256, *self.growth_batches) if "growth" in self.parts else 256
            arguments |= {
                "gpu_memory_utilization": 0.9 if alone else 0.84 / len(self.runners),
                "async_scheduling": True,
                "compilation_config": {
                    "mode": 0,
                    "cudagraph_mode": self.cudagraph_mode,
                    "cudagraph_capture_sizes": [2**n for n in range(int(math.log2(largest)) + 1)],
                },
            }
        else:
            arguments["enforce_eager"] = True
        if self.model is None or self.model in SHAPES:
            arguments |= {"load_format": "dummy"} if on_gpu or self.model in SHAPES else {}
        return {**arguments, **self.engine, **self.engine_of.get(runner, {})}

    def _budget(self, on_gpu: bool) -> int:
        given = self.engine.get("max_num_batched_tokens")
        return int(given) if given else 16384 if on_gpu else 4096

    def _workload_seqs(self) -> int:
        return self.workload.requests if "throughput" in self.parts else 1

    def _blocks(self, points: list[Point], budget: int, block_size: int) -> int:
        """Return enough KV blocks for every part that runs."""
        needed = [
            point.most_running * (math.ceil(point.tokens_held(self.steps, budget) / block_size) + 1)
            for point in points
        ]
        if "throughput" in self.parts:
            tokens = sum(left + right for left, right in self.workload.lengths())
            needed.append(math.ceil(min(tokens, _MAX_WORKLOAD_TOKENS) / block_size))
        return max([*needed, 64]) + 1

    def values(self) -> dict[str, Any]:
        """Return what a record keeps of this."""
        return {
            "runners": list(self.runners),
            "parts": list(self.parts),
            "steps": self.steps,
            "limit_s": self.limit_s,
            "model": self.model,
            "cudagraph_mode": self.cudagraph_mode,
            "engine": dict(self.engine),
            "engine_of": {name: dict(values) for name, values in self.engine_of.items()},
        }


_CONTEXT_BATCH = 4
"""Requests of the growth by context: their KV must fit three times."""
_ARRIVALS_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing that every runner does by turns."""

    part: str
    point: Point | None = None
    series: str = ""
    """Of growth: what grows."""

    @property
    def name(self) -> str:
        """Key in a record."""
        parts = (self.part, self.series, self.point.name if self.point else "")
        return " ".join(part for part in parts if part)

    @property
    def weight(self) -> float:
        """Its share of the time, beside those of the others."""
        return {"throughput": 8.0, "growth": 0.5, "profile": 0.5}.get(self.part, 1.0)


def _check_names(kind: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"there is no {kind} {unknown[0]!r}; choose from {', '.join(known)}")
    if len(set(given)) != len(given):
        raise ValueError(f"a {kind} is named twice: {', '.join(given)}")
