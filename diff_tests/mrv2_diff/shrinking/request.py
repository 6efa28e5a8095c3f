"""What a shrink is asked for, and what comes of it. Imports neither torch nor vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mrv2_diff.case import Add, Case
from mrv2_diff.case_file import CaseFile
from mrv2_diff.shrinking.search import Shrunk

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkRequest:
    """Which cases to shrink, and for how long."""

    cases: tuple[Case, ...]
    pair: tuple[str, str]
    model: Path | None = None
    graphs: str = "none"
    repeat: int = 3
    """Runs of each case before and after; of each try where a failure is flaky."""
    seconds: float = 60.0
    """Of the processor, for each case, once its engine has started."""
    engine: bool = False
    """Whether the engine is to become simpler too, which takes another start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one case."""

    whole: Case
    kept: CaseFile | None = None
    """None where there was nothing to shrink."""
    shrunk: Shrunk | None = None
    why_not: str = ""
    outcome: str = ""
    """What comes of the short case, in a sentence."""
    seconds: float = 0.0
    """Of the processor, without the engine's start."""
    starts: int = 0
    """Engines that were started for it."""


def table(results: list[Result]) -> str:
    """Return a line for each case: what is left of it, and how it was seen."""
    rows = [("case", "fails with", "requests", "steps", "tokens", "seen", "tries", "processor")]
    for result in results:
        name = result.whole.fault or result.whole.id
        if result.shrunk is None or result.kept is None:
            rows.append((name, result.why_not, "", "", "", "", "", ""))
            continue
        shrunk = result.shrunk
        before = [event for event in result.whole.workload() if isinstance(event, Add)]
        after = [event for event in shrunk.events if isinstance(event, Add)]
        rows.append(
            (
                name,
                f"{shrunk.signature.verdict} at {shrunk.signature.value}"
                if shrunk.signature.value
                else str(shrunk.signature),
                f"{len(before)} -> {len(after)}",
                f"{shrunk.first_steps} -> {shrunk.num_steps}",
                f"{_tokens(before)} -> {_tokens(after)}",
                f"{shrunk.after.seen}/{shrunk.after.runs}",
                str(shrunk.tries),
                f"{result.seconds:.0f} s" + (" (limit)" if shrunk.out_of_time else ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
             for row in rows)  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def _tokens(adds: list[Add]) -> int:
    return sum(len(add.prompt) + add.max_tokens for add in adds)


def conclusion(results: list[Result]) -> str:
    """Return one line about all of them."""
    done = [result.shrunk for result in results if result.shrunk is not None]
    if not done:
        return f"shrink: 0 of {len(results)} cases fail"
    requests = max(sum(isinstance(event, Add) for event in each.events) for each in done)
    steps = max(each.num_steps for each in done)
    return (
        f"shrink: {len(done)} of {len(results)} cases made short, to at most {requests} requests "
        f"and {steps} steps"
    )
