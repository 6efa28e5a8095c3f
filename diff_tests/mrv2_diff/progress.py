"""Tells how a run goes: one line a case, and on a terminal a bar below the lines."""

import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from mrv2_diff.record import Record
from mrv2_diff.report.figures import count_text
from mrv2_diff.report.summary import verdict_text
from mrv2_diff.verdict import Verdict


class Progress(Protocol):
    """What the run command tells while it runs."""

    def __enter__(self) -> Self:
        """Start."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, and leave the terminal as it was."""
        ...

    def step(self, case_id: str, step: int) -> None:
        """A case reached a step."""
        ...

    def finished(self, record: Record) -> None:
        """A case ended."""
        ...


def progress_on(stream: TextIO, total: int) -> Progress:
    """Return a bar where `stream` is a terminal, and plain lines elsewhere."""
    return BarProgress(stream, total) if stream.isatty() else LineProgress(stream, total)


class LineProgress:
    """One line a case."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._lines = CaseLines(total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: every line is whole."""

    def step(self, case_id: str, step: int) -> None:
        """Say nothing: a line a step would bury the cases."""

    def finished(self, record: Record) -> None:
        """Print the case's line."""
        self._stream.write(self._lines.next(record) + "\n")
        self._stream.flush()


class BarProgress:
    """The same lines with a bar below them that names the running case and its step."""

    def __init__(self, stream: TextIO, total: int) -> None:
        from rich.console import Console  # a third of the start-up time, and not needed for files
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._lines = CaseLines(total)
        self._console = Console(file=stream, markup=False, highlight=False)
        self._bar = Bar(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", markup=False),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("cases", total=total, now="starting the engine")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, case_id: str, step: int) -> None:
        """Name the case and its step beside the bar."""
        self._bar.update(self._task, now=f"{case_id}, step {step}")

    def finished(self, record: Record) -> None:
        """Print the case's line above the bar and advance it."""
        self._console.print(self._lines.next(record), soft_wrap=True)
        self._bar.advance(self._task)


class CaseLines:
    """Writes each case's line, with its number and the time since the former."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._since = time.monotonic()

    def next(self, record: Record) -> str:
        """Return the line of a case that just ended."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._done += 1
        place = f"[{self._done:{len(str(self._total))}}/{self._total}]"
        values = sum(agreement.compared for agreement in record.agreements.values())
        line = (
            f"{place} {verdict_text(record.verdict):<11} {record.id}: "
            f"{count_text(values)} values compared, {seconds:.1f} s"
        )
        needs = required_text(record)
        lines = [f"{line}, {needs}" if needs else line]
        if not record.verdict.passes:
            lines[0] += f": {record.summary}"
            if record.first_divergence is not None:
                around = record.first_divergence.around_lines(record.pair)
                lines += [f"    {text}" for text in around]
        over = [cost.summary for cost in record.costs if cost.verdict is Verdict.OVER_BUDGET]
        return "\n".join([*lines, *(f"      over budget: {summary}" for summary in over)])


def required_text(record: Record) -> str:
    """Return the tolerance that a record's floats require, beside the bound of twice the floor."""
    needed = [
        f"{value} {agreement.required_tolerance:.3g} (floor {record.noise_floor[value]:.3g})"
        for value, agreement in record.agreements.items()
        if value in record.noise_floor
    ]
    return f"required spacings: {', '.join(needed)}" if needed else ""
