"""Damaged copies of a trace, and what reading each one takes: none may be read, hang or be large.

usage: python -m mrv2_diff.traces.damage TRACE

Each copy is read in a process of its own, as far as a replay goes before it starts a runner. Exit
code 1 where one is read to its end, ends its process, or takes more time or memory than it may.
"""

import io
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import msgspec

from mrv2_diff.traces.check import check_steps
from mrv2_diff.traces.events import MAX_ID, Event, Executed, Head, Output
from mrv2_diff.traces.format import FrameWriter, TraceError, open_trace

TIME_LIMIT_S = 30.0
"""Of reading a copy, the start of its process included."""
MAX_MEMORY = 2
"""Times the whole file, or `MIN_BYTES` where that is more."""
MIN_BYTES = 1 << 19
"""One frame holds 64 KiB of events before compression, and as objects they are several times that,
whatever the file has; a process grows by pages, and its allocator by more."""

_MODULE = "mrv2_diff.traces.damage"
"""This one, whose name is another where it is a program."""
_FIRST = 12
"""Byte at which the first frame begins."""
_FRAME = struct.Struct("<BBIIII")
_HUGE = 2**32 - 1

Copy = tuple[str, bytes]
"""What was done, and the bytes."""


def copies(path: Path) -> Iterator[Copy]:
    """Yield over 50 damaged copies of a whole trace: the same ones each time.

    Raises:
        TraceError: It is damaged already.
    """
    data, trace = path.read_bytes(), open_trace(path)
    yield from chain(
        cuts(data),
        flips(data),
        lengths(data, trace.head),
        _versions(data),
        _order(data),
        _heads(data, trace.head),
        _contents(trace.head, list(trace.events())),
    )


