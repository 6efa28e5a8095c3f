"""A record as text: one table for each part, ratios with their intervals below each line."""

from collections.abc import Iterator, Mapping
from typing import Any

_STEP_COLUMNS = {
    "host_us": "host",
    "cpu_us": "cpu",
    "execute_us": "execute",
    "sample_us": "sample",
    "read_us": "read",
    "wait_us": "wait",
    "other_threads_us": "threads",
    "wall_us": "wall",
}
_THROUGHPUT_COLUMNS = {
    "tokens_per_s": "tokens/s",
    "seconds": "seconds",
    "ttft_ms_median": "TTFT ms",
    "ttft_ms_p99": "p99 ms",
}
_LEGEND = {
    "steady": "whole engines, steady decode; microseconds a step, medians",
    "churn": "whole engines, requests leave and arrive in each step; microseconds a step, medians",
    "replay": "the runner alone, on a replayed trace; microseconds a step, medians",
    "throughput": "whole workload",
    "growth": "whole engines, few rounds; microseconds a step, medians",
}
_NAME_WIDTH = 40
_TOP_KERNELS = 12
_GIB = float(1 << 30)


def table(record: Mapping[str, Any]) -> str:
    """Return the record as text, with what failed at the end."""
    lines = [_environment(record["environment"])]
    lines += _memory(record["memory"])
    tasks: Mapping[str, Mapping[str, Any]] = record["tasks"]
    for part, legend in _LEGEND.items():
        rows = [entry for entry in tasks.values() if entry["part"] == part]
        if rows:
            lines += ["", f"{part}: {legend}", *_rows(rows, part)]
    lines += _profiles(tasks)
    for runner, failures in record["failures"].items():
        lines += [f"FAILED {runner} during {entry['during']}:\n{entry['message']}"
                  for entry in failures]  # fmt: skip
    return "\n".join(lines)


def _environment(environment: Mapping[str, str]) -> str:
    names = ("date", "commit", "device", "vllm", "torch")
    return ", ".join(f"{name} {environment[name]}" for name in names if name in environment)


def _rows(rows: list[Mapping[str, Any]], part: str) -> Iterator[str]:
    columns = _THROUGHPUT_COLUMNS if part == "throughput" else _STEP_COLUMNS
    width = 10
    yield f"{'':<{_NAME_WIDTH}}{'runner':<9}" + "".join(
        f"{title:>{width}}" for title in columns.values()
    )
    for entry in rows:
        name = " ".join(text for text in (entry.get("series", ""), _point(entry)) if text)
        if "skipped" in entry or "refused" in entry:
            yield f"{name:<{_NAME_WIDTH}}{entry.get('skipped') or 'REFUSED: ' + entry['refused']}"
            continue
        for runner, figures in entry["medians"].items():
            cells = "".join(f"{figures[key]:>{width},.0f}" for key in columns)
            yield f"{name:<{_NAME_WIDTH}}{runner:<9}{cells}"
        yield from _ratios(entry, part)


def _ratios(entry: Mapping[str, Any], part: str) -> Iterator[str]:
    for metric, pairs in entry["ratios"].items():
        for pair, ratio in pairs.items():
            verdict = "" if part == "growth" else f" {ratio['verdict']}"
            text = f"{metric} {pair} = {ratio_text(ratio)}"
            yield f"{'':<{_NAME_WIDTH}}{text} {ratio['rounds']} rounds{verdict}"


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """Return a ratio with its interval, where there is one."""
    if ratio["low"] is None:
        return f"{ratio['ratio']:.3f}"
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _point(entry: Mapping[str, Any]) -> str:
    point = entry.get("point")
    if point is None:
        return ""
    sampling = f"t{point['temperature']:g}" if point["temperature"] else "greedy"
    churn = f" churn {100 * point['churn']:g}%" if point["churn"] else ""
    return f"batch {point['batch']} {sampling} context {point['context']}{churn}"


def _memory(memory: Mapping[str, Any]) -> Iterator[str]:
    if not memory:
        return
    yield "\nmemory: each engine alone on the device, GiB"
    if "skipped" in memory:
        yield f"  skipped: {memory['skipped']}"
        return
    for runner, values in memory.items():
        if "skipped" in values:
            yield f"  {runner:<9}skipped: {values['skipped']}"
            continue
        phases = ", ".join(
            f"{phase} {sizes['device'] / _GIB:.2f} (peak {sizes['peak'] / _GIB:.2f})"
            for phase, sizes in (values["memory"] or {}).items()
        )
        yield f"  {runner:<9}{values['kv_tokens']:>12,} KV tokens; {phases}"
        said = ", ".join(
            f"{name} {size / _GIB:.2f}" for name, size in values["memory_reported"].items()
        )
        yield f"  {'':<9}it says: {said or 'nothing'}"


def _profiles(tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    entries = [entry for entry in tasks.values() if entry["part"] == "profile"]
    if not entries:
        return
    yield "\nprofile: microseconds and counts a step; gap = wall of a step less busy"
    titles = ("busy", "outside", "plan", "copies", "gap", "calls", "uploads", "downloads")
    yield f"{'':<{_NAME_WIDTH}}{'runner':<9}" + "".join(f"{title:>10}" for title in titles)
    for entry in entries:
        if "skipped" in entry:
            yield f"{_point(entry):<{_NAME_WIDTH}}{entry['skipped']}"
            continue
        for runner, profile in entry["profiles"].items():
            gap = exposed_gap_us(tasks, entry["point"], runner, profile["busy_us"])
            cells = [profile[name] for name in ("busy_us", "outside_us", "plan_us", "copy_us")]
            cells += [gap, profile["num_calls"], profile["uploads"], profile["downloads"]]
            text = "".join(f"{'-' if cell is None else f'{cell:,.1f}':>10}" for cell in cells)
            yield f"{_point(entry):<{_NAME_WIDTH}}{runner:<9}{text}"
    yield from _details(entries)


def exposed_gap_us(
    tasks: Mapping[str, Mapping[str, Any]], point: Mapping[str, Any], runner: str, busy_us: float
) -> float | None:
    """Return the step's wall time less the device's busy time; None where the one is not known.

    The runner alone says it best, so a replayed step goes before one of the whole engine.
    """
    for part in ("replay", "steady"):
        for entry in tasks.values():
            if entry["part"] == part and entry.get("point") == point:
                figures = entry.get("medians", {}).get(runner)
                if figures:
                    return float(figures["wall_us"] - busy_us)
    return None


def _details(entries: list[Mapping[str, Any]]) -> Iterator[str]:
    """Name calls and kernels, so that a reader can check what was put where."""
    for entry in entries:
        for runner, profile in entry.get("profiles", {}).items():
            calls = ", ".join(f"{name} {count:.1f}" for name, count in profile["calls"].items())
            yield f"\n{_point(entry)} {runner} calls: {calls}"
            outside = [kernel for kernel in profile["kernels"] if kernel["kind"] != "model"]
            inside = [kernel for kernel in profile["kernels"] if kernel["kind"] == "model"]
            for kernel in [*outside[:_TOP_KERNELS], *inside[:_TOP_KERNELS]]:
                yield (
                    f"  {kernel['kind']:<15}{kernel['runs']:>7.1f} x"
                    f"{kernel['microseconds']:>9.1f} us  {kernel['name'][:90]}"
                )
