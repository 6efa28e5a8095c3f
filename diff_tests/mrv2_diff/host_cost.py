"""Host time of a step by batch size, of the core and of its adapter: no model, no kernel, no copy.

Each op makes its launch, as on a GPU, and does not start it; each copy stages its values and does
not move them. What is left is what the runner itself costs the host, and how that grows with the
batch. `mrv2-diff bench` compares a step of a whole engine with V1's instead.

Bookkeeping is `execute` and `sample`, which queue a step. It is measured alone, of plans, and with
the translation of what vLLM's scheduler says. Apart from it stands the output: its list
for each request, as V1's interface has it, grows with the batch whatever a runner does.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mrv2 import KVGroup, Runner, RunnerConfig, StepPlan
from mrv2.batch.inputs import InputBatch
from mrv2.memory.transfers import Transfers
from mrv2.ops.twin import TwinOp
from mrv2.ports import AttentionPlanner, ForwardInputs, ForwardOutput
from mrv2_diff.toy_host import ToyHost, Work

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
VOCAB_SIZE = 16
_WARMUP = 20
_BLOCK = 16
PROMPT = (1,) * 300
"""Longer than the numbers that Python keeps one object of each for, which are read at no cost."""
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Medians of one batch size, in microseconds of the thread's own time a step."""

    num_reqs: int
    steady_us: float
    """Bookkeeping where every request decodes, and nothing else happens."""
    churn_us: float
    """Bookkeeping where in each step one request leaves and one arrives, too."""
    translated_us: float
    """`steady_us` with the translation of vLLM's step into a plan."""
    translated_churn_us: float
    """`churn_us` with it."""
    output_us: float
    """What making a steady step's output, and letting go of it, costs beside the bookkeeping."""


Figures = tuple[float, float]
"""A step's bookkeeping and its output."""
Play = Callable[[Runner], Figures]
"""Runs one step; returns the seconds."""


class _NoModel(AttentionPlanner):
    """A model that computes nothing, with results of the right shapes."""

    def __init__(self, config: RunnerConfig) -> None:
        self._hidden = torch.zeros(config.max_num_tokens, 1)
        self._logits = torch.zeros(config.max_num_tokens, config.vocab_size)

    def plan(self, batch: InputBatch) -> object:
        """Return nothing: no attention reads it."""
        return None

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Return zeros."""
        return ForwardOutput(hidden=self._hidden[: len(inputs.input_ids)])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return zeros."""
        return self._logits[: len(hidden)]


def host_cost(num_reqs: int, num_steps: int) -> HostCost:
    """Measure one batch size.

    Args:
        num_reqs: Requests that decode in every step.
        num_steps: Steps of each kind whose median is taken.
    """
    from mrv2_diff.schedules.translated import played_from_vllm  # imports vLLM: seconds

    steady_us, output_us = _medians_us(num_reqs, num_steps, _played, churn=False)
    churn_us, _ = _medians_us(num_reqs, num_steps, _played, churn=True)
    translated_us, _ = _medians_us(num_reqs, num_steps, played_from_vllm(), churn=False)
    translated_churn_us, _ = _medians_us(num_reqs, num_steps, played_from_vllm(), churn=True)
    return HostCost(
        num_reqs=num_reqs,
        steady_us=steady_us,
        churn_us=churn_us,
        translated_us=translated_us,
        translated_churn_us=translated_churn_us,
        output_us=output_us,
    )


