"""Cases as pytest's tests: collected without torch and vLLM, run on engines that cases share."""

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import pytest

from mrv2_diff.case import Case
from mrv2_diff.harness import UPSTREAM, prepare_for
from mrv2_diff.record import Record
from mrv2_diff.selection import SelectionError, pair_named, selected
from mrv2_diff.small import has_small_form
from mrv2_diff.verdict import Verdict


class Runner(Protocol):
    """Runs cases, with an engine for those that follow each other on equal ones."""

    kind: str
    """`cpu` or `cuda`."""

    def record(self, case: Case) -> Record:
        """Run and judge one case."""

    def close(self) -> None:
        """Close the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lockstep:
    """What the tests are made of and run by, as values that a conftest can replace."""

    cases: Callable[[], Mapping[str, Case]]
    start: Callable[[tuple[str, str]], Runner]
    """Returns what runs cases on a pair of runners."""


LOCKSTEP = pytest.StashKey[Lockstep]()
"""Of a config: what to use in place of the installed cases and engines."""


class CaseFailedError(Exception):
    """A case did not pass."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.summary)
        self.record = record


class Cases:
    """The part of the plugin that acts in a session with cases.

    Args:
        config: Of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lockstep: Lockstep | None = None
        self._runner: Runner | None = None
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # pytest's default, which is every test of the folder
        try:
            self.pair = pair_named(config.getoption("mrv2_pair") or "v1,mrv2")
        except SelectionError as error:
            raise pytest.UsageError(f"--mrv2-pair: {error}") from error

    def pytest_sessionstart(self) -> None:
        """Find the cases; what cannot be found ends the session."""
        self._lockstep = self._config.stash.get(LOCKSTEP, None) or installed()
        try:
            self._chosen = _by_engine(
                selected(
                    self._lockstep.cases(),
                    self._config.getoption("mrv2_area"),
                    self._config.getoption("mrv2_case"),
                    self._config.getoption("mrv2_case_file"),
                )
            )
        except SelectionError as error:
            raise pytest.UsageError(str(error)) from error

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        """Add a test for each case before others deselect some by -k or name their groups."""
        items.extend(self._items(session))
        return (yield)

    def _items(self, session: pytest.Session) -> list[pytest.Item]:
        parent = CaseList.from_parent(session, name=self._name(), nodeid=self._name())
        parent.cases = self._chosen
        parent.owner = self
        added = list(session.genitems(parent))
        if self._config.pluginmanager.hasplugin("xdist"):
            groups = self._groups()
            for item in added:
                assert isinstance(item, CaseItem)
                item.add_marker(pytest.mark.xdist_group(name=groups[item.case]))
        return added

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Keep the cases of an engine together with `--dist loadgroup`.

        pytest-xdist reads a group from the end of a test's id, which pytest 9.2 no longer lets it
        write there; the groups of the cases are known here, whatever their ids.
        """
        if config.getvalue("dist") != "loadgroup":
            return None
        prefix = self._name()
        groups = {f"{prefix}::{case.id}": group for case, group in self._groups().items()}
        scheduling: Any = import_module("xdist.scheduler").LoadGroupScheduling

        class ByEngine(scheduling):
            def _split_scope(self, nodeid: str) -> str:
                return groups.get(nodeid) or super()._split_scope(nodeid)

        return ByEngine(config, log)

    def _name(self) -> str:
        return f"mrv2[{','.join(self.pair)}]"

    def _groups(self) -> dict[Case, str]:
        """Return each case's group: its engine, or itself where it runs apart."""
        engines = list(dict.fromkeys(case.engine for case in self._chosen))
        return {
            case: f"engine-{engines.index(case.engine)}" if case.apart is None else case.id
            for case in self._chosen
        }

    def run(self, case: Case) -> Record:
        """Run one case on the session's engines; skip where it cannot be compared."""
        if self._runner is None:
            assert self._lockstep is not None
            self._runner = self._lockstep.start(self.pair)
        if self.pair[0] == self.pair[1] and not case.on(self._runner.kind).against_itself:
            pytest.skip("V1 is known to be wrong in this case; compare it with mrv2 instead")
        if UPSTREAM in self.pair and not has_small_form(case):
            pytest.skip(f"nothing is left of this case in the small form that {UPSTREAM} needs")
        record = self._runner.record(case)
        if record.verdict is Verdict.REFUSED:
            pytest.skip(f"refused: {record.summary}")
        return record

    def pytest_sessionfinish(self) -> None:
        """Close the engine, if one was started."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class CaseList(pytest.Collector):
    """The node above the cases."""

    cases: Sequence[Case]
    owner: Cases

    def collect(self) -> "Iterator[CaseItem]":
        """Yield a test for each case."""
        for case in self.cases:
            yield CaseItem.from_parent(self, name=case.id, case=case, owner=self.owner)


class CaseItem(pytest.Item):
    """One case on the pair of the session."""

    def __init__(self, *, case: Case, owner: Cases, **others: Any) -> None:
        super().__init__(**others)
        self.case = case
        self._owner = owner

    def runtest(self) -> None:
        """Run the case.

        Raises:
            CaseFailedError: It does not pass.
        """
        record = self._owner.run(self.case)
        self.user_properties += [
            ("verdict", str(record.verdict)),
            ("summary", record.summary),
            ("steps", record.steps),
            ("command", record.command),
        ]
        if not record.verdict.passes:
            raise CaseFailedError(record)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any, **__: Any) -> str:
        """Return the divergence where a case failed, else what went wrong with the engine."""
        if isinstance(excinfo.value, CaseFailedError):
            return failure_text(self.case, excinfo.value.record)
        return "".join(traceback.format_exception(excinfo.value))

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the case stands, for reports."""
        return self.path, None, self.name


