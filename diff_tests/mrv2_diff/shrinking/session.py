"""Shrinks cases on engines that keep running from one try to the next."""

import time
from collections.abc import Iterator
from dataclasses import replace

from mrv2_diff.case import Case, EngineSpec
from mrv2_diff.case_file import CaseFile, Found
from mrv2_diff.compare.right import parameters_of
from mrv2_diff.harness import UPSTREAM
from mrv2_diff.lockstep.worker import HarnessError
from mrv2_diff.record import Record
from mrv2_diff.run import CaseRunner, RunRequest
from mrv2_diff.shrinking.cuts import Events
from mrv2_diff.shrinking.request import Result, Say, ShrinkRequest
from mrv2_diff.shrinking.search import NothingToShrinkError, Search, Seen, Shrunk
from mrv2_diff.shrinking.signature import signature_of


def shrink_cases(request: ShrinkRequest, say: Say) -> Iterator[Result]:
    """Shrink each case, and yield what is left of it.

    Raises:
        ConfigError: An engine does not start, or a case names a fault that there is not.
    """
    run = RunRequest(
        cases=(),
        pair=request.pair,
        model=request.model,
        graphs=request.graphs,
        measures=False,
        small=UPSTREAM in request.pair,
    )
    with CaseRunner(run) as runner:
        for case in runner.ordered(request.cases):
            if case.apart is not None:
                why = "it runs in engines of its own, not in lockstep"
                yield Result(whole=case, why_not=why)
            else:
                yield _OneCase(runner, request, case, say).result()


class _OneCase:
    """Shrinks one case."""

    def __init__(self, runner: CaseRunner, request: ShrinkRequest, case: Case, say: Say) -> None:
        self._runner, self._request, self._say = runner, request, say
        self._whole = case
        # What has to happen in the whole case does not have to in a part of it.
        self._case = replace(case, expects=frozenset())
        self._record: Record | None = None

    def result(self) -> Result:
        starts = self._runner.num_started
        self._runner.takes(self._whole)  # starts the engine
        self._runner.forget_candidates()  # built without the fault, or with another
        began = time.process_time()
        search = Search(self._run, repeat=self._request.repeat, seconds=self._request.seconds)
        try:
            shrunk = search.shrink(self._whole.workload(), self._runner.forget_candidates)
        except NothingToShrinkError as error:
            return Result(whole=self._whole, why_not=str(error))
        finally:
            self._runner.forget_candidates()
        if self._request.engine:
            self._try_simpler_engine(shrunk)
        record = self._last_failing(shrunk)
        case = replace(
            self._with(shrunk.events),
            id=_short_id(self._whole),
            title=f"{self._whole.title.removesuffix(', made short')}, made short",
        )
        found = Found(
            verdict=shrunk.signature.verdict, value=shrunk.signature.value, summary=record.summary
        )
        return Result(
            whole=self._whole,
            kept=CaseFile(case=case, pair=self._request.pair, found=found),
            shrunk=shrunk,
            outcome=f"{record.verdict}: {record.summary}",
            seconds=time.process_time() - began,
            starts=self._runner.num_started - starts,
        )

    def _with(self, events: Events) -> Case:
        return replace(self._case, workload=lambda: events)

    def _run(self, events: Events) -> Seen | None:
        case = self._with(events)
        try:
            parameters_of(events)  # two requests of one id may not ask for other things
            if not self._runner.takes(case):
                return None
            record = self._runner.record(case)
        except (ValueError, HarnessError):
            return None
        first = record.first_divergence
        seen = Seen(
            signature=signature_of(record),
            num_steps=-(-record.steps // max(len(record.modes), 1)),
            diverged_at=first.step if first is not None else None,
        )
        self._record = record
        return seen

    def _last_failing(self, shrunk: Shrunk) -> Record:
        """Return a record of the result that fails; the last run of a flaky one may not have."""
        for _ in range(1 + 10 * self._request.repeat):
            if self._record is not None and signature_of(self._record) == shrunk.signature:
                break
            self._run(shrunk.events)
        assert self._record is not None
        return self._record

    def _try_simpler_engine(self, shrunk: Shrunk) -> None:
        spec = simpler_engine(self._case.engine)
        if spec == self._case.engine:
            return
        before = self._case
        self._case = replace(self._case, engine=spec)
        seen = self._run(shrunk.events)
        if seen is None or seen.signature != shrunk.signature:
            self._case = before
            self._say("the failure needs the engine that it has")


def _short_id(case: Case) -> str:
    """Return the id of what is left of a case, which is that of the case that it once came from."""
    if case.id.endswith(".short"):
        return case.id
    return ".".join(part for part in (case.id, case.fault, "short") if part is not None)


def simpler_engine(spec: EngineSpec) -> EngineSpec:
    """Return an engine without what a case may do without.

    Its number of blocks and tokens in a step stay, since preemptions and chunks come from them.
    """
    plain = EngineSpec(model=spec.model)
    scarce = ("max_num_batched_tokens", "num_blocks", "block_size", "dtype", "logprobs_mode")
    return replace(plain, **{name: getattr(spec, name) for name in scarce})
