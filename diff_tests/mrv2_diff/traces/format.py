"""The file of a trace: frames with a checksum each, and one checksum of the whole at the end.

    file   8 bytes of magic, u16 version, u16 zero, then frames; little-endian
    frame  u8 kind, u8 method, u32 steps, u32 raw, u32 stored, u32 crc, then `stored` bytes

`kind` is 1 for the head, 2 for events, 3 for the end; the head is first, the end is last, and both
are there once. `method` is 0 where bytes are stored as they are and 1 for zlib, which events alone
may have, so that opening a file decompresses nothing. `steps` is how many steps were whole by the
end of the frame, so that what precedes a damage is known without decoding. `raw` is the length
before compression, `crc` the CRC-32 of the frame's place in the file (u32), the header before it,
and the stored bytes. Payloads are msgpack: `Head`, a list of `Event`, `End`.

Reading holds one frame at a time. No length in a file is believed before the bytes are there, and
nothing is decompressed or decoded before every checksum of the part that is read was right.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import msgspec

from mrv2_diff.traces.events import End, Event, Executed, Head, Output, Sampled

MAGIC = b"MRV2TRC\n"
VERSION = 1
MAX_RAW = 64 << 20
"""Bytes of a frame before compression; more are not written and not believed."""
MAX_RATIO = 64
"""Of a frame's bytes before and after compression. One that is better is stored as it is, so that
a few bytes cannot become many."""
FRAME_BYTES = 1 << 16
"""Of events before compression, at which a frame is written."""
LEVEL = 1
"""Of zlib: ten times as fast as its default, for files a few percent larger."""
RUNNING = "the engine ran on, or was killed"
"""Why a file ends that nobody closed."""
MAX_IN_FLIGHT = 1024
"""Steps whose output may be missing at any time."""

_TOP = struct.Struct("<8sHH")
_FRAME = struct.Struct("<BBIIII")
_SEALED = struct.Struct("<BBIII")
_PLACE = struct.Struct("<I")
HEAD, EVENTS, END = 1, 2, 3
STORED, ZLIB = 0, 1

_T = TypeVar("_T")


class TraceError(ValueError):
    """A file is no trace that can be played. The message says what is wrong and what to do."""


class DamagedTraceError(TraceError):
    """A trace is cut or altered.

    Args:
        what: What is wrong.
        offset: Byte at which it was noticed.
        whole_steps: Steps before it that can be read.
    """

    def __init__(self, path: Path, what: str, offset: int, whole_steps: int) -> None:
        rest = (
            f"{whole_steps} whole steps precede the damage: play those with --salvage"
            if whole_steps
            else "no whole step precedes the damage: record again"
        )
        super().__init__(f"{path} is damaged at byte {offset}: {what}; {rest}")
        self.whole_steps = whole_steps


def is_trace(path: Path) -> bool:
    """Return whether a file begins as a trace does.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class FrameWriter:
    """Writes a trace's frames, each with an end behind it that the next one overwrites.

    So the file is whole whenever its process is killed, but for the instant of a write: vLLM's
    server kills its engine where it was given no time to stop. Not for two threads at once.

    Args:
        file: Open for writing bytes, at its beginning; it can seek.
        head: What the trace was recorded from.

    Raises:
        OSError: The disk is full.
    """

    def __init__(self, file: IO[bytes], head: Head) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._place = self._at = 0
        self.steps = 0
        """Whole steps so far."""
        top = _TOP.pack(MAGIC, VERSION, 0)
        self._append(top + self._frame(HEAD, msgspec.msgpack.encode(head)))

    def events(self, encoded: list[bytes], whole_steps: int) -> None:
        """Write events, each encoded by itself, of which so many end a step; none writes none."""
        if encoded:
            self.steps += whole_steps
            count = len(encoded).to_bytes(4, "big")
            self._append(self._frame(EVENTS, b"".join([b"\xdd", count, *encoded])))

    def end(self, why: str) -> None:
        """Write the end; nothing may follow."""
        self._put(self._end(why))

    def _append(self, data: bytes) -> None:
        self._hash.update(data)
        self._place += 1
        self._put(data + self._end(RUNNING))
        self._at += len(data)

    def _put(self, data: bytes) -> None:
        """Write over the end that is there, which is never longer."""
        self._file.seek(self._at)
        self._file.write(data)
        self._file.truncate()
        self._file.flush()

    def _end(self, why: str) -> bytes:
        end = End(steps=self.steps, sha256=self._hash.digest(), why=why[:2000])
        return self._frame(END, msgspec.msgpack.encode(end))

    def _frame(self, kind: int, payload: bytes) -> bytes:
        if len(payload) > MAX_RAW:
            raise ValueError(f"a frame of {len(payload)} bytes is above the bound of {MAX_RAW}")
        method, stored = STORED, payload
        if kind == EVENTS:
            smaller = zlib.compress(payload, LEVEL)
            if len(smaller) < len(payload) <= MAX_RATIO * len(smaller):
                method, stored = ZLIB, smaller
        header = _SEALED.pack(kind, method, self.steps, len(payload), len(stored))
        return header + _PLACE.pack(_crc(self._place, header, stored)) + stored


