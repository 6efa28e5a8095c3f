"""Runs blocks of all runners by turns until their ratios are known, or the time is over."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrv2_diff.device_bench.channel import RunnerFailed
from mrv2_diff.device_bench.ratios import MIN_ROUNDS, Ratio, balanced_orders, ratios, settled

Figures = Mapping[str, float]
"""One block's figures by metric."""


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What rounds gave."""

    blocks: dict[str, list[Figures]]
    """By runner; one for each round that it went through."""
    ratios: dict[str, dict[str, Ratio]] = field(default_factory=dict)
    """By metric, then by `candidate/reference`."""
    failures: list[RunnerFailed] = field(default_factory=list)
    rounds: int = 0
    out_of_time: bool = False

    @property
    def conclusive(self) -> bool:
        """Whether every ratio that decides is narrow."""
        if self.failures or not self.rounds:
            return False
        return all(settled(found) for found in self.ratios.values())


def interleave(
    runners: Sequence[str],
    block: Callable[[str], Figures],
    metrics: Sequence[str],
    *,
    deadline: float,
    expected_s: float = 0.0,
    fixed_rounds: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Rounds:
    """Run rounds of one block for each runner.

    A runner that fails is left out from then on; the others go on.

    Args:
        runners: Who.
        block: Runs one block of a runner.
        metrics: Whose ratios must be narrow.
        deadline: Time of `clock`; no round begins that would end later.
        expected_s: Seconds that a round takes at least, as far as they are known before the first.
        fixed_rounds: Number of rounds, whatever the ratios are. None: until all are narrow.
        clock: Seconds.
    """
    live = list(runners)
    done = Rounds(blocks={runner: [] for runner in runners})
    orders, longest = balanced_orders(live), expected_s
    while live and not done.out_of_time:
        began = clock()
        if began + longest > deadline:
            done.out_of_time = True
            break
        for runner in orders[done.rounds % len(orders)]:
            if runner not in live:
                continue
            try:
                done.blocks[runner].append(block(runner))
            except RunnerFailed as failure:
                done.failures.append(failure)
                live.remove(runner)
        longest = max(longest, clock() - began)
        done.rounds += 1
        if fixed_rounds is not None:
            if done.rounds >= fixed_rounds:
                break
        elif done.rounds >= MIN_ROUNDS and done.rounds % 2 == 0:
            done.ratios = _ratios(done.blocks, live, metrics)
            if all(settled(found) for found in done.ratios.values()):
                break
    done.ratios = _ratios(done.blocks, live, metrics)
    return done


def _ratios(
    blocks: Mapping[str, Sequence[Figures]], live: Sequence[str], metrics: Sequence[str]
) -> dict[str, dict[str, Ratio]]:
    """Return the ratios of the runners that are left; those of one that failed are not made."""
    return {
        metric: ratios({name: [figures[metric] for figures in blocks[name]] for name in live})
        for metric in metrics
    }


def describe(done: Rounds) -> dict[str, Any]:
    """Return what a record keeps of rounds."""
    return {
        "rounds": done.rounds,
        "out_of_time": done.out_of_time,
        "conclusive": done.conclusive,
        "ratios": {
            metric: {pair: ratio.values() for pair, ratio in found.items()}
            for metric, found in done.ratios.items()
        },
        "blocks": {name: list(figures) for name, figures in done.blocks.items()},
        "failures": [str(failure) for failure in done.failures],
    }
