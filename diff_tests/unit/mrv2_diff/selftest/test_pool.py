"""Processes that do jobs: one that dies or hangs fails its job alone."""

import os
import time
from multiprocessing.connection import Connection

import pytest

from mrv2_diff.selftest import pool
from mrv2_diff.selftest.jobs import Job


def work(channel: "Connection[object, object]") -> None:
    """Stand in for a worker: a job's name says what becomes of it."""
    while True:
        try:
            job = channel.recv()
        except EOFError:
            return
        assert isinstance(job, Job)
        if job.name == "dies":
            os.abort()
        if job.name == "hangs":
            time.sleep(600)
        channel.send([job.name])


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_work", work)


def jobs(*names: str) -> list[Job]:
    return [Job(what="control", name=name, group=name, cost=1.0) for name in names]


def answered(*names: str) -> dict[str, object]:
    return {job.name: found for job, found in pool.answers(jobs(*names))}


def test_every_job_is_answered_once() -> None:
    names = tuple(f"job {number}" for number in range(12))
    assert answered(*names) == {name: [name] for name in names}


def test_a_process_that_dies_fails_its_job_and_no_other() -> None:
    found = answered("one", "dies", "two", "three")
    assert found.pop("dies") == "its process ended with -6"
    assert found == {name: [name] for name in ("one", "two", "three")}


def test_a_job_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LIMIT_S", 8.0)
    found = answered("one", "hangs", "two")
    assert found.pop("hangs") == "it did not end within 8 s"
    assert found == {name: [name] for name in ("one", "two")}


def test_no_jobs_are_answered_at_once() -> None:
    assert answered() == {}