def _medians_us(
    num_reqs: int, num_steps: int, played: Callable[[StepPlan], Play], *, churn: bool
) -> Figures:
    """Return the medians of bookkeeping and of the output."""
    max_model_len = _BLOCK * -(-(len(PROMPT) + num_steps + _WARMUP + 8) // _BLOCK)
    config = RunnerConfig(
        device=torch.device("cpu"),
        max_num_reqs=num_reqs,
        max_num_tokens=2 * num_reqs + 8,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        kv_groups=(KVGroup(block_size=max_model_len, max_blocks=1),),
    )
    model = _NoModel(config)
    runner = Runner(config, model, model, Transfers(config.device, _no_copy))
    host = ToyHost(config.kv_groups, num_reqs)
    for index in range(num_reqs):
        _add(host, f"r{index}")
    plays = []
    for step in range(_WARMUP + num_steps):
        if churn and step:
            host.finish(next(iter(host.requests)))
            _add(host, f"s{step}")
        plays.append(played(host.plan(_everything(host))))
    gc.collect()
    gc.freeze()  # as vLLM does: what stands here is not gone through again
    with patch.object(TwinOp, "__call__", _launch_only):
        seconds = [play(runner) for play in plays][_WARMUP:]
    gc.unfreeze()
    bookkeeping, output = zip(*seconds, strict=True)
    return 1e6 * statistics.median(bookkeeping), 1e6 * statistics.median(output)


def _add(host: ToyHost, req_id: str) -> None:
    """Add a request whose prompt is computed but for its last token."""
    host.add(req_id, PROMPT).num_computed = len(PROMPT) - 1


def _played(plan: StepPlan) -> Play:
    """Return what runs a step of the core alone."""

    def play(runner: Runner) -> Figures:
        started = time.thread_time()
        pending = runner.sample(runner.execute(plan))
        queued = time.thread_time()
        pending.wait()
        return queued - started, time.thread_time() - queued

    return play


def _everything(host: ToyHost) -> Work:
    return {name: request.num_left for name, request in host.requests.items()}


def _no_copy(destination: Tensor, source: Tensor) -> None:
    pass


def _launch_only(op: "TwinOp[...]", *args: Any, **kwargs: Any) -> None:
    op.launch(*args, **kwargs)


def table(costs: list[HostCost]) -> str:
    """Return the figures as lines of text."""
    lines = [
        "microseconds a step; churn: one comes, one goes",
        "requests   steady    churn   steady, from vLLM   churn, from vLLM   output, steady",
    ]
    lines += [
        f"{cost.num_reqs:8}   {cost.steady_us:6.0f}   {cost.churn_us:6.0f}   "
        f"{cost.translated_us:17.0f}   {cost.translated_churn_us:16.0f}   {cost.output_us:14.0f}"
        for cost in costs
    ]
    return "\n".join(lines)


def growth(costs: Sequence[HostCost]) -> tuple[float, float]:
    """Return a steady step's cost in the largest batch over that in one of 64 or less.

    Returns:
        That of bookkeeping alone, and that with the translation.
    """
    base = max((cost for cost in costs if cost.num_reqs <= 64), key=lambda cost: cost.num_reqs)
    last = costs[-1]
    return last.steady_us / base.steady_us, last.translated_us / base.translated_us


_CURVES: tuple[tuple[str, str, Callable[[HostCost], float]], ...] = (
    ("steady", "#1f6feb", lambda cost: cost.steady_us),
    ("steady, from vLLM", "#8250df", lambda cost: cost.translated_us),
    ("one comes, one goes", "#d1242f", lambda cost: cost.churn_us),
    ("one comes, one goes, from vLLM", "#bc4c00", lambda cost: cost.translated_churn_us),
    ("the output, steady", "#6e7781", lambda cost: cost.output_us),
)
"""Each curve's name and colour, and what it shows."""


def picture(costs: Sequence[HostCost]) -> str:
    """Return the curves as SVG, over the logarithm of the batch size."""
    width, height, left, bottom = 640, 400, 60, 40
    most = max(max(cost.translated_churn_us, cost.churn_us, cost.output_us) for cost in costs)
    last = math.log2(costs[-1].num_reqs) or 1.0

    def point(num_reqs: int, value: float) -> tuple[float, float]:
        x = left + (width - left - 20) * math.log2(num_reqs) / last
        return round(x, 1), round(height - bottom - (height - bottom - 30) * value / most, 1)

    def curve(name: str, colour: str, values: Sequence[tuple[int, float]]) -> str:
        points = [point(*value) for value in values]
        path = " ".join(f"{x},{y}" for x, y in points)
        x, y = points[-1]
        return (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x}" y="{y - 6}" text-anchor="end" fill="{colour}">{name}</text>'
        )

    ticks = "".join(
        f'<text x="{point(cost.num_reqs, 0)[0]}" y="{height - bottom + 16}" text-anchor="middle">'
        f"{cost.num_reqs}</text>"
        for cost in costs
    )
    marks = "".join(
        f'<text x="{left - 6}" y="{point(1, most * part / 4)[1] + 4}" text-anchor="end">'
        f"{most * part / 4:.0f}</text>"
        for part in range(5)
    )
    curves = "".join(
        curve(name, colour, [(cost.num_reqs, value(cost)) for cost in costs])
        for name, colour, value in _CURVES
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">'
        f'<text x="{left}" y="16">Host time of a step in microseconds, by requests</text>'
        f"{ticks}{marks}{curves}</svg>\n"
    )


def host_costs(num_steps: int, batches: Sequence[int] = BATCHES) -> list[HostCost]:
    """Measure every batch size on one thread, in rounds; each figure is the least of the rounds.

    Whatever else the machine does can only add to a time.
    """
    torch.set_num_threads(1)
    rounds = [[host_cost(num_reqs, num_steps) for num_reqs in batches] for _ in range(_ROUNDS)]
    return [
        HostCost(
            num_reqs=costs[0].num_reqs,
            steady_us=min(cost.steady_us for cost in costs),
            churn_us=min(cost.churn_us for cost in costs),
            translated_us=min(cost.translated_us for cost in costs),
            translated_churn_us=min(cost.translated_churn_us for cost in costs),
            output_us=min(cost.output_us for cost in costs),
        )
        for costs in zip(*rounds, strict=True)
    ]
