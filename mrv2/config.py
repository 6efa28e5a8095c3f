"""What the runner is built for: sizes and device, checked before the first allocation."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from mrv2.errors import ConfigError

LogprobsMode: TypeAlias = Literal[
    "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"
]
"""What is returned as logprobs: of the logits as the model made them (a grammar's mask applied), or
as the draw sees them; normalised, or as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarkers:
    """Token sequences around a model's thinking.

    Raises:
        ConfigError: There is no start or no end.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    """Forced where a budget is used up. It may begin with a phrase that leads to the answer."""
    natural_end: tuple[int, ...] = ()
    """What the model itself writes to end its thinking. Empty for `end`."""

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise ConfigError(f"the thinking markers are {self}; give a start and an end")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """One group of layers that share a block table."""

    block_size: int
    """Tokens in a block, as the scheduler counts blocks."""
    max_blocks: int
    """Blocks that the longest request can hold: columns of this group's block table."""
    num_blocks: int = 2**31 - 1
    """Blocks of the cache: an id of this or more is refused. By default all that int32 can name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Shapes that steps are padded to, so that few graphs serve all of them.

    Raises:
        ConfigError: A size is not positive, or stands twice.
    """

    decodes: tuple[int, ...] = ()
    """Requests of a uniform step that is captured whole, from inputs to committed tokens."""
    query_lens: tuple[int, ...] = (1,)
    """Tokens that each request of such a step runs: 1, and 1 + k where it runs k drafts."""
    mixed: tuple[int, ...] = ()
    """Tokens of a step of any requests, prompts among them, that is captured whole."""
    forwards: tuple[int, ...] = ()
    """Tokens of a forward of which the model itself replays what it captured. Others are not
    padded."""

    def __post_init__(self) -> None:
        if not self.query_lens:
            raise ConfigError("query_lens is empty; give (1,) where no step has drafts")
        for name in ("decodes", "query_lens", "mixed", "forwards"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
                raise ConfigError(f"{name} is {sizes}; give positive sizes, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Sizes of everything that the runner allocates, and where.

    Raises:
        ConfigError: A size is not positive, or a KV group cannot hold `max_model_len` tokens.
    """

    device: torch.device
    max_num_reqs: int = 1024
    """State rows: requests that can be live at once."""
    max_num_tokens: int
    """Tokens that one step can hold, over all requests."""
    max_model_len: int
    """Tokens that one request can hold, prompt and output together."""
    vocab_size: int
    kv_groups: tuple[KVGroup, ...]
    logprobs_mode: LogprobsMode = "raw_logprobs"
    thinking: ThinkingMarkers | None = None
    """Needed by requests with a thinking budget."""
    graphs: GraphSizes = GraphSizes()
    max_drafts: int = 0
    """Tokens that a request may run in one step behind those that are known: drafts, which the
    step accepts or rejects."""
    maps_tokens: bool = False
    """Whether the table of all tokens lies in pinned memory of the host, where the device reads and
    writes it over the bus (unified virtual addressing), and not in the device's own. A step reads
    a token of each request from it; penalties and bad words read all of a request's."""

    @property
    def num_rows(self) -> int:
        """Rows of all per-request state: one for each live request, and the idle row."""
        return self.max_num_reqs + 1

    @property
    def idle_row(self) -> int:
        """The row of no request. What pads a batch runs on it, and leaves it as it is."""
        return self.max_num_reqs

    def __post_init__(self) -> None:
        for name in ("max_num_reqs", "max_num_tokens", "max_model_len", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.max_drafts < 0:
            raise ConfigError(f"max_drafts is {self.max_drafts}; it must be 0 (none) or more")
        if max(self.graphs.query_lens) > 1 + self.max_drafts:
            raise ConfigError(
                f"graphs.query_lens is {self.graphs.query_lens}; "
                f"with max_drafts {self.max_drafts} a request runs at most {1 + self.max_drafts}"
            )
        for name, bound in (
            ("decodes", "max_num_reqs"),
            ("mixed", "max_num_tokens"),
            ("forwards", "max_num_tokens"),
        ):
            largest, most = max(getattr(self.graphs, name), default=0), getattr(self, bound)
            if largest > most:
                raise ConfigError(f"graphs.{name} has {largest}; {bound} is {most}")
        for index, group in enumerate(self.kv_groups):
            if min(group.block_size, group.max_blocks, group.num_blocks) < 1:
                raise ConfigError(
                    f"kv_groups[{index}] is {group}; "
                    "block_size, max_blocks and num_blocks must be at least 1"
                )
            capacity = group.block_size * group.max_blocks
            if capacity < self.max_model_len:
                raise ConfigError(
                    f"kv_groups[{index}] holds {capacity} tokens, fewer than "
                    f"max_model_len {self.max_model_len}; raise max_blocks"
                )
