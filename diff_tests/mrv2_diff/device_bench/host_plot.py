"""Host time of a steady step by runner and point, as the bars of one SVG."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from mrv2_diff.device_bench.growth_plot import COLOURS

_WIDTH, _LEFT, _TOP, _BAR, _GAP = 640, 150, 30, 16, 14
_FULL = _WIDTH - _LEFT - 70
"""Length of the longest bar; its figure stands behind it."""


def host_plot(entries: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a bar for each runner at each steady point, from zero; None where there is no point.

    Args:
        entries: Tasks of a record.
    """
    groups = [
        (_label(entry["point"]), {name: each["host_us"] for name, each in entry["medians"].items()})
        for entry in entries
        if entry["part"] == "steady" and entry.get("medians")
    ]
    if not groups:
        return None
    most = max(value for _, times in groups for value in times.values())
    parts = [f'<text x="{_LEFT}" y="16">Host microseconds of a steady decode step</text>']
    top = _TOP
    for label, times in groups:
        middle = top + _BAR * len(times) / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{middle:g}" text-anchor="end">{label}</text>')
        for runner, value in times.items():
            parts.append(_bar(top, runner, value, _FULL * value / most))
            top += _BAR
        top += _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def _label(point: Mapping[str, Any]) -> str:
    sampling = f"temperature {point['temperature']:g}" if point["temperature"] else "greedy"
    return f"batch {point['batch']}, {sampling}"


def _bar(top: int, runner: str, value: float, length: float) -> str:
    colour = COLOURS.get(runner, "#000000")
    return (
        f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BAR - 2}" fill="{colour}"/>'
        f'<text x="{_LEFT + length + 5:.1f}" y="{top + 11}" fill="{colour}">'
        f"{value:,.0f} {escape(runner)}</text>"
    )
