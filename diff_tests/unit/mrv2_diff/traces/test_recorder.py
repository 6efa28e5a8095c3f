"""A recorder beside a worker of this test: what it writes, and that no step notices it."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from mrv2.errors import ConfigError
from mrv2_diff.traces import plugin, recorder
from mrv2_diff.traces.check import check_steps
from mrv2_diff.traces.events import Event
from mrv2_diff.traces.format import RUNNING, open_trace
from mrv2_diff.traces.recorder import Recorder, is_output
from mrv2_diff.traces.saying import UnrecordableError, executed_event, output_event, sampled_event
from mrv2_diff.traces.toy import a_head, a_load


def _scheduled(**changes: Any) -> Any:
    """A SchedulerOutput without requests, as far as a recorder looks at it."""
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, new_block_ids=[],
        num_computed_tokens=[], num_output_tokens=[],
    )  # fmt: skip
    values = {
        "scheduled_new_reqs": [], "scheduled_cached_reqs": cached, "num_scheduled_tokens": {},
        "finished_req_ids": set(), "preempted_req_ids": None, "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None, "has_structured_output_requests": False,
        "pending_structured_output_tokens": False,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def _drawn(*tokens: int) -> Any:
    return SimpleNamespace(req_ids=[f"r{token}" for token in tokens],
                           sampled_token_ids=[[token] for token in tokens])  # fmt: skip


def _made(path: Path, said: list[str], **changes: object) -> Recorder:
    return Recorder(path, a_head(**changes), said.append)


def test_what_was_taken_is_a_whole_trace(tmp_path: Path) -> None:
    said: list[str] = []
    made = _made(tmp_path / "t", said)
    for _ in range(300):
        made.take_step(_scheduled())
        made.take(output_event, made.last_step, _drawn())
    made.close()
    made.close()
    trace = open_trace(tmp_path / "t")
    assert trace.end is not None
    assert trace.end.why == "the engine ended"
    assert check_steps(trace.head, trace.steps()).steps_with_output == 300
    assert not said


def test_a_file_that_nobody_closed_is_whole(tmp_path: Path) -> None:
    made = _made(tmp_path / "t", [])
    made.take_step(_scheduled())
    made.take(output_event, 0, _drawn())
    deadline = time.monotonic() + 20
    while open_trace(tmp_path / "t").whole_steps == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    trace = open_trace(tmp_path / "t")
    assert trace.whole_steps == 1
    assert trace.end is not None
    assert trace.end.why == RUNNING
    made.close()


def test_lists_that_change_afterwards_are_as_they_were(tmp_path: Path) -> None:
    made = _made(tmp_path / "t", [])
    step = _scheduled(new_block_ids_to_zero=[1, 2])
    made.take_step(step)
    step.new_block_ids_to_zero.append(99)
    made.close()
    (seen,) = open_trace(tmp_path / "t").steps()
    assert seen.executed.new_block_ids_to_zero == [1, 2]


@pytest.mark.parametrize("name", ["scheduled_spec_decode_tokens", "kv_connector_metadata"])
def test_what_has_no_place_ends_the_recording_and_not_the_step(tmp_path: Path, name: str) -> None:
    said: list[str] = []
    made = _made(tmp_path / "t", said)
    made.take_step(_scheduled())
    made.take(output_event, 0, _drawn())
    made.take_step(_scheduled(**{name: {"r": [1]}}))
    made.take_step(_scheduled())
    made.close()
    trace = open_trace(tmp_path / "t")
    assert trace.end is not None
    assert name in trace.end.why
    assert trace.whole_steps == 1
    assert len(said) == 1


def test_a_disk_that_is_slow_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED_BYTES", 1000)
    gate = threading.Event()
    monkeypatch.setattr(Recorder, "_arrived", _held(gate, Recorder._arrived))
    said: list[str] = []
    made = _made(tmp_path / "t", said)
    for _ in range(100):
        made.take_step(_scheduled())
        made.take(output_event, made.last_step, _drawn())
    gate.set()
    made.close()
    assert "wait to be written" in said[0]
    trace = open_trace(tmp_path / "t")
    assert 0 < trace.whole_steps < 100


def _held(gate: threading.Event, arrived: Any) -> Any:
    def held(self: Recorder) -> Any:
        gate.wait(10)
        return arrived(self)

    return held


def test_a_full_disk_ends_the_recording(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    said: list[str] = []
    made = _made(tmp_path / "t", said)
    with Path("/dev/full").open("wb", buffering=0) as full:
        made._writer._file = full
        made.take_step(_scheduled())
        made.close()
    assert "No space left" in said[0]
    made.take_step(_scheduled())  # nothing happens


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(ConfigError, match="name a file that is not there yet"):
        _made(tmp_path / "t", [])
    assert (tmp_path / "t").read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file"):
        _made(tmp_path / "no" / "t", [])


def test_a_private_recording_has_no_names(tmp_path: Path) -> None:
    made = _made(tmp_path / "t", [], is_private=True)
    encode = msgspec.msgpack.encode
    for event in a_load(40):
        made._put(encode(event))
    made.close()
    trace = open_trace(tmp_path / "t")
    contents = check_steps(trace.head, trace.steps())
    assert (contents.steps, contents.masks) == (40, 40)
    assert b"request-" not in encode(list(trace.events()))


def test_an_output_is_known_by_its_bytes() -> None:
    encode = msgspec.msgpack.encode
    events: list[Event] = a_load(8)
    for event in events:
        assert is_output(encode(event)) == (type(event).__name__ == "Output")


def test_a_mask_is_taken_as_it_is() -> None:
    bits = np.array([[1, -1]], np.int32)
    grammar = SimpleNamespace(structured_output_request_ids=["a"], grammar_bitmask=bits)
    event = sampled_event(3, grammar)
    assert event.mask.array().tolist() == bits.tolist()


@pytest.mark.parametrize(
    ("asked", "name"), [({"lora_request": object()}, "lora_request"), ({"mm_features": [1]}, "mm")]
)
def test_a_request_with_more_than_tokens_has_no_place(asked: dict[str, Any], name: str) -> None:
    new = SimpleNamespace(req_id="a", **asked)
    with pytest.raises(UnrecordableError, match=name):
        executed_event(_scheduled(scheduled_new_reqs=[new]))


# The door.


def test_without_the_variable_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.TRACE_VAR, raising=False)
    plugin.register()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MRV2_TRACE": ""}, "is empty"),
        ({"MRV2_TRACE": "t", "MRV2_TRACE_PRIVATE": "yes"}, "neither 0 nor 1"),
    ],
)
def test_a_value_that_cannot_act_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugin.wanted(environ)
