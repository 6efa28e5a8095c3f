"""A trace's file: what is written is read, and what was damaged is refused within bounds."""

import hashlib
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mrv2_diff.traces import damage
from mrv2_diff.traces.check import check_steps
from mrv2_diff.traces.events import Event, Executed, Mask, Output, Sampled
from mrv2_diff.traces.format import (
    DamagedTraceError,
    FrameWriter,
    TraceError,
    assemble,
    is_trace,
    open_trace,
)
from mrv2_diff.traces.toy import a_head, a_load, arrival, going_on, write

NUM_STEPS = 2000
NO_BITS = Mask("int32", (0, 11), b"")
MASKED = Sampled(0, [], NO_BITS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace") / "whole.trace", a_load(NUM_STEPS))


def test_what_is_written_is_read(whole: Path) -> None:
    trace = open_trace(whole)
    assert trace.head == a_head()
    assert trace.end is not None
    assert trace.whole_steps == trace.end.steps == NUM_STEPS
    assert list(trace.events()) == a_load(NUM_STEPS)
    contents = check_steps(trace.head, trace.steps())
    assert (contents.steps, contents.requests, contents.masks) == (NUM_STEPS, 250, NUM_STEPS)
    assert is_trace(whole)


def test_an_output_may_come_after_the_next_step(tmp_path: Path) -> None:
    events: list[Event] = [
        arrival(), MASKED, going_on(), Output(0, ["../../x"], [[9]]),
        Output(1, ["../../x"], [[8]]), going_on(computed=4),
    ]  # fmt: skip
    steps = list(open_trace(write(tmp_path / "t", events)).steps())
    assert [step.output and step.output.token_ids for step in steps] == [[[9]], [[8]], None]
    assert [step.number for step in steps] == [0, 1, 2]


@pytest.mark.parametrize(
    "events",
    [
        [Output(0, [], [])],
        [arrival(), Sampled(1, [], NO_BITS)],
        [arrival(), MASKED, MASKED],
        [arrival(), Output(0, [], []), Output(0, [], [])],
        [going_on()] * 1025,
    ],
    ids=["no step", "another step", "sampled twice", "two outputs", "none ends"],
)
def test_events_in_no_order_are_refused(tmp_path: Path, events: list[Event]) -> None:
    with pytest.raises(TraceError):
        list(assemble(iter(events), tmp_path))


# Damage. Each copy is refused, and nobody holds more than twice the file for it.


def _read(path: Path) -> None:
    trace = open_trace(path)
    check_steps(trace.head, trace.steps())


def test_every_damaged_copy_is_refused_in_little_memory(whole: Path, tmp_path: Path) -> None:
    size = whole.stat().st_size
    assert size > 100_000
    copies = list(damage.copies(whole))
    assert len(copies) >= 50
    for number, (name, damaged) in enumerate(copies):
        assert damaged != whole.read_bytes(), name
        path = tmp_path / f"{number}.trace"
        path.write_bytes(damaged)
        tracemalloc.start()
        try:
            with pytest.raises(TraceError) as refused:
                _read(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 2 * size, (name, peak)
        is_of_a_step = "of the trace cannot be played" in str(refused.value)
        assert is_of_a_step or str(path) in str(refused.value), name


def test_reading_damaged_copies_is_measured_in_processes(whole: Path, tmp_path: Path) -> None:
    """Three of them, since each takes a start of Python."""
    data = whole.read_bytes()
    wanted = ("cut at 5 tenths", "sealed bomb", "sealed a huge block")
    for name, damaged in damage.copies(whole):
        if name in wanted:
            path = tmp_path / "damaged.trace"
            path.write_bytes(damaged)
            taken = damage._read_in_process(name, path)
            assert taken.fault(len(data)) is None, (name, taken)
    taken = damage._read_in_process("whole", whole)
    assert taken.fault(len(data)) == "it was read to its end"
    assert taken.python_bytes > 0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"failure": "it hangs"}, "it hangs"),
        ({"refusal": None}, "it was read to its end"),
        ({"python_bytes": 2_000_001}, "Python took 2000001 bytes"),
        ({"resident_bytes": 2_000_001}, "the process grew by 2000001 bytes"),
    ],
)
def test_what_a_copy_may_not(changes: dict[str, Any], fault: str | None) -> None:
    given: dict[str, Any] = {
        "name": "x", "refusal": "no", "seconds": 0.1,
        "python_bytes": 2_000_000, "resident_bytes": 2_000_000,
    }  # fmt: skip
    assert damage.Taken(**(given | changes)).fault(1_000_000) == fault


def test_a_small_file_may_take_what_a_frame_does() -> None:
    taken = damage.Taken(name="x", refusal="no", seconds=0.1, python_bytes=2 * damage.MIN_BYTES)
    assert taken.fault(100) is None
    assert replace(taken, python_bytes=2 * damage.MIN_BYTES + 1).fault(100) is not None