def failure_text(case: Case, record: Record) -> str:
    """Return a failed case's divergence: value, step, request and both sides, and what to do."""
    lines = [f"{record.verdict}: {record.summary}"]
    first = record.first_divergence
    if first is not None:
        reference, candidate = record.pair
        request = f"{first.req_id}, index {first.index}" if first.req_id else "the whole batch"
        rows = [
            ("value", first.value),
            ("step", f"{first.step} ({first.mode})"),
            ("request", request),
            (f"reference {reference}", first.reference or "-"),
            (f"candidate {candidate}", first.candidate or "-"),
            ("bound", first.policy),
        ]
        lines += [f"  {name:<16} {text}" for name, text in rows]
        lines += [f"    {line}" for line in first.around_lines(record.pair)]
    if record.error:
        lines += ["", record.error.rstrip(), ""]
    lines.append(f"run it again:  {record.command}")
    if case.apart is None:
        lines.append(f"make it short: mrv2-diff shrink {case.file or case.id}")
    return "\n".join(lines)


def _by_engine(cases: Iterable[Case]) -> list[Case]:
    """Return the cases engine by engine, so that each starts once; those apart come first."""
    cases = list(cases)
    order = {engine: index for index, engine in
             enumerate(dict.fromkeys(case.engine for case in cases))}  # fmt: skip
    return sorted(cases, key=lambda case: -1 if case.apart else order[case.engine])


def installed() -> Lockstep:
    """Return the catalog and engines of this installation."""
    return Lockstep(cases=_catalog, start=_start)


def _catalog() -> Mapping[str, Case]:
    from mrv2_diff.catalog import CASES  # half a second, which a fake does not need

    return CASES


def _start(pair: tuple[str, str]) -> Runner:
    prepare_for([pair])
    from mrv2_diff.run import CaseRunner, RunRequest  # imports torch and vLLM: seconds

    small = UPSTREAM in pair
    return CaseRunner(RunRequest(cases=(), pair=pair, model=None, measures=False, small=small))
