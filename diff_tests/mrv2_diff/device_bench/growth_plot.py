"""How times grow with the batch, the context and the arrivals, as one SVG with a panel for each."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

METRICS = {"host_us": "", "wall_us": "6 4"}
"""Metric and dashes of its line."""
COLOURS = {"v1": "#6e7781", "mrv2": "#1f6feb", "vllm-v2": "#d1242f"}

_GROWS = {"batch": "batch", "context": "context", "arrivals": "churn"}
"""Series, and the field of its points that grows."""
_TITLES = {
    "batch": "requests in the batch",
    "context": "tokens of context",
    "arrivals": "part of the batch that is replaced in each step",
}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 70, 40, 40


def growth_plot(entries: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the panels of all series that have two points or more; None where none has."""
    panels = []
    known = [entry for entry in entries if entry["part"] == "growth" and entry.get("medians")]
    for series, grows in _GROWS.items():
        rows = [
            (float(entry["point"][grows]), entry["medians"])
            for entry in known
            if entry["series"] == series
        ]
        if len(rows) >= 2:
            panels.append(_panel(_TITLES[series], sorted(rows, key=lambda row: row[0])))
    if not panels:
        return None
    moved = "".join(
        f'<g transform="translate(0 {place * _HEIGHT})">{panel}</g>'
        for place, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(panels)}" '
        f'font-family="sans-serif" font-size="12">{moved}</svg>\n'
    )


def _panel(title: str, rows: Sequence[tuple[float, Mapping[str, Any]]]) -> str:
    """Return one panel; places are evenly spaced, since what grows does so by factors or steps."""
    most = max(
        figures[metric] for _, medians in rows for figures in medians.values() for metric in METRICS
    )

    def point(place: int, value: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 90) * place / (len(rows) - 1)
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / most
        return round(x, 1), round(y, 1)

    parts = [
        f'<text x="{_LEFT}" y="18">Microseconds a step by {escape(title)}: '
        f"host (solid), wall (dashed)</text>"
    ]
    for place, (value, _) in enumerate(rows):
        x, _y = point(place, 0)
        parts.append(f'<text x="{x}" y="{_HEIGHT - 22}" text-anchor="middle">{value:g}</text>')
    for part in range(5):
        _x, y = point(0, most * part / 4)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{most * part / 4:,.0f}</text>'
        )
    runners = list(dict.fromkeys(name for _, medians in rows for name in medians))
    for runner in runners:
        for metric, dashes in METRICS.items():
            values = [
                point(place, medians[runner][metric])
                for place, (_, medians) in enumerate(rows)
                if runner in medians
            ]
            path = " ".join(f"{x},{y}" for x, y in values)
            x, y = values[-1]
            colour = COLOURS.get(runner, "#000000")
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-dasharray="{dashes}"/>'
                f'<text x="{x + 6}" y="{y + 4}" fill="{colour}">{escape(runner)}</text>'
            )
    return "".join(parts)
