"""One case's outcome as one line of JSON, with the figures and the environment behind it."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mrv2_diff.verdict import Divergence, Verdict

FORMAT = 1
"""Version of the record's layout; a reader refuses others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quartiles:
    """A measured quantity over the steps of a case."""

    q1: float
    median: float
    q3: float
    count: int
    p90: float | None = None
    p99: float | None = None
    """None in records of former versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Host time of one runner per step, in microseconds."""

    execute_us: Quartiles
    sample_us: Quartiles
    output_us: Quartiles | None
    """Waiting for an output after sample; None where sample returns it."""
    total_us: Quartiles
    device_us: Quartiles | None = None
    """From the first to the last event of a step on the device's stream; None on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBy:
    """Part of a peak."""

    op: str
    """Operation, and the runner's function that called it."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Largest sum of tensor bytes that one runner held at once in a phase."""

    peak_bytes: int
    held_by: tuple[HeldBy, ...]
    """What it was made of, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one runner, weights and KV cache not counted."""

    step_peak_tensor_bytes: int
    """Largest sum of tensor bytes that a step held at once, from torch's allocation events."""
    step_peak_python_bytes: int
    """Largest growth of Python's heap within a step, from tracemalloc."""
    state_held_bytes: int
    """Tensors and arrays that the runner keeps between steps."""
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    """By phase. `weights`, `profile`, `kv` and `graphs` are of the start: all that was allocated
    since it began. `execute` and `sample` are of steps: all that was allocated in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the candidate takes of one resource, over what the reference takes, and its budget."""

    quantity: str
    """`memory`, `host time` or `device time`."""
    verdict: Verdict
    """`MATCH` within the budget, `OVER_BUDGET`, or `INCONCLUSIVE`."""
    budget: float
    """Largest ratio that is allowed."""
    ratio: float | None
    """Candidate over reference, of the phase that decides; None where nothing was measured."""
    low: float | None = None
    high: float | None = None
    """Bounds of the ratio's 95 % interval; the ratio itself where it is counted, not timed."""
    samples: int
    """Phases, or rounds of steps."""
    phase: str
    """The one that decides; of times, the one that adds most."""
    op: str = ""
    """What weighs most in it, of memory."""
    summary: str
    """One sentence for people."""

    @property
    def required(self) -> float | None:
        """Return the smallest budget that would certainly be kept."""
        return self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How one kind of value compared, over all steps and both modes."""

    compared: int
    """Scalar values compared."""
    differing: int
    """Values outside the policy."""
    max_abs_diff: float
    required_tolerance: float
    """The smallest bound under which every value would have agreed, in the policy's unit."""
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One case run against one pair of runners."""

    id: str
    area: str
    feature: str
    pair: tuple[str, str]
    """Reference, candidate."""
    verdict: Verdict
    summary: str
    """One sentence for people."""
    modes: tuple[str, ...]
    steps: int
    request_steps: int
    """Sum over steps of the requests scheduled in them, over all modes."""
    events: dict[str, int]
    """How often each lifecycle event happened.

    Arrivals, finishes, preemptions, resumes, aborts, cache hits, chunks.
    """
    agreements: dict[str, Agreement]
    """By value name.

    Tokens, logits, processed_logits, logprobs, ranks, input_ids, positions, seq_lens, slots,
    output, ledger.
    """
    noise_floor: dict[str, float]
    """Measured difference of the reference against itself, by value name."""
    memory: dict[str, Memory]
    """By runner name."""
    latency: dict[str, Latency]
    """By runner name."""
    costs: tuple[Cost, ...] = ()
    """Memory and time against the case's budget. They have verdicts of their own: that of the
    record is about values."""
    steps_by_mode: dict[str, dict[str, int]] = field(default_factory=dict)
    """Steps of the comparing passes by how they reached the device, by runner name.

    `eager`, `forward` or `decode`; no runner where it does not say.
    """
    logit_diffs: list[float] = field(default_factory=list)
    """Largest difference of a logit at each step, in spacings, for the plot."""
    first_divergence: Divergence | None = None
    error: str | None = None
    """Traceback's last lines where a runner crashed."""
    command: str
    """Reruns exactly this case."""
    environment: dict[str, str]
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Return one line of JSON without its newline."""
        return msgspec.json.encode(_spelled(asdict(self)))


def append(path: Path, record: Record) -> None:
    """Add one whole line to `path` with a single write, so that no half record is left behind.

    Raises:
        OSError: The disk is full or the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(record.to_json() + b"\n")
        file.flush()


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a file; a torn last line, left by a kill during a write, is skipped.

    Raises:
        ValueError: A line is no record of this format. Names file, line and what is wrong.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            if number == len(lines):
                return
            raise ValueError(
                f"{path}:{number} is not a record of format {FORMAT}: {error}"
            ) from error


def decode(line: bytes) -> Record:
    """Return the record in one line of JSON.

    Raises:
        msgspec.DecodeError: Not JSON, or not a record, or a record of another format.
    """
    raw: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    if raw.get("format") != FORMAT:
        raise msgspec.ValidationError(f"format is {raw.get('format')}, this reader knows {FORMAT}")
    return msgspec.convert(raw, Record, strict=False)


def _spelled(value: Any) -> Any:
    """Return a value with its infinities and NaNs as text: JSON has no numbers for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value