@pytest.mark.parametrize("tenths", range(1, 10))
def test_what_precedes_a_cut_is_salvaged(whole: Path, tmp_path: Path, tenths: int) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut.trace"
    path.write_bytes(data[: len(data) * tenths // 10])
    with pytest.raises(DamagedTraceError, match="whole steps precede the damage") as damage:
        open_trace(path)
    trace = open_trace(path, salvage=True)
    steps = list(trace.steps())
    assert len(steps) == trace.whole_steps == damage.value.whole_steps
    assert abs(len(steps) - NUM_STEPS * tenths / 10) < 0.05 * NUM_STEPS
    assert steps == list(open_trace(whole).steps())[: len(steps)]
    check_steps(trace.head, iter(steps))


def test_every_altered_byte_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "small.trace", a_load(16))
    data = path.read_bytes()
    assert len(data) < 10_000
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 0x40
        path.write_bytes(bytes(altered))
        with pytest.raises(TraceError):
            open_trace(path)


def test_nothing_is_salvaged_of_another_version(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.trace"
    path.write_bytes(b"MRV2TRC\n" + struct.pack("<HH", 2, 0) + whole.read_bytes()[12:])
    with pytest.raises(TraceError, match=r"has version 2\.0; this version reads 1\.0"):
        open_trace(path, salvage=True)


def test_the_checksum_of_the_file_stands_beside_those_of_frames(tmp_path: Path) -> None:
    with (path := tmp_path / "t").open("wb") as file:
        writer = FrameWriter(file, a_head())
        writer._hash = hashlib.sha256(b"another file")
        writer.end("")
    with pytest.raises(DamagedTraceError, match="checksum of the file differs"):
        open_trace(path)


def test_a_mask_has_as_many_bytes_as_its_shape_says() -> None:
    with pytest.raises(ValueError, match="has 4 bytes, not 8"):
        Mask("int32", (1, 2), b"abcd").array()
    with pytest.raises(ValueError, match="has 4 bytes, not 18446"):
        Mask("int32", (2**31 - 1, 2**31 - 1), b"abcd").array()


# Contents that contradict themselves, behind checksums that are right.


def _arrival(**changes: object) -> Executed:
    return msgspec.structs.replace(arrival(), **changes)


def _blocks(*block_ids: list[int]) -> list[Event]:
    request = msgspec.structs.replace(arrival().new[0], block_ids=list(block_ids))
    return [_arrival(new=[request])]


def _known(**changes: object) -> Executed:
    event = going_on()
    return msgspec.structs.replace(event, known=msgspec.structs.replace(event.known, **changes))


NAME = "../../x"
CONTRADICTIONS: list[tuple[str, list[Event], str]] = [
    ("a block beyond", _blocks([64]), "a block id: 64, which must be below 64"),
    ("too few blocks", _blocks([]), "runs 3 tokens in blocks for 0"),
    ("other KV groups", _blocks([1], [2]), "blocks of 2 KV groups, and there are 1"),
    ("a token beyond", [arrival(prompt=(331,))], "a token id: 331, which must be below 331"),
    ("a biased token beyond", [arrival(logit_bias={400: 1.0})], "a token id: 400"),
    ("no prompt", [_arrival(new=[msgspec.structs.replace(arrival().new[0], prompt=[])])], "prompt"),
    ("nobody's step", [going_on("y")], "'y' goes on and never came"),
    ("too many tokens", [_arrival(num_scheduled_tokens={NAME: 65})], "tokens: 65"),
    ("another request", [_arrival(num_scheduled_tokens={"y": 1})], "have tokens scheduled"),
    ("too long", [arrival(), going_on(computed=128)], "a request's tokens: 129"),
    ("beyond its blocks", [arrival(), going_on(computed=64)], "runs 65 tokens in blocks for 64"),
    ("lists that differ", [arrival(), _known(num_computed_tokens=[])], "differ in length"),
    ("resumed, not scheduled", [arrival(), _known(resumed_req_ids=["y"])], "is resumed that"),
    ("a copy from beyond", [_arrival(kv_cache_block_copies=[(1, 99)])], "a block id: 99"),
    ("a drawn token beyond", [arrival(), Output(0, [NAME], [[999]])], "a token id: 999"),
    ("two drawn tokens", [arrival(), Output(0, [NAME], [[9, 9]])], "in one step: 2"),
    ("another's output", [arrival(), Output(0, ["y"], [[9]])], "that the step does not run"),
    (
        "a mask of another width",
        [arrival(), Sampled(0, [NAME], Mask("int32", (1, 1), b"abcd")), Output(0, [], [])],
        "masks of shape",
    ),
]


@pytest.mark.parametrize(("name", "events", "message"), CONTRADICTIONS)
def test_a_step_that_makes_no_sense_is_refused(
    name: str, events: list[Event], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        check_steps(a_head(), assemble(iter(events), Path("t")))
