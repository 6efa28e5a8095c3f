"""What the host asks of one step.

A `StepPlan` is the runner's only input: who left, who arrived, who goes on and with which new
blocks, and how many tokens each scheduled request runs. It knows nothing of rows, devices or vLLM.
Preemption is a departure and resumption an arrival, so there are only three lifecycle events.
Checks that cost no more than they save stand here, at the boundary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from types import MappingProxyType

from mrv2.params import Sampling

NO_EXTRAS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that takes a row: new, or resumed after a preemption."""

    req_id: str
    token_ids: list[int]
    """Every token known so far: the prompt, and after a preemption the outputs too."""
    prompt_len: int
    """How many of `token_ids` are the prompt. The split is lost on a resume unless it is told;
    penalties, bad words and a least number of tokens count outputs from here."""
    num_computed_tokens: int
    """Tokens whose KV is already in the blocks (a prefix-cache hit)."""
    block_ids: tuple[list[int], ...]
    """Blocks held, for each KV group."""
    sampling: Sampling
    extras: Mapping[str, object] = field(default_factory=lambda: NO_EXTRAS)
    """What extensions are told of the request, by their names."""


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
    """Tokens before this step's; authoritative, and may have gone down. While drafts are in flight
    it is a bound: as if all of them were accepted."""
    num_known_tokens: list[int]
    """Prompt and output tokens that exist before this step, outputs still in flight counted in.
    A request draws a token in this step exactly if it runs its last known token. What it runs
    behind that are drafts; each of them draws one, too."""

    def next_decode(self) -> "NextDecode":
        """Return the plain decode after this work, in which every request must draw."""
        return NextDecode(base=self, num_steps=1)


@dataclass(slots=True, kw_only=True)
class NextDecode:
    """The plain decode that follows another step: `Scheduled` without its lists.

    The same requests run in the same order, each the token that it drew there. The runner sees in
    no more time than for one request that this follows what it executed last. If it does not, the
    lists are taken as those of `Scheduled` are. They are made when somebody reads them.

    A chain of these keeps its base, not every link. Not frozen, since one is made at every step.
    """

    base: Scheduled
    """The work that the chain began with; every request of it drew a token."""
    num_steps: int
    """Steps since the base, at least 1."""

    def next_decode(self) -> "NextDecode":
        """Return the plain decode after this one."""
        return NextDecode(base=self.base, num_steps=self.num_steps + 1)

    def follows(self, last: "Scheduled | NextDecode") -> bool:
        """Say whether this was made as what comes next after `last`, that very object or chain."""
        if isinstance(last, NextDecode):
            return self.base is last.base and self.num_steps == last.num_steps + 1
        return self.base is last and self.num_steps == 1

    @property
    def req_ids(self) -> list[str]:
        """The base's own list."""
        return self.base.req_ids

    @property
    def num_tokens(self) -> list[int]:
        """One for each request."""
        return [1] * len(self.base.req_ids)

    @property
    def num_computed_tokens(self) -> list[int]:
        """What the base had computed and ran, and a token more for each step since."""
        ran = map(add, self.base.num_computed_tokens, self.base.num_tokens)
        return [end + self.num_steps - 1 for end in ran]

    @property
    def num_known_tokens(self) -> list[int]:
        """A token more for each step since the base."""
        return [known + self.num_steps for known in self.base.num_known_tokens]

    def listed(self) -> Scheduled:
        """Return the same work with its lists."""
        return Scheduled(
            req_ids=self.req_ids,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_known_tokens=self.num_known_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: lifecycle events in the order in which they are applied, then the work."""

    departed: tuple[str, ...] = ()
    """Finished, aborted, preempted or replaced. Applied first; ids without a row are skipped."""
    arrivals: tuple[Arrival, ...] = ()
    continuations: tuple[Continuation, ...] = ()
    scheduled: Scheduled | NextDecode
    extras: Mapping[str, object] = field(default_factory=lambda: NO_EXTRAS)
    """What extensions are told of the step, by their names."""
