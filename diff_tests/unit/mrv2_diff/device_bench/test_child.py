"""A child answers line by line, and tells its parent of an error before it ends."""

import io
import json
from typing import Any

import pytest

from mrv2_diff.device_bench.child import Child, serve


def talk(*commands: dict[str, Any]) -> list[dict[str, Any]]:
    def double(number: int) -> dict[str, Any]:
        return {"double": 2 * number}

    def fail() -> dict[str, Any]:
        raise RuntimeError("a reason")

    answers = io.StringIO()
    requests = io.StringIO("".join(json.dumps(command) + "\n" for command in commands))
    serve(requests, answers, {"double": double, "fail": fail})
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_each_command_has_its_answer() -> None:
    asked = [{"do": "double", "number": number} for number in (1, 4)]
    assert talk(*asked) == [{"double": 2}, {"double": 8}]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ({"do": "fail"}, "RuntimeError: a reason"),
        ({"do": "sing"}, "KeyError: 'sing'"),
        ({"do": "double", "letter": "a"}, "unexpected keyword argument 'letter'"),
    ],
)
def test_an_error_is_the_last_answer(command: dict[str, Any], part: str) -> None:
    (answer,) = talk(command, {"do": "double", "number": 1})
    assert answer["error"].startswith("Traceback")
    assert part in answer["error"]


def test_an_engine_must_be_started_first() -> None:
    with pytest.raises(RuntimeError, match="send start first"):
        Child().throughput({}, stream=False)
