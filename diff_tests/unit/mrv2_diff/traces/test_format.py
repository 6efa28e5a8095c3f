"""A trace's file: what is written is read, and what was damaged is refused within bounds."""

import hashlib
import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

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


def _cuts(data: bytes) -> Iterator[tuple[str, bytes]]:
    for part in (0, 5, 11, 12, 20, 29):
        yield f"cut at {part}", data[:part]
    for tenth in range(1, 10):
        yield f"cut at {tenth} tenths", data[: len(data) * tenth // 10]
    yield "cut by a byte", data[:-1]
    yield "a byte more", data + b"\0"


def _flips(data: bytes) -> Iterator[tuple[str, bytes]]:
    draw = random.Random(4)
    anywhere = [draw.randrange(40, len(data)) for _ in range(8)]
    for place in (3, 8, 10, 12, 13, 14, 18, 22, 26, 31, *anywhere):
        altered = bytearray(data)
        altered[place] ^= 1 << draw.randrange(8)
        yield f"a bit at byte {place}", bytes(altered)


def _sealed(data: bytes, kind: int, method: int, steps: int, raw: int, stored: bytes) -> bytes:
    """A file whose first frame is another, with a right checksum."""
    header = struct.pack("<BBIII", kind, method, steps, raw, len(stored))
    crc = zlib.crc32(stored, zlib.crc32(header, zlib.crc32(struct.pack("<I", 0))))
    return data[:12] + header + struct.pack("<I", crc) + stored


def _lies(data: bytes) -> Iterator[tuple[str, bytes]]:
    kind, method, steps, raw, stored, crc = struct.unpack_from("<BBIIII", data, 12)
    huge = 2**32 - 1
    for name, values in {
        "huge stored length": (kind, method, steps, raw, huge, crc),
        "huge raw length": (kind, method, steps, huge, stored, crc),
        "huge both": (kind, method, huge, huge, huge, crc),
    }.items():
        yield name, data[:12] + struct.pack("<BBIIII", *values) + data[30:]
    head = msgspec.msgpack.encode(a_head())
    zipped = zlib.compress(head)
    bomb = zlib.compress(bytes(64 << 20), 9)
    yield "sealed huge raw length", _sealed(data, 1, 1, 0, huge, zipped)
    yield "sealed raw length within the ratio", _sealed(data, 1, 1, 0, 60 * len(zipped), zipped)
    yield "sealed bomb", _sealed(data, 1, 1, 0, 64 << 20, bomb)
    yield "sealed bomb that says little", _sealed(data, 1, 1, 0, 32 * len(bomb), bomb)
    yield "sealed method", _sealed(data, 1, 7, 0, len(head), head)
    yield "sealed kind", _sealed(data, 9, 0, 0, len(head), head)
    yield "sealed no zlib", _sealed(data, 1, 1, 0, len(head), head)
    for name, payload in {
        "array of 2^32": b"\xdd\xff\xff\xff\xff",
        "map of 2^32": b"\xdf\xff\xff\xff\xff",
        "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
        "nested": b"\x91" * 10_000,
        "head with a name too long": msgspec.msgpack.encode(a_head(vllm="x" * 600)),
        "head with a path for a hash": msgspec.msgpack.encode(
            a_head(model=msgspec.structs.replace(a_head().model, config_sha256="../../x"))
        ),
        "head with another runner": msgspec.msgpack.encode(a_head(runner="../../x")),
        "head with a field more": msgspec.msgpack.encode(
            msgspec.to_builtins(a_head()) | {"__class__": "os.system"}
        ),
    }.items():
        yield f"sealed {name}", _sealed(data, 1, 0, 0, len(payload), payload)
    yield "version 7", data[:8] + struct.pack("<HH", 7, 0) + data[12:]
    yield "reserved", data[:8] + struct.pack("<HH", 1, 1) + data[12:]
    yield "a pickle", b"\x80\x04\x95" + data[3:]
    yield "frames twice", data + data[12:]
    second = 30 + stored
    third = second + 18 + struct.unpack_from("<I", data, second + 10)[0]
    yield "frame left out", data[:second] + data[third:]


def _copies(data: bytes) -> list[tuple[str, bytes]]:
    return [*_cuts(data), *_flips(data), *_lies(data)]


def test_every_damaged_copy_is_refused_in_little_memory(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    assert len(data) > 100_000
    copies = _copies(data)
    assert len(copies) >= 30
    for number, (name, damaged) in enumerate(copies):
        assert damaged != data, name
        path = tmp_path / f"{number}.trace"
        path.write_bytes(damaged)
        tracemalloc.start()
        try:
            with pytest.raises(TraceError) as refused:
                open_trace(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 2 * len(data), (name, peak)
        assert str(path) in str(refused.value), name


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
