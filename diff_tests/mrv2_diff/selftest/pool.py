"""Processes that do jobs. One that dies or hangs fails its job alone, and another takes over.

A planted fault may do anything: write outside of an array, or never end.
"""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from mrv2_diff import process
from mrv2_diff.selftest.jobs import Dealer, Job
from mrv2_diff.selftest.request import NUM_WORKERS

LIMIT_S = 300.0
"""Seconds that a job may take, the start of its engine included."""
_END_S = 20.0
"""Seconds that a process has to close its engine."""

Answer = tuple[Job, list[object] | str]
"""A job with what was found, or why nothing was."""


def answers(todo: Sequence[Job], *, num_workers: int = NUM_WORKERS) -> Iterator[Answer]:
    """Do all jobs and yield each as it is done.

    Args:
        todo: The jobs.
        num_workers: Processes. With 0 this process does all of them.
    """
    if num_workers == 0:
        yield from _here(todo)
        return
    dealer = Dealer(todo)
    hands = [_Hand(number) for number in range(num_workers)]
    try:
        for hand in hands:
            hand.take(dealer)
        while busy := [hand for hand in hands if hand.job is not None]:
            limit = max(0.0, min(hand.until for hand in busy) - time.monotonic())
            ready = wait([hand.channel for hand in busy], timeout=limit)
            for hand in busy:
                job = hand.job
                assert job is not None
                if hand.channel in ready:
                    yield job, hand.answer(dealer)
                elif time.monotonic() >= hand.until:
                    hand.replace(dealer)
                    yield job, f"it did not end within {LIMIT_S:g} s"
                else:
                    continue
                hand.take(dealer)
    finally:
        for hand in hands:
            hand.end()


def _here(todo: Sequence[Job]) -> Iterator[Answer]:
    from mrv2_diff.selftest.worker import Worker  # imports torch and vLLM: seconds

    worker, dealer = Worker(), Dealer(todo)
    try:
        while (job := dealer.next(0)) is not None:
            yield job, list(worker.do(job))
    finally:
        worker.close()


class _Hand:
    """One process and the job that it has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.job: Job | None = None
        self.until = 0.0
        self._start()

    def take(self, dealer: Dealer) -> None:
        """Give the process its next job."""
        self.job = dealer.next(self.number)
        self.until = time.monotonic() + LIMIT_S
        if self.job is not None:
            with suppress(OSError):  # one that died is found when it should answer
                self.channel.send(self.job)

    def answer(self, dealer: Dealer) -> list[object] | str:
        """Return what the process says of its job; one that died is replaced."""
        try:
            found: list[object] | str = self.channel.recv()
        except (EOFError, OSError):
            self._process.join(10.0)
            code = self._process.exitcode
            self.replace(dealer)
            return f"its process ended with {code}"
        return found

    def replace(self, dealer: Dealer) -> None:
        """End the process, whatever it does, and start another."""
        self._process.kill()
        self.end()
        dealer.leave(self.number)
        self._start()

    def end(self) -> None:
        """End the process."""
        self.channel.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _work(channel: "Connection[object, object]") -> None:
    """Answer jobs until the channel closes. Runs in a process of its own."""
    process.prepare()
    from mrv2_diff.selftest.worker import Worker  # imports torch and vLLM: seconds

    worker = Worker()
    while True:
        try:
            job = channel.recv()
        except EOFError:
            break
        assert isinstance(job, Job)
        found: list[object] | str
        try:
            found = list(worker.do(job))
        except Exception as error:  # noqa: BLE001 - it is told, and the next job goes on
            found = f"{type(error).__name__}: {error}"
        channel.send(found)
    worker.close()