def cuts(data: bytes) -> Iterator[Copy]:
    """Yield copies that are shorter, and one that is longer."""
    for part in (0, 5, 11, 12, 20, 29):
        yield f"cut at {part}", data[:part]
    for tenth in range(1, 10):
        yield f"cut at {tenth} tenths", data[: len(data) * tenth // 10]
    yield "cut by a byte", data[:-1]
    yield "a byte more", data + b"\0"


def flips(data: bytes) -> Iterator[Copy]:
    """Yield copies in which one bit is another."""
    draw = random.Random(4)
    anywhere = [draw.randrange(40, len(data)) for _ in range(8)]
    for place in (3, 8, 10, 12, 13, 14, 18, 22, 26, 31, *anywhere):
        altered = bytearray(data)
        altered[place] ^= 1 << draw.randrange(8)
        yield f"a bit at byte {place}", bytes(altered)


def lengths(data: bytes, head: Head) -> Iterator[Copy]:
    """Yield copies that claim to hold more than there is."""
    kind, method, steps, raw, stored, crc = _FRAME.unpack_from(data, _FIRST)
    for name, values in {
        "huge stored length": (kind, method, steps, raw, _HUGE, crc),
        "huge raw length": (kind, method, steps, _HUGE, stored, crc),
        "huge both": (kind, method, _HUGE, _HUGE, _HUGE, crc),
    }.items():
        yield name, data[:_FIRST] + _FRAME.pack(*values) + data[_FIRST + _FRAME.size :]
    payload = msgspec.msgpack.encode(head)
    zipped, bomb = zlib.compress(payload), zlib.compress(bytes(64 << 20), 9)
    yield "sealed huge raw length", sealed(data, 1, 1, _HUGE, zipped)
    yield "sealed raw length within the ratio", sealed(data, 1, 1, 60 * len(zipped), zipped)
    yield "sealed bomb", sealed(data, 1, 1, 64 << 20, bomb)
    yield "sealed bomb that says little", sealed(data, 1, 1, 32 * len(bomb), bomb)
    yield "sealed array of 2^32", sealed_head(data, b"\xdd\xff\xff\xff\xff")
    yield "sealed map of 2^32", sealed_head(data, b"\xdf\xff\xff\xff\xff")
    yield "sealed bytes of 2^32", sealed_head(data, b"\xc6\xff\xff\xff\xff")
    yield "sealed lists in lists", sealed_head(data, b"\x91" * 10_000)


def _versions(data: bytes) -> Iterator[Copy]:
    yield "version 7", data[:8] + struct.pack("<HH", 7, 0) + data[_FIRST:]
    yield "version 1.1", data[:8] + struct.pack("<HH", 1, 1) + data[_FIRST:]
    yield "a pickle", b"\x80\x04\x95" + data[3:]


def _order(data: bytes) -> Iterator[Copy]:
    starts = [_FIRST]
    while starts[-1] < len(data):
        starts.append(starts[-1] + _FRAME.size + struct.unpack_from("<I", data, starts[-1] + 10)[0])
    first, second, third = starts[0], starts[1], starts[2]
    yield "frames twice", data + data[first:]
    yield "frame left out", data[:second] + data[third:]
    if len(starts) > 4:
        moved = data[third : starts[3]] + data[second:third]
        yield "frames exchanged", data[:second] + moved + data[starts[3] :]


def _heads(data: bytes, head: Head) -> Iterator[Copy]:
    """Yield copies whose head names what it may not."""
    payload = msgspec.msgpack.encode(head)
    yield "sealed method", sealed(data, 1, 7, len(payload), payload)
    yield "sealed kind", sealed(data, 9, 0, len(payload), payload)
    yield "sealed, not compressed", sealed(data, 1, 1, len(payload), payload)
    replace = msgspec.structs.replace
    named: dict[str, object] = {
        "a name too long": replace(head, vllm="x" * 600),
        "a path for a hash": replace(
            head, model=replace(head.model, config_sha256="../../etc/passwd")
        ),
        "a path for a runner": replace(head, runner="../../x"),
        "a class": {**msgspec.to_builtins(head), "__class__": "os.system"},
        "no KV group": replace(head, kv=replace(head.kv, groups=[])),
    }
    for name, value in named.items():
        yield f"sealed {name}", sealed_head(data, msgspec.msgpack.encode(value))


def _contents(head: Head, events: list[Event]) -> Iterator[Copy]:
    """Yield copies whose checksums are right, and whose steps are not."""
    replace = msgspec.structs.replace
    places = [place for place, event in enumerate(events) if isinstance(event, Executed)]
    arrival = next(place for place in places if events[place].new)  # type: ignore[union-attr]
    goes_on = next(place for place in places if events[place].known.req_ids)  # type: ignore[union-attr]
    came, on = events[arrival], events[goes_on]
    assert isinstance(came, Executed)
    assert isinstance(on, Executed)
    request, hostile = came.new[0], "../../etc/passwd\0"

    def with_request(**changes: object) -> Executed:
        return replace(came, new=[replace(request, **changes), *came.new[1:]])

    known = replace(on.known, req_ids=[hostile, *on.known.req_ids[1:]])
    altered: dict[str, tuple[int, Event]] = {
        "a request's name too long": (arrival, with_request(req_id="x" * 600)),
        "a request's name that is a path": (arrival, with_request(req_id=hostile)),
        "a path goes on": (goes_on, replace(on, known=known)),
        "a huge block": (arrival, with_request(block_ids=[[MAX_ID]] * len(head.kv.groups))),
        "a huge token": (arrival, with_request(prompt=[MAX_ID])),
        "a huge place": (arrival, with_request(num_computed_tokens=MAX_ID)),
        "more KV groups": (arrival, with_request(block_ids=[[1]] * (len(head.kv.groups) + 1))),
        "a huge step": (
            arrival,
            replace(came, num_scheduled_tokens=dict.fromkeys(came.num_scheduled_tokens, MAX_ID)),
        ),
        "a drawn token beyond": _beyond(head, events),
    }
    for name, (place, event) in altered.items():
        file = io.BytesIO()
        writer = FrameWriter(file, head)
        for start in range(0, len(events), 256):
            part = [event if start + index == place else each
                    for index, each in enumerate(events[start : start + 256])]  # fmt: skip
            whole = sum(isinstance(each, Output) for each in part)
            writer.events([msgspec.msgpack.encode(each) for each in part], whole)
        writer.end("rewritten")
        yield f"sealed {name}", file.getvalue()


def _beyond(head: Head, events: list[Event]) -> tuple[int, Event]:
    for place, event in enumerate(events):
        if isinstance(event, Output) and any(event.token_ids):
            beyond = [[head.model.vocab_size] for _ in event.req_ids]
            return place, Output(event.step, event.req_ids, beyond)
    raise ValueError("nothing was drawn in this trace; damage one with answers")


def sealed(data: bytes, kind: int, method: int, raw: int, stored: bytes) -> bytes:
    """Return a file whose first frame is another, with a right checksum."""
    header = struct.pack("<BBIII", kind, method, 0, raw, len(stored))
    crc = zlib.crc32(stored, zlib.crc32(header, zlib.crc32(struct.pack("<I", 0))))
    return data[:_FIRST] + header + struct.pack("<I", crc) + stored


def sealed_head(data: bytes, payload: bytes) -> bytes:
    """Return a file of a head alone, with a right checksum."""
    return sealed(data, 1, 0, len(payload), payload)


# ---------------------------------------------------------------- what reading takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What came of reading one copy."""

    name: str
    refusal: str | None
    """The message; None where it was read to its end."""
    failure: str | None = None
    """How the process ended that did not end well."""
    seconds: float
    """Of reading alone; of all where the process did not end well."""
    python_bytes: int = 0
    """Most that Python allocated."""
    resident_bytes: int | None = None
    """By how much the process grew; None where the system does not tell."""

    def fault(self, whole_bytes: int) -> str | None:
        """Return what is wrong, of a copy of a file of so many bytes."""
        if self.failure is not None:
            return self.failure
        if self.refusal is None:
            return "it was read to its end"
        limit = MAX_MEMORY * max(whole_bytes, MIN_BYTES)
        if self.python_bytes > limit:
            return f"Python took {self.python_bytes} bytes"
        if (self.resident_bytes or 0) > limit:
            return f"the process grew by {self.resident_bytes} bytes"
        return None


def read_each(path: Path, folder: Path) -> Iterator[Taken]:
    """Read every damaged copy of a trace, each in a process of its own.

    Args:
        path: A whole trace.
        folder: Takes one copy at a time.
    """
    damaged = folder / "damaged.trace"
    for name, data in copies(path):
        damaged.write_bytes(data)
        yield _read_in_process(name, damaged)
    damaged.unlink()


def _read_in_process(name: str, path: Path) -> Taken:
    command = [sys.executable, "-m", _MODULE, "--read", str(path)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - began
        return Taken(name=name, refusal=None, failure="it hangs", seconds=seconds)
    if done.returncode:
        failure = f"its process ended with {done.returncode}: {done.stderr.decode().strip()[-500:]}"
        seconds = time.monotonic() - began
        return Taken(name=name, refusal=None, failure=failure, seconds=seconds)
    return Taken(name=name, **json.loads(done.stdout))


def read(path: Path) -> str | None:
    """Read as far as a replay does before it starts a runner; return the refusal."""
    try:
        trace = open_trace(path)
        check_steps(trace.head, trace.steps())
    except TraceError as error:
        return str(error)
    return None


def _read_measured(path: Path) -> NoReturn:
    """Read once for time and the process's size, once for Python's; print what it took."""
    from mrv2_diff.traces.toy import a_load, write  # what the first read of any trace loads

    with tempfile.TemporaryDirectory() as folder:
        read(write(Path(folder, "warm"), a_load(64)))
    size = _resident("VmRSS")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    began = time.monotonic()
    refusal = read(path)
    seconds, peak = time.monotonic() - began, _resident("VmHWM")
    tracemalloc.start()
    read(path)
    taken = {
        "refusal": refusal,
        "seconds": seconds,
        "python_bytes": tracemalloc.get_traced_memory()[1],
        "resident_bytes": None if size is None or peak is None else max(0, peak - size),
    }
    print(json.dumps(taken))  # noqa: T201 - the answer to the process that asked
    sys.exit(0)


def _resident(field: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def summary(taken: list[Taken], whole_bytes: int) -> str:
    """Return the line that ends the program."""
    faults = [one for one in taken if one.fault(whole_bytes) is not None]
    python = max(one.python_bytes for one in taken)
    grown = [one.resident_bytes for one in taken if one.resident_bytes is not None]
    resident = f", of the process {max(grown) / whole_bytes:.2f}" if grown else ""
    return (
        f"{len(taken) - len(faults)} of {len(taken)} damaged copies of {whole_bytes:,} bytes "
        f"refused; most memory of Python {python / whole_bytes:.2f} times the file{resident}; "
        f"longest {max(one.seconds for one in taken):.2f} s"
    )


def main(arguments: list[str], say: Callable[[str], None]) -> int:
    """Read every damaged copy of a trace, tell what each took, and return the exit code."""
    if len(arguments) == 2 and arguments[0] == "--read":
        _read_measured(Path(arguments[1]))
    if len(arguments) != 1:
        say("usage: python -m mrv2_diff.traces.damage TRACE")
        return 2
    path, taken = Path(arguments[0]), []
    try:
        whole_bytes = path.stat().st_size
        with tempfile.TemporaryDirectory(prefix="mrv2-damage-") as folder:
            for one in read_each(path, Path(folder)):
                taken.append(one)
                fault = one.fault(whole_bytes)
                told = "refused" if fault is None else f"FAULT: {fault}"
                grown = "" if one.resident_bytes is None else f"{one.resident_bytes >> 10:>7} KiB"
                say(f"{one.name:<42} {told:<8} {one.seconds:6.2f} s {one.python_bytes >> 10:>7} "
                    f"KiB {grown}")  # fmt: skip
    except (OSError, ValueError) as error:
        say(f"{path}: {error}")
        return 2
    say(summary(taken, whole_bytes))
    return int(any(one.fault(whole_bytes) is not None for one in taken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], print))
