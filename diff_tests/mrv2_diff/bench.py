"""Host time of a decode step, both runners interleaved in one engine.

What a runner adds to a step is its *bookkeeping*: execute and sample (which returns the output, on
a worker without async scheduling) less the model's forward, its logits, the sampler and the
attention metadata, which both runners call and neither owns. It is measured on both sides by
subtraction. Steps alternate in which runner goes first, so that both see the same caches and the
same clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2_diff.case import Add, EngineSpec
from mrv2_diff.catalog.prompts import TINY, prompt
from mrv2_diff.environment import collect
from mrv2_diff.harness import BenchResult
from mrv2_diff.lockstep.engine import engine
from mrv2_diff.lockstep.worker import LockstepWorker, Pass, StepReport
from mrv2_diff.models.checkpoint import cached_model

PHASES = ("forward", "logits", "sampler", "attention metadata")
_PROMPT_TOKENS = 16
_WARMUP_STEPS = 16
"""First steps, which do not count."""


@dataclass(slots=True)
class Stopwatch:
    """Seconds of each phase of one runner in the step that is under way."""

    seconds: dict[str, float] = field(default_factory=dict)

    def around(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, timed under the name of a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Return the step's phases and start over."""
        taken, self.seconds = self.seconds, {}
        return taken


def bench(num_requests: int, num_steps: int) -> BenchResult:
    """Measure, and return medians by phase with a table of them."""
    samples = measure(num_requests, num_steps)
    medians = {side: _medians(rows) for side, rows in samples.items()}
    ratio = medians["mrv2"]["bookkeeping"] / medians["v1"]["bookkeeping"]
    return BenchResult(
        table=_table(medians, num_requests, len(samples["v1"])),
        ratio=ratio,
        figures={
            "environment": collect("cpu"),
            "requests": num_requests,
            "median_us": medians,
            "ratio": ratio,
        },
    )


def measure(num_requests: int, num_steps: int) -> dict[str, list[dict[str, float]]]:
    """Return microseconds by phase for each steady decode step, by runner."""
    spec = EngineSpec(
        model=TINY,
        max_num_seqs=num_requests,
        # Every prompt runs in the first step, so that all later ones decode all requests.
        max_num_batched_tokens=max(2048, _PROMPT_TOKENS * num_requests),
        num_blocks=8 * num_requests + 1,
    )
    events = tuple(
        Add(
            step=0,
            req_id=f"bench-{index}",
            prompt=prompt(index, _PROMPT_TOKENS),
            max_tokens=_WARMUP_STEPS + num_steps,
        )
        for index in range(num_requests)
    )
    samples: dict[str, list[dict[str, float]]] = {"v1": [], "mrv2": []}
    with engine(spec, cached_model(spec.model)) as started:
        watches: dict[str, Stopwatch] = {}

        def listen(report: StepReport) -> None:
            if not watches:  # a pass begins with a fresh core: watch it from its first step
                watches.update(
                    reference=watch_v1(started.worker), candidate=watch_mrv2(started.worker)
                )
            phases = {side: watch.take() for side, watch in watches.items()}
            if (
                len(report.scheduler_output.scheduled_cached_reqs.req_ids) != num_requests
                or report.number < _WARMUP_STEPS
            ):
                return
            for side, name in (("reference", "v1"), ("candidate", "mrv2")):
                samples[name].append(_row(report.seconds[side], phases[side]))

        started.run(
            events,
            Pass(candidate="mrv2", forced=False, observe=False, alternate=True, listener=listen),
        )
    return samples


# Both functions below put a timed call in the place of a method, on runners that the harness built
# itself for this one run. Neither runner takes these parts from outside once vLLM builds it, and a
# stopwatch anywhere else (a subclass of each part, hooks) would be in what it measures.


def watch_v1(worker: LockstepWorker) -> Stopwatch:
    """Put a stopwatch around V1's phases."""
    runner, watch = worker.reference.runner, Stopwatch()
    _watch_module(watch, runner.model)
    runner._build_attention_metadata = watch.around(
        "attention metadata", runner._build_attention_metadata
    )
    runner._sample = watch.around("sampler", runner._sample)
    return watch


def watch_mrv2(worker: LockstepWorker) -> Stopwatch:
    """Put a stopwatch around our phases."""
    core, watch = worker.candidate("mrv2").runner._core, Stopwatch()
    _watch_module(watch, core._parts.model.module)
    core._parts.attention.plan = watch.around("attention metadata", core._parts.attention.plan)
    core.head.sampler = _Watched(core.head.sampler, watch)
    return watch


class _Watched:
    """A sampler whose call is timed; all else is its own."""

    def __init__(self, sampler: Any, watch: Stopwatch) -> None:
        self._sampler = sampler
        self._call = watch.around("sampler", sampler)

    def __call__(self, *args: Any) -> Any:
        """Call the sampler."""
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        """Return the sampler's own."""
        return getattr(self._sampler, name)


def _watch_module(watch: Stopwatch, module: Any) -> None:
    """Time the model itself, the same way in both runners.

    What they do around the call is theirs.
    """
    module.forward = watch.around("forward", module.forward)
    module.compute_logits = watch.around("logits", module.compute_logits)


def _row(seconds: list[float], phases: dict[str, float]) -> dict[str, float]:
    total = sum(seconds)
    row = {
        "total": total,
        "execute": seconds[0],
        "sample": seconds[1],
        **{phase: phases[phase] for phase in PHASES},
    }
    row["bookkeeping"] = total - sum(phases[phase] for phase in PHASES)
    return {name: value * 1e6 for name, value in row.items()}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def _table(summary: dict[str, dict[str, float]], num_requests: int, num_steps: int) -> str:
    lines = [
        f"{num_requests} decoding requests, medians of {num_steps} interleaved steps, microseconds",
        f"{'':<20}{'v1':>10}{'mrv2':>10}{'mrv2/v1':>10}",
    ]
    for name, v1 in summary["v1"].items():
        mrv2 = summary["mrv2"][name]
        lines.append(f"{name:<20}{v1:>10.0f}{mrv2:>10.0f}{mrv2 / v1:>10.2f}")
    return "\n".join(lines)
