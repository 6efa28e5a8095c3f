"""What a serving worker hands on while a shadow listens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from mrv2_diff import process

process.prepare()

# E402: vLLM reads the environment when it is imported.
from vllm.v1.outputs import AsyncModelRunnerOutput  # noqa: E402

from mrv2_diff.shadow.worker import Overheard, overheard_class  # noqa: E402

pytestmark = pytest.mark.vllm


class Above(ABC):
    """What it could be made of."""

    @abstractmethod
    def get_above(self) -> str: ...

    def _own(self) -> str:
        return "nobody's"


class Base(Above):
    """What vLLM's class of outputs could be in another version."""

    @abstractmethod
    def get_output(self) -> str: ...

    @abstractmethod
    def get_more(self, number: int) -> str: ...

    def get_rest(self) -> str:
        return "nobody's"


class Output(Base):
    """V1's."""

    value = "a value"

    def get_output(self) -> str:
        return "the output"

    def get_above(self) -> str:
        return "from above"

    def _own(self) -> str:
        return "V1's"

    def get_more(self, number: int) -> str:
        return f"more of {number}"

    def get_rest(self) -> str:
        return "V1's"


class FakeDesk:
    def __init__(self) -> None:
        self.heard: list[tuple[object, object]] = []

    def answer(self, found: object, output: object) -> None:
        self.heard.append((found, output))


def test_an_output_stays_v1s_whatever_its_class_has() -> None:
    desk, found = FakeDesk(), object()
    heard: Any = overheard_class(Base)(Output(), desk, found)
    assert Base in type(heard).__mro__
    assert (heard.get_more(3), heard.get_rest(), heard.value) == ("more of 3", "V1's", "a value")
    assert (heard.get_above(), heard._own()) == ("from above", "V1's")
    assert desk.heard == []
    assert heard.get_output() == "the output"
    assert desk.heard == [(found, "the output")]


def test_the_installed_vllm_takes_it_for_an_output() -> None:
    class Own(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM's is Any here
        def get_output(self) -> Any:
            return 7

    Own.__abstractmethods__ = frozenset()
    desk = FakeDesk()
    heard = Overheard(Own(), desk, "a slice")
    assert isinstance(heard, AsyncModelRunnerOutput)
    assert heard.get_output() == 7
    assert desk.heard == [("a slice", 7)]
