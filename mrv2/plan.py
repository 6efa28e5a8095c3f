"""What the host asks of one step.

A `StepPlan` is the runner's only input: who left, who arrived, who goes on and with which new
blocks, and how many tokens each scheduled request runs. It knows nothing of rows, devices or vLLM.
Preemption is a departure and resumption an arrival, so there are only three lifecycle events.
Checks that cost no more than they save stand here, at the boundary.
"""

from dataclasses import dataclass

from mrv2.errors import ConfigError

ALL_LOGPROBS = -1
"""`Sampling.num_logprobs` for the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request draws its tokens.

    Raises:
        ConfigError: A value is outside its range.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; larger values flatten the distribution."""
    seed: int = 0
    """64 bits. Noise is a pure function of (seed, position, token id)."""
    num_logprobs: int | None = None
    """None returns no logprobs, 0 the sampled token's, n the n likeliest beside it, -1 all of the
    vocabulary."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be finite and at least 0"
            )
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; it must fit in 64 bits")
        if self.num_logprobs is not None and self.num_logprobs < ALL_LOGPROBS:
            raise ConfigError(
                f"num_logprobs is {self.num_logprobs}; it must be -1 (all), 0, or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that takes a row: new, or resumed after a preemption."""

    req_id: str
    token_ids: list[int]
    """Every token known so far: the prompt, and after a preemption the outputs too."""
    prompt_len: int
    """How many of `token_ids` are the prompt. The split is lost on a resume unless it is told;
    penalties and a least number of tokens will count outputs from here. No stage reads it yet."""
    num_computed_tokens: int
    """Tokens whose KV is already in the blocks (a prefix-cache hit)."""
    block_ids: tuple[list[int], ...]
    """Blocks held, for each KV group."""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A live request that was given more blocks. Requests that only run on have none."""

    req_id: str
    new_block_ids: tuple[list[int], ...]
    """Blocks to append, for each KV group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The requests that run in this step, as parallel lists in the host's order."""

    req_ids: list[str]
    num_tokens: list[int]
    """Tokens to run, each at least 1."""
    num_computed_tokens: list[int]
    """Tokens before this step's; authoritative, and may have gone down."""
    num_known_tokens: list[int]
    """Prompt and output tokens that exist before this step, outputs still in flight counted in.
    A request draws a token in this step exactly if it runs its last known token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: lifecycle events in the order in which they are applied, then the work."""

    departed: tuple[str, ...] = ()
    """Finished, aborted, preempted or replaced. Applied first; ids without a row are skipped."""
    arrivals: tuple[Arrival, ...] = ()
    continuations: tuple[Continuation, ...] = ()
    scheduled: Scheduled
