"""The tables and the picture of `docs/performance.md` are what the kept records say."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from mrv2_diff.device_bench.growth_plot import growth_plot
from mrv2_diff.device_bench.host_plot import host_plot

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "host_times.svg"
GROWTH = ROOT / "docs" / "growth.svg"
SIDES = ("mrv2", "v1", "vllm-v2")

Task = dict[str, Any]


def tasks(part: str) -> list[Task]:
    (path,) = (ROOT / "reports" / "gpu").glob(f"bench_{part}-*.json")
    kept: list[Task] = list(json.loads(path.read_text())["tasks"].values())
    return kept


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def point(task: Task) -> tuple[str, int]:
    temperature, batch = task["point"]["temperature"], task["point"]["batch"]
    return f"temperature {temperature:g}" if temperature else "greedy", batch


def of_sides(task: Task, metric: str) -> list[str]:
    return [f"{task['medians'][side][metric]:,.0f}" for side in SIDES]


def over_the_faster(task: Task, metric: str) -> dict[str, Any]:
    faster = min(SIDES[1:], key=lambda side: float(task["medians"][side][metric]))
    ratio: dict[str, Any] = task["ratios"][metric][f"mrv2/{faster}"]
    return ratio


def interval(ratio: dict[str, Any]) -> str:
    return "-" if ratio["low"] is None else f"{ratio['low']:.3f} to {ratio['high']:.3f}"


def steady_rows() -> Iterator[str]:
    for task in tasks("steady"):
        ratio = over_the_faster(task, "host_us")
        figures = f"{ratio['ratio']:.3f}", interval(ratio), ratio["rounds"]
        yield row(*point(task), *of_sides(task, "host_us"), *figures)


def phase_rows() -> Iterator[str]:
    for task in tasks("steady"):
        ours = task["medians"]["mrv2"]
        reading = ours["read_us"] - ours["wait_us"]
        phases = ours["execute_us"], ours["sample_us"], reading, ours["other_threads_us"]
        blocks = [block["host_us"] for block in task["blocks"]["mrv2"]]
        yield row(*point(task), *(f"{us:,.0f}" for us in (*phases, min(blocks), max(blocks))))


def call_rows() -> Iterator[str]:
    for task in tasks("profile"):
        profiles = [task["profiles"][side] for side in SIDES]
        metrics = ("num_calls", "uploads", "downloads")
        yield row(*point(task), *(f"{each[metric]:.1f}" for metric in metrics for each in profiles))


def churn_rows() -> Iterator[str]:
    for task in tasks("churn"):
        ratio = over_the_faster(task, "host_us")
        figures = f"{ratio['ratio']:.3f}", interval(ratio), ratio["rounds"]
        yield row(*point(task), *of_sides(task, "host_us"), *figures)


def later_rows() -> Iterator[str]:
    """Steady steps of a whole engine, and the wall of a replayed trace, of the present code."""
    kept = tasks("later")
    walls = {point(task): task for task in kept if task["part"] == "replay"}
    for task in kept:
        if task["part"] == "steady":
            ratio = over_the_faster(task, "host_us")
            times = of_sides(task, "host_us"), of_sides(walls[point(task)], "wall_us")
            yield row(*point(task), *times[0], f"{ratio['ratio']:.3f}", interval(ratio), *times[1])


def large_model_rows() -> Iterator[str]:
    for task in tasks("8b"):
        if task["part"] == "replay":
            ratios = [task["ratios"]["wall_us"][f"mrv2/{side}"] for side in SIDES[1:]]
            over = [f"{each['ratio']:.3f}, {interval(each)}" for each in ratios]
            yield row(point(task)[1], *of_sides(task, "wall_us"), *over, ratios[0]["rounds"])


def memory_rows() -> Iterator[str]:
    (path,) = (ROOT / "reports" / "gpu").glob("bench_memory-*.json")
    kept = json.loads(path.read_text())["memory"]
    for side in SIDES:
        said = kept[side]["memory_reported"]
        estimate, captured = said["cudagraph_memory_estimate"], said["captured"]
        megabytes = f"{estimate / 1e6:.1f}", f"{captured / 1e6:.1f}"
        yield row(side, f"{kept[side]['kv_tokens']:,}", *megabytes)


def replay_rows() -> Iterator[str]:
    busy = {point(task): task["profiles"]["mrv2"]["busy_us"] for task in tasks("profile")}
    for task in tasks("replay"):
        ours = busy[point(task)]
        over = task["medians"]["mrv2"]["wall_us"] / ours
        times = *of_sides(task, "host_us"), *of_sides(task, "wall_us")
        yield row(*point(task), *times, f"{ours:,.0f}", f"{over:.3f}")


def busy_rows() -> Iterator[str]:
    for task in tasks("profile"):
        profiles = [task["profiles"][side] for side in SIDES]
        busy = [f"{each['busy_us']:,.0f}" for each in profiles]
        yield row(*point(task), *busy, *(f"{each['outside_us']:.1f}" for each in profiles))


def kernel_rows() -> Iterator[str]:
    """What is no part of the model, at a batch of 256."""
    by_sampling = {
        point(task)[0]: {kernel["name"]: kernel for kernel in task["profiles"]["mrv2"]["kernels"]}
        for task in tasks("profile")
        if point(task)[1] == 256
    }
    greedy = by_sampling["greedy"]
    for name, kernel in greedy.items():
        if kernel["kind"] != "model":
            both = [kernels[name]["microseconds"] for kernels in by_sampling.values()]
            yield row(f"`{called(name)}`", kernel["kind"], *(f"{us:.1f}" for us in both))


def called(name: str) -> str:
    """A kernel without what is around its name: `void`, namespaces, parameters."""
    short = name.removeprefix("void ").removeprefix("at::native::").removeprefix("flash::")
    inside = next((word for word in ("direct_copy", "FillFunctor") if word in name), "")
    head = short.split("<")[0].strip()
    return f"{head} ({inside})" if inside else head


def throughput_rows() -> Iterator[str]:
    (task,) = tasks("throughput")
    for side in SIDES:
        figures = task["medians"][side]
        rates = [block["tokens_per_s"] for block in task["blocks"][side]]
        ratio = task["ratios"]["tokens_per_s"].get(f"mrv2/{side}")
        over = f"{ratio['ratio']:.2f}, {ratio['low']:.2f} to {ratio['high']:.2f}" if ratio else "-"
        times = f"{figures['ttft_ms_median']:.0f}", f"{figures['ttft_ms_p99']:.0f}"
        median = f"{figures['tokens_per_s']:,.0f}"
        yield row(side, median, f"{min(rates):,.0f} to {max(rates):,.0f}", over, *times)


TABLES = (steady_rows, later_rows, phase_rows, call_rows, churn_rows, replay_rows, busy_rows,
          kernel_rows, throughput_rows, large_model_rows, memory_rows)  # fmt: skip
"""In the order of the page."""


def figures_on(page: str) -> list[str]:
    """The rows of the page's tables that hold figures: those below a heading with `mrv2` in it."""
    found, kept = [], False
    for above, line in pairwise(page.splitlines()):
        if not line.startswith("|"):
            kept = False
        elif set(line) <= set("|-: "):
            kept = "mrv2" in above
        elif kept:
            found.append(line)
    return found


def test_tables_are_the_kept_figures() -> None:
    assert figures_on(PAGE.read_text()) == [line for rows in TABLES for line in rows()]


def test_pictures_are_drawn_from_the_kept_figures() -> None:
    assert PICTURE.read_text() == host_plot(tasks("steady"))
    assert GROWTH.read_text() == growth_plot(tasks("growth"))


def test_a_figure_that_was_changed_is_seen() -> None:
    page = PAGE.read_text()
    line = next(steady_rows())
    assert figures_on(page.replace(line, line.replace("| 1 |", "| 2 |"))) != figures_on(page)