def _crc(place: int, header: bytes, stored: bytes) -> int:
    return zlib.crc32(stored, zlib.crc32(header, zlib.crc32(_PLACE.pack(place))))


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: int
    method: int
    steps: int
    raw: int
    stored: bytes
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, put together from its events."""

    number: int
    executed: Executed
    sampled: Sampled | None
    """None where grammars constrain nothing."""
    output: Output | None
    """None where the file ends before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A file whose checksums are right, as far as it is read."""

    path: Path
    head: Head
    end: End | None
    """None where what was damaged is left out."""
    whole_steps: int
    num_frames: int

    def events(self) -> Iterator[Event]:
        """Yield the events in order, holding one frame at a time.

        Raises:
            TraceError: A frame holds what is no list of events.
        """
        decoder = msgspec.msgpack.Decoder(list[Event])
        with self.path.open("rb") as file:
            for frame in islice(_frames(self.path, file), self.num_frames):
                if frame.kind == EVENTS:
                    yield from _payload(self.path, frame, decoder.decode)

    def steps(self) -> Iterator[Step]:
        """Yield the steps in order; where damage was left out, only whole ones.

        Raises:
            TraceError: The events are in no order in which a worker is called.
        """
        return assemble(self.events(), self.path, self.whole_steps if self.end is None else None)


def assemble(events: Iterator[Event], path: Path, limit: int | None = None) -> Iterator[Step]:
    """Yield steps from their events, in order; with a limit, at most so many, and whole ones only.

    Raises:
        TraceError: An event has no place.
    """
    waiting = _Waiting(path)
    for event in events:
        waiting.take(event)
        while (step := waiting.whole()) is not None:
            if limit is not None and step.number >= limit:
                return
            yield step
    if limit is None:
        yield from waiting.rest()


class _Waiting:
    """Steps that have begun."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun: dict[int, tuple[Executed, Sampled | None]] = {}
        self._outputs: dict[int, Output] = {}
        self._started = self._done = 0

    def take(self, event: Event) -> None:
        """Put an event to its step.

        Raises:
            TraceError: There is no such step, it has one already, or too many wait.
        """
        if isinstance(event, Executed):
            self._begun[self._started] = (event, None)
            self._started += 1
            if len(self._begun) > MAX_IN_FLIGHT:
                self._refuse(f"more than {MAX_IN_FLIGHT} steps wait for their output")
        elif isinstance(event, Sampled):
            if event.step not in self._begun or self._begun[event.step][1] is not None:
                self._refuse(f"sampling of step {event.step} is out of order")
            self._begun[event.step] = (self._begun[event.step][0], event)
        else:
            if event.step not in self._begun or event.step in self._outputs:
                self._refuse(f"the output of step {event.step} is out of order")
            self._outputs[event.step] = event

    def whole(self) -> Step | None:
        """Take out the next step if it is whole."""
        number = self._done
        if number not in self._outputs:
            return None
        self._done += 1
        executed, sampled = self._begun.pop(number)
        output = self._outputs.pop(number)
        return Step(number=number, executed=executed, sampled=sampled, output=output)

    def rest(self) -> Iterator[Step]:
        """Yield what is left, in order."""
        for number, (executed, sampled) in self._begun.items():
            output = self._outputs.get(number)
            yield Step(number=number, executed=executed, sampled=sampled, output=output)

    def _refuse(self, what: str) -> NoReturn:
        raise TraceError(f"{self._path}: {what}; it was not written by mrv2-diff record")


