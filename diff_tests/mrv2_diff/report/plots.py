"""Plots as inline SVG that keep their line widths at any page width.

Horizontal positions are percentages or lie in a stretched view box; text stays outside, in HTML,
so that it has the same size on a phone as on a wide screen. Only numbers enter the SVG.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from mrv2_diff.record import Latency, Quartiles
from mrv2_diff.report.figures import number_text, time_text

PHASES = ("execute", "sample", "output", "total")

_WIDTH = 1000
_HEIGHT = 100
_MAX_STICKS = 250
"""More steps are drawn as the maxima of equal runs of steps; a stick stays over a pixel wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One runner's time in one phase."""

    phase: str
    side: str
    """`reference` or `candidate`."""
    runner: str
    median: str
    quartiles: str
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlot:
    """Logit difference per step, on a logarithmic scale."""

    svg: Markup
    top: str
    bottom: str
    last_step: int
    floor: str | None


def latency_bars(
    reference: Latency | None, candidate: Latency | None, pair: tuple[str, str]
) -> list[Bar]:
    """Return the quartile bars of both runners, phase by phase, on one scale from zero."""
    timed = [("reference", pair[0], reference), ("candidate", pair[1], candidate)]
    known = [(side, runner, latency) for side, runner, latency in timed if latency is not None]
    longest = max((latency.total_us.q3 for _, _, latency in known), default=0.0)
    bars = []
    for phase in PHASES:
        for side, runner, latency in known:
            times = _phase(latency, phase)
            if times is not None:
                bars.append(_bar(phase, side, runner, times, longest))
    return bars


def step_plot(diffs: Sequence[float], floor: float | None) -> StepPlot | None:
    """Return the plot of `diffs`, or None where no step differs."""
    finite = [diff for diff in diffs if diff > 0 and math.isfinite(diff)]
    if not finite:
        return None
    shown = [*finite, floor] if floor and math.isfinite(floor) else finite
    low, high = math.floor(math.log10(min(shown)) - 0.5), math.ceil(math.log10(max(shown)) + 0.1)

    def height(value: float) -> float:
        return _HEIGHT * (math.log10(value) - low) / (high - low)

    sticks = _sticks([height(diff) if diff > 0 else 0.0 for diff in _maxima(_capped(diffs, high))])
    decades = "".join(
        f'<path class="grid" d="M0 {_HEIGHT * step / (high - low):.2f}H{_WIDTH}"/>'
        for step in range(high - low + 1)
    )
    line = ""
    if floor and math.isfinite(floor):
        line = f'<path class="floor" d="M0 {_HEIGHT - height(floor):.2f}H{_WIDTH}"/>'
    return StepPlot(
        svg=Markup(
            f'<svg class="steps" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
            f'role="img" aria-label="Logit difference per step">{decades}{sticks}{line}</svg>'
        ),
        top=number_text(10.0**high),
        bottom=number_text(10.0**low),
        last_step=len(diffs) - 1,
        floor=number_text(floor) if line else None,
    )


def _phase(latency: Latency, phase: str) -> Quartiles | None:
    quartiles = {
        "execute": latency.execute_us,
        "sample": latency.sample_us,
        "output": latency.output_us,
        "total": latency.total_us,
    }
    return quartiles[phase]


def _bar(phase: str, side: str, runner: str, times: Quartiles, longest: float) -> Bar:
    def percent(value: float) -> float:
        return 100 * value / longest if longest else 0.0

    start, width = percent(times.q1), max(percent(times.q3) - percent(times.q1), 0.3)
    median = percent(times.median)
    svg = Markup(
        f'<svg class="bar {side}" aria-hidden="true">'
        f'<line class="whole" x1="0" x2="{median:.2f}%" y1="50%" y2="50%"/>'
        f'<rect x="{start:.2f}%" width="{width:.2f}%" y="15%" height="70%"/>'
        f'<line class="median" x1="{median:.2f}%" x2="{median:.2f}%" y1="0" y2="100%"/></svg>'
    )
    return Bar(
        phase=phase,
        side=side,
        runner=runner,
        median=time_text(times.median),
        quartiles=f"{time_text(times.q1)} to {time_text(times.q3)}, {times.count} steps",
        svg=svg,
    )


def _capped(diffs: Sequence[float], high: int) -> list[float]:
    """Return the differences with what is not finite at the top of the scale."""
    return [diff if math.isfinite(diff) else 10.0**high for diff in diffs]


def _maxima(values: Sequence[float]) -> list[float]:
    """Return at most `_MAX_STICKS` values: the largest of each of as many equal runs."""
    sticks = min(len(values), _MAX_STICKS)
    edges = [len(values) * stick // sticks for stick in range(sticks + 1)]
    return [max(values[start:end]) for start, end in pairwise(edges)]


def _sticks(heights: Sequence[float]) -> str:
    """Return one path with a filled stick per height."""
    pitch = _WIDTH / len(heights)
    width = min(pitch * 0.7, 12)
    path = "".join(
        f"M{(place + 0.5) * pitch - width / 2:.1f} {_HEIGHT}"
        f"v{-max(height, 1):.2f}h{width:.2f}V{_HEIGHT}z"
        for place, height in enumerate(heights)
        if height > 0
    )
    return f'<path class="sticks" d="{path}"/>'
