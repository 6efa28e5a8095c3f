"""Host time of a decode step, both runners interleaved in one engine.

What a runner adds to a step is its *bookkeeping*: execute and sample (which returns the output, on
a worker without async scheduling) less the model's forward, its logits, the sampler and the
attention metadata, which both runners call and neither owns. It is measured on both sides by
subtraction. Steps alternate in which runner goes first, so that both see the same caches and the
same clock.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mrv2_diff.case import Add, EngineSpec
from mrv2_diff.catalog.prompts import TINY, prompt
from mrv2_diff.environment import collect
from mrv2_diff.lockstep.engine import engine
from mrv2_diff.lockstep.worker import LockstepWorker, Pass, StepReport
from mrv2_diff.models.checkpoint import cached_model

PHASES = ("forward", "logits", "sampler", "attention metadata")
MAX_RATIO = 0.6
"""Bound on our bookkeeping over V1's, at 64 decoding requests."""


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


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table; exit 1 if our bookkeeping is above its bound."""
    options = _parse(arguments)
    samples = measure(options.requests, options.steps)
    summary = {side: _medians(rows) for side, rows in samples.items()}
    ratio = summary["mrv2"]["bookkeeping"] / summary["v1"]["bookkeeping"]
    print(_table(summary, options.requests, len(samples["v1"])))  # noqa: T201 - a command's output
    print(f"bookkeeping: mrv2 / v1 = {ratio:.2f} (bound {options.max_ratio:g})")  # noqa: T201
    if options.out is not None:
        record = {
            "environment": collect("cpu"),
            "requests": options.requests,
            "median_us": summary,
            "ratio": ratio,
        }
        with open(options.out, "w") as file:
            json.dump(record, file, indent=1)
    return 0 if ratio <= options.max_ratio else 1


def measure(num_requests: int, num_steps: int) -> dict[str, list[dict[str, float]]]:
    """Return microseconds by phase for each steady decode step, by runner."""
    spec = EngineSpec(
        model=TINY,
        max_num_seqs=num_requests,
        max_num_batched_tokens=2048,
        num_blocks=8 * num_requests + 1,
    )
    events = tuple(
        Add(step=0, req_id=f"bench-{index}", prompt=prompt(index, 16), max_tokens=num_steps + 16)
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
                or report.number < 16
            ):
                return
            for side, name in (("reference", "v1"), ("candidate", "mrv2")):
                samples[name].append(_row(report.seconds[side], phases[side]))

        started.run(
            events,
            Pass(candidate="mrv2", forced=False, observe=False, alternate=True, listener=listen),
        )
    return samples


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
    _watch_module(watch, core._model.module)
    core._attention.plan = watch.around("attention metadata", core._attention.plan)
    core.sampler = watch.around("sampler", core.sampler)
    return watch


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


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mrv2-diff bench", description=__doc__, allow_abbrev=False
    )
    positive = partial(_at_least, 1)
    parser.add_argument(
        "--requests", type=positive, default=64, help="decoding requests in the batch (default 64)"
    )
    parser.add_argument(
        "--steps", type=positive, default=150, help="decode steps to measure, about (default 150)"
    )
    parser.add_argument(
        "--max-ratio",
        type=float,
        default=MAX_RATIO,
        help=f"bound on mrv2 / v1 (default {MAX_RATIO})",
    )
    parser.add_argument("--out", default=None, help="file to write the figures to, as JSON")
    return parser.parse_args(arguments)


def _at_least(low: int, text: str) -> int:
    value = int(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"{value} is below {low}")
    return value