def open_trace(path: Path, *, salvage: bool = False) -> Trace:
    """Read a trace's checksums, all of them, then its head.

    Args:
        path: The file.
        salvage: Take what precedes a damage.

    Raises:
        TraceError: It is no trace of this version, or holds nothing that can be read.
        DamagedTraceError: It is cut or altered, and `salvage` is off or there is nothing to take.
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    head: Head | None = None
    end: End | None = None
    place = whole_steps = 0
    with path.open("rb") as file:
        try:
            for frame in _frames(path, file, digest):
                if place == 0:
                    head = _payload(path, frame, msgspec.msgpack.Decoder(Head).decode)
                if frame.kind == END:
                    end = _payload(path, frame, msgspec.msgpack.Decoder(End).decode)
                    _check_end(path, frame, end, digest)
                    _nothing_follows(path, file, frame)
                whole_steps = frame.steps
                place += 1
            if end is None:
                raise DamagedTraceError(path, "it has no end", file.tell(), whole_steps)
        except DamagedTraceError as damage:
            if not salvage or head is None or not damage.whole_steps:
                raise
            end = None
    if head is None:
        raise TraceError(f"{path} has no head; record again")
    return Trace(path=path, head=head, end=end, whole_steps=whole_steps, num_frames=place)


def _frames(path: Path, file: IO[bytes], digest: "hashlib._Hash | None" = None) -> Iterator[_Frame]:
    """Yield the frames of a file whose checksums are right, to the end or to the first damage."""
    size = os.fstat(file.fileno()).st_size
    _check_top(path, top := file.read(_TOP.size))
    if digest is not None:
        digest.update(top)
    place = steps = 0
    ended = False
    while not ended and (offset := file.tell()) < size:
        header = file.read(_FRAME.size)
        if len(header) < _FRAME.size:
            raise DamagedTraceError(path, "it is cut inside a frame's header", offset, steps)
        kind, method, now, raw, stored_len, crc = _FRAME.unpack(header)
        left = size - offset - _FRAME.size
        if stored_len > left:
            what = f"frame {place} says that it has {stored_len} bytes, and {left} are left"
            raise DamagedTraceError(path, what, offset, steps)
        stored = file.read(stored_len)
        if _crc(place, header[: _SEALED.size], stored) != crc:
            raise DamagedTraceError(path, f"the checksum of frame {place} differs", offset, steps)
        frame = _Frame(kind, method, now, raw, stored, offset)
        _check_frame(path, frame, place, steps)
        ended = kind == END
        yield frame
        if digest is not None:
            digest.update(header)
            digest.update(stored)
        steps = now
        place += 1
    if place == 0:
        raise DamagedTraceError(path, "it has no head", _TOP.size, 0)


def _check_top(path: Path, top: bytes) -> None:
    if len(top) < _TOP.size or not top.startswith(MAGIC):
        raise TraceError(f"{path} is no trace: it does not begin as one; name one that "
                         "mrv2-diff record wrote")  # fmt: skip
    _, version, zero = _TOP.unpack(top)
    if version != VERSION or zero:
        raise TraceError(f"{path} has version {version}.{zero}; this version reads {VERSION}.0: "
                         "use the version of mrv2 that wrote it")  # fmt: skip


def _check_frame(path: Path, frame: _Frame, place: int, steps: int) -> None:
    """Refuse a frame whose checksum is right and whose header makes no sense."""
    what = None
    if frame.kind not in (HEAD, EVENTS, END) or (frame.kind == HEAD) != (place == 0):
        what = f"frame {place} has kind {frame.kind}"
    elif frame.method not in (STORED, ZLIB) or (frame.method == ZLIB and frame.kind != EVENTS):
        what = f"frame {place} has method {frame.method}"
    elif frame.steps < steps:
        what = f"frame {place} counts {frame.steps} steps, after {steps}"
    elif frame.raw > MAX_RAW or frame.raw > MAX_RATIO * len(frame.stored):
        what = f"frame {place} says that its {len(frame.stored)} bytes become {frame.raw}"
    if what is not None:
        raise DamagedTraceError(path, what, frame.offset, steps)


def _check_end(path: Path, frame: _Frame, end: End, digest: "hashlib._Hash") -> None:
    if end.sha256 != digest.digest() or end.steps != frame.steps:
        raise DamagedTraceError(path, "the checksum of the file differs", frame.offset, frame.steps)


def _nothing_follows(path: Path, file: IO[bytes], frame: _Frame) -> None:
    if file.read(1):
        raise DamagedTraceError(path, "bytes follow its end", file.tell() - 1, frame.steps)


def _payload(path: Path, frame: _Frame, decode: Callable[[bytes], _T]) -> _T:
    """Return what a frame holds.

    Raises:
        TraceError: It is not what its header says, or not of the types that it must have.
    """
    data = frame.stored
    try:
        if frame.method == ZLIB:
            inflate = zlib.decompressobj()
            data = inflate.decompress(frame.stored, frame.raw + 1)
            if not inflate.eof or inflate.unused_data:
                raise ValueError("it does not decompress to its length")
        if len(data) != frame.raw:
            raise ValueError(f"it has {len(data)} bytes, not {frame.raw}")
        return decode(data)
    except (ValueError, zlib.error, RecursionError) as error:  # msgspec's are ValueErrors
        raise TraceError(
            f"{path}: the checksums are right, and the frame at byte {frame.offset} does not hold "
            f"what it must ({error}); it was not written by mrv2-diff record: record again"
        ) from error
