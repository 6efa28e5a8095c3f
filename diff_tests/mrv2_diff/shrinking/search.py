"""Tries shorter and shorter workloads, and keeps what still fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mrv2_diff.case import Add
from mrv2_diff.schedules.shrinking import shrink
from mrv2_diff.shrinking import cuts
from mrv2_diff.shrinking.cuts import Events
from mrv2_diff.shrinking.signature import Signature, Vote, needed
from mrv2_diff.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one run of a workload showed."""

    signature: Signature
    num_steps: int
    """Of its longest comparing pass."""
    diverged_at: int | None = None
    """Step of the first divergence."""


Run = Callable[[Events], Seen | None]
"""Runs a workload; None where vLLM does not take its requests."""


class NothingToShrinkError(Exception):
    """The case that was given does not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What is left of a workload."""

    events: Events
    signature: Signature
    before: Vote
    """How often the whole workload failed so."""
    after: Vote
    """How often what is left of it does."""
    num_steps: int
    first_steps: int
    """Of the whole workload."""
    tries: int
    """Runs altogether."""
    out_of_time: bool
    """Whether something may be left that could be left out."""


class Search:
    """Shrinks one workload.

    Args:
        run: Runs a workload.
        repeat: Runs of the whole workload, and of the result; a failure that was not seen in all of
            the former is looked for in as many runs of each try.
        seconds: After which no further try begins. None is without end.
        clock: Time in seconds; of the processor, so that what else runs does not count.
    """

    def __init__(
        self,
        run: Run,
        *,
        repeat: int = 3,
        seconds: float | None = None,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._run, self._repeat, self._clock = run, repeat, clock
        self._deadline = None if seconds is None else clock() + seconds
        self._tried: set[Events] = set()
        self._tries = 0

    def shrink(self, events: Events, confirm: Callable[[], None] = lambda: None) -> Shrunk:
        """Return the least of a workload that still fails in the same way.

        Args:
            events: The whole workload.
            confirm: Called before the result is run for its vote, to let it begin afresh.

        Raises:
            NothingToShrinkError: It passes, or is not taken.
        """
        first, before = self._look(events)
        self._signature, self._best, self._seen = first.signature, events, first
        self._runs = 1 if before.steady else self._repeat
        self._needed = needed(before, self._runs)
        self._cost = cuts.cost(events, first.num_steps)
        while True:
            reached = self._cost
            for way in _WAYS:
                way(self)
            if self._cost == reached or self._is_late():
                break
        confirm()
        late = self._is_late()
        after = self._vote(self._best, self._repeat)
        return Shrunk(
            events=self._best,
            signature=self._signature,
            before=before,
            after=after,
            num_steps=self._seen.num_steps,
            first_steps=first.num_steps,
            tries=self._tries,
            out_of_time=late,
        )

    def _look(self, events: Events) -> tuple[Seen, Vote]:
        """Run the whole workload several times; return its most frequent failure with its vote."""
        runs = []
        for _ in range(self._repeat):
            self._tries += 1
            seen = self._run(events)
            if seen is None:
                raise NothingToShrinkError("vLLM does not take the requests of this case")
            runs.append(seen)
        failing = [seen for seen in runs if _is_failure(seen.signature)]
        if not failing:
            ends = ", ".join(sorted({str(seen.signature) for seen in runs}))
            raise NothingToShrinkError(f"the case does not fail: {ends} in {len(runs)} runs")
        signatures = [seen.signature for seen in failing]
        commonest = max(signatures, key=signatures.count)
        vote = Vote(seen=signatures.count(commonest), runs=len(runs))
        return failing[signatures.index(commonest)], vote

    def _vote(self, events: Events, runs: int) -> Vote:
        results = []
        for _ in range(runs):
            self._tries += 1
            seen = self._run(events)
            results.append(seen is not None and seen.signature == self._signature)
        return Vote(seen=sum(results), runs=runs)

    def _is_late(self) -> bool:
        return self._deadline is not None and self._clock() >= self._deadline

    def _keeps(self, events: Events) -> bool:
        """Try a workload and keep it if it is less and fails in the same way; return whether."""
        events = cuts.sorted_by_step(events)
        if events in self._tried or events == self._best or self._is_late():
            return False
        self._tried.add(events)
        if not cuts.is_sound(events) or cuts.cost(events, 0)[0] > self._cost[0]:
            return False
        seen = self._seen_often_enough(events)
        if seen is None:
            return False
        reached = cuts.cost(events, seen.num_steps)
        if reached >= self._cost:
            return False
        self._best, self._seen, self._cost = events, seen, reached
        return True

    def _seen_often_enough(self, events: Events) -> Seen | None:
        """Run a workload until the vote on it is decided; return a run that shows the failure."""
        count, last = 0, None
        for left in range(self._runs - 1, -1, -1):
            self._tries += 1
            seen = self._run(events)
            if seen is None:
                return None
            if seen.signature == self._signature:
                count, last = count + 1, seen
            if count >= self._needed or count + left < self._needed:
                break
        return last if count >= self._needed else None

    # ------------------------------------------------------------ ways to cut

    def _end(self) -> None:
        """Leave out what comes after the divergence."""
        step = self._seen.diverged_at
        if step is not None:
            self._keeps(cuts.until(self._best, step))

    def _requests(self) -> None:
        whole = self._best
        shrink(cuts.groups(whole), lambda parts: self._keeps(cuts.only(whole, parts)))

    def _aborts(self) -> None:
        whole = self._best
        singly = [[index] for index in range(len(whole))]
        shrink(singly, lambda parts: self._keeps(cuts.only(whole, parts)))

    def _waits(self) -> None:
        for by in (lambda wait: 0, lambda wait: min(wait, 1), lambda wait: wait // 2):
            while any(self._keeps(events) for events in cuts.without_gap(self._best, by)):
                pass

    def _prompts_for_steps(self) -> None:
        for index in self._targets():
            count = max(add.max_tokens for _, add in self._adds()) - 1
            while count > 0:
                if not self._keeps(cuts.changed(self._best, index, cuts.earlier(count))):
                    count //= 2

    def _tokens(self) -> None:
        for index in self._targets():
            self._least(lambda add: add.max_tokens, cuts.with_tokens, index)

    def _prompts(self) -> None:
        for index in self._targets():
            self._least(lambda add: len(add.prompt), cuts.with_prompt, index)

    def _parameters(self) -> None:
        for index, _ in self._adds():
            while any(self._keeps(events) for events in self._simpler(index)):
                pass

    def _simpler(self, index: int) -> Iterator[Events]:
        event = dict(self._adds())[index]
        for add in cuts.simpler(event):
            yield (*self._best[:index], add, *self._best[index + 1 :])

    def _adds(self) -> list[tuple[int, Add]]:
        return [(index, event) for index, event in enumerate(self._best) if isinstance(event, Add)]

    def _targets(self) -> list[int | None]:
        """Return all arrivals at once, then each."""
        return [None, *(index for index, _ in self._adds())]

    def _least(
        self,
        measure: Callable[[Add], int],
        cut: Callable[[int], Callable[[Add], Add]],
        index: int | None,
    ) -> None:
        """Halve the distance to the least number that still fails."""
        low = 1
        while True:
            high = max(measure(add) for at, add in self._adds() if index in (None, at))
            if high <= low:
                return
            middle = low if low == 1 else (low + high) // 2
            if not self._keeps(cuts.changed(self._best, index, cut(middle))):
                low = middle + 1


_WAYS: tuple[Callable[[Search], None], ...] = (
    Search._end,
    Search._prompts_for_steps,  # early, since fewer steps make the tries that follow cheaper
    Search._requests,
    Search._waits,
    Search._end,
    Search._tokens,
    Search._aborts,
    Search._parameters,
    Search._prompts,
)


def _is_failure(signature: Signature) -> bool:
    verdict = signature.verdict
    if verdict in (Verdict.INCONCLUSIVE, Verdict.REFUSED, Verdict.NOT_RUN):
        return False  # nothing was shown that could be shown with less
    return not verdict.passes or verdict is Verdict.REFERENCE_WRONG
