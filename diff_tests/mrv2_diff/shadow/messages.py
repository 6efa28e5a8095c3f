"""What the two processes of a shadow say to each other."""

from dataclasses import dataclass, field
from typing import Any

from mrv2_diff.shadow.slices import Room, Slice
from mrv2_diff.shadow.weights import SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: all that a runner of one's own needs."""

    vllm_config: Any
    kv_cache_config: Any
    """V1's; the shadow's has its groups and fewer blocks."""
    num_blocks: int
    """Blocks of the shadow's KV cache, vLLM's null block among them."""
    kv_bytes: int
    """What they may take."""
    max_num_reqs: int
    """Rows of the shadow."""
    weights: SharedWeights
    platform: str
    """`cpu` or `cuda`."""
    local_rank: int
    """Number of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to it."""

    room: Room
    num_shared: int
    """Parameters that lie in V1's memory."""
    num_own: int
    """Parameters that could not be shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """Slices, in V1's order: a part of what was gathered, small enough to be sent at once."""

    slices: list[Slice]
    is_last: bool
    """Whether they are to be run now, with those of the lots before; if not, a `Done` of no slice
    is the answer."""


@dataclass(slots=True, kw_only=True)
class Done:
    """The answer to slices, in parts: of all that were sent, or of those that were run so far."""

    num_slices: int = 0
    """How many were run since the last answer."""
    compared_tokens: int = 0
    compared_logprobs: int = 0
    findings: list[dict[str, object]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """Why requests are not followed any longer."""

    def add(self, other: "Done") -> None:
        """Take in the answer to further slices."""
        self.num_slices += other.num_slices
        self.compared_tokens += other.compared_tokens
        self.compared_logprobs += other.compared_logprobs
        self.findings += other.findings
        self.dropped |= other.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last message of a process that gives up."""

    error: str
