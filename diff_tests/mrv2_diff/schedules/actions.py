"""What can happen between and in the steps of a schedule, as data that a file can hold.

Every action is valid at any time: one that names a request which is not there does nothing, and a
request that arrives under the name of a live one takes its place. So any part of a schedule is a
schedule, which is what makes a failing one easy to shrink.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

FORMAT = 1
"""Version of the file's layout; a reader refuses others."""

PREFIX_LEN = 40
"""Tokens of each prefix that prompts share."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine that a schedule runs on: small, so that everything is scarce."""

    is_async: bool = False
    """Queue a step before the output of the one before was taken."""
    by_priority: bool = False
    """Serve the lowest `Arrive.priority` first, else the oldest request."""
    prefix_caching: bool = True
    thinking: bool = False
    """Whether some tokens open and close a thinking section."""
    windows: tuple[int | None, ...] = (None,)
    """Tokens that each KV group sees; None sees all."""
    num_blocks: int = 30
    """One of them is vLLM's null block."""
    block_size: int = 4
    max_num_reqs: int = 4
    max_num_tokens: int = 12
    max_model_len: int = 64
    vocab_size: int = 32


class Arrive(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A request arrives, or a session's next turn does."""

    name: str
    prefix: int = 0
    """Which of the shared prefixes its prompt begins with."""
    prefix_len: int = 0
    """How many tokens of it, up to `PREFIX_LEN`."""
    tail: int = 0
    """Seed of the prompt's other tokens."""
    tail_len: int = 1
    """At least 1."""
    max_tokens: int = 1
    """At least 1."""
    stop: int | None = None
    """Token that ends the request."""
    temperature: float = 0.0
    seed: int = 0
    options: dict[str, Any] = {}
    """Further sampling parameters by vLLM's name."""
    grammar: int | None = None
    """Seed of a made-up grammar that constrains the output."""
    priority: int = 0
    session: bool = False
    """Wait for another turn when a turn has ended."""

    def prompt(self, vocab_size: int) -> list[int]:
        """Return the token ids of the prompt."""
        shared = _tokens(f"prefix {self.prefix}", PREFIX_LEN, vocab_size)[: self.prefix_len]
        return [*shared, *_tokens(f"tail {self.tail}", self.tail_len, vocab_size)]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A request is given up, wherever it is."""

    name: str


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Every running request is preempted and the prefix cache is emptied."""


class FailLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """With the next output, a block of a running request is reported as not loaded."""

    request: int
    """Counted from 0; taken modulo the requests that run."""
    block: int
    """Counted from 0; taken modulo the request's blocks that were computed."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One step."""

    lag: int = 0
    """Steps whose output may be missing when this call returns; 0 unless the setup is async."""
    paused: bool = False
    """Schedule nothing: the step only tells the runner what ended."""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Step until every request has ended; then nothing may be left of any."""


Action = Arrive | Abort | Reset | FailLoad | Step | Drain


Model = Literal["hash", "tiny", "lockstep"]
"""HashLM behind our runner; a tiny checkpoint behind our runner, against V1's tokens; or that
checkpoint in both runners at once, step by step."""
MODELS: tuple[Model, ...] = get_args(Model)


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setup and what happens on it."""

    model: Model = "hash"

    setup: Setup
    actions: tuple[Action, ...]
    why: str = ""
    """What went wrong, where it is kept for that."""
    format: int = FORMAT


def write(schedule: Schedule, path: Path) -> None:
    """Write a schedule as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(schedule), indent=1) + b"\n")


def read(path: Path) -> Schedule:
    """Read a schedule.

    Raises:
        ValueError: The file is no schedule, or of another format.
        OSError: It cannot be read.
    """
    data = path.read_bytes()
    try:
        schedule = msgspec.json.decode(data, type=Schedule)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no schedule: {error}") from error
    if schedule.format != FORMAT:
        raise ValueError(f"{path} has format {schedule.format}; this version reads {FORMAT}")
    return schedule


@cache
def _tokens(name: str, count: int, vocab_size: int) -> tuple[int, ...]:
    draw = random.Random(name)
    return tuple(draw.randrange(vocab_size) for _ in range(count))
