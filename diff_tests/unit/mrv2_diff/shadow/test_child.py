"""What a shadow's process tells the desk while it runs slices."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from mrv2_diff.shadow import child
from mrv2_diff.shadow.child import answers, heartbeat
from mrv2_diff.shadow.messages import Done
from mrv2_diff.shadow.slices import Slice


class FakeFollower:
    """Finds something in each step, and fails at a marked one."""

    max_num_tokens = 100

    def run(self, part: Slice) -> Done:
        if part.forget_all:
            raise MemoryError
        return Done(
            num_slices=part.num_steps, compared_tokens=2, findings=[{"slice": part.restarted[0]}]
        )


def slices(*names: str) -> list[Slice]:
    """Slices of one request, one behind the other."""
    return [Slice(finished=["the same"], restarted=[name]) for name in names]


def told(parts: list[Slice]) -> list[Done]:
    follower: Any = FakeFollower()
    return list(answers(follower, parts))


def test_what_was_found_in_slices_is_told_together() -> None:
    (done,) = told(slices("a", "b", "c"))
    assert (done.num_slices, done.compared_tokens) == (3, 6)
    assert [finding["slice"] for finding in done.findings] == ["a", "b", "c"]
    assert told([]) == []


def test_slices_of_different_requests_are_run_together() -> None:
    (done,) = told([Slice(restarted=["a"]), Slice(restarted=["b"]), Slice(restarted=["a"])])
    assert done.num_slices == 3
    assert [finding["slice"] for finding in done.findings] == ["a", "a"]


def test_slices_that_take_long_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ANSWER_S", -1.0)
    assert [done.num_slices for done in told(slices("a", "b"))] == [1, 1]


def test_what_was_found_before_an_error_is_told() -> None:
    follower: Any = FakeFollower()
    found = answers(follower, [*slices("a", "b"), Slice(forget_all=True), *slices("c")])
    assert next(found).num_slices == 2
    with pytest.raises(MemoryError):
        next(found)


def test_steps_of_a_long_catch_up_are_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        tell = heartbeat(theirs)
        tell()
        assert not ours.poll(), "at most once in a while"
        monkeypatch.setattr(child, "ANSWER_S", -1.0)
        tell()
        assert pickle.loads(ours.recv_bytes()) == Done()
