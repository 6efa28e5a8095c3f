"""From a step of V1's scheduler to what concerns the requests that the shadow follows.

Nothing here imports vLLM: the scheduler's output is only read, by its names. A step without a
followed request costs a look at the new requests, of which there are none in most steps, and one at
an empty dict.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request that the shadow follows from here on."""

    req_id: str
    prompt: list[int]
    params: Any
    """vLLM's sampling parameters."""
    num_blocks: tuple[int, ...]
    """Blocks that are reserved for it, of each KV group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What V1 runs of one request in a step."""

    req_id: str
    start: int
    """Tokens that V1 had computed before."""
    end: int
    """Tokens that V1 has computed after."""
    num_logprobs: int | None = None
    """Values to keep of each draw, that of the drawn token among them; None keeps none, and -1 all.
    V1's batch may have had more."""


@dataclass(slots=True, kw_only=True)
class Answered:
    """What V1 drew for one request in a step."""

    token_id: int
    logprobs: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None
    """[num_logprobs] token ids and values, those of the drawn token first, where the request asked
    for some."""


@dataclass(slots=True, kw_only=True)
class Slice:
    """The part of a step that concerns followed requests."""

    finished: list[str] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    """Requests that were preempted and go on in this step."""
    work: list[Work] = field(default_factory=list)
    answers: dict[str, Answered] = field(default_factory=dict)
    grammar: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """The words of what a grammar allows, by request."""
    forget_all: bool = False
    """Drop every request first."""
    is_complete: bool = False
    """Whether V1's answers are in; steps are sent in their order."""
    is_given_up: bool = False
    """Whether nobody waits for the answers any more."""
    num_steps: int = 1
    """Of V1, of which this is a part."""

    @property
    def req_ids(self) -> set[str]:
        """The requests that it is about."""
        return {
            *self.finished,
            *self.restarted,
            *(arrived.req_id for arrived in self.arrived),
            *(work.req_id for work in self.work),
        }

    @property
    def num_tokens(self) -> int:
        """What V1 ran of the followed requests."""
        return sum(work.end - work.start for work in self.work)

    @property
    def num_bytes(self) -> int:
        """What the slice takes in memory, roughly."""
        values = [part for one in self.answers.values() for part in one.logprobs or ()]
        arrays = sum(array.nbytes for array in (*values, *self.grammar.values()))
        prompts = sum(len(arrived.prompt) for arrived in self.arrived)
        return _BYTES_OF_WORK * (1 + len(self.work)) + arrays + 8 * prompts

    def answer(self, output: Any) -> None:
        """Take V1's answers from its ModelRunnerOutput."""
        for work in self.work:
            index = output.req_id_to_index.get(work.req_id)
            tokens = output.sampled_token_ids[index] if index is not None else []
            if len(tokens):
                self.answers[work.req_id] = Answered(
                    token_id=int(tokens[0]), logprobs=_logprobs(output.logprobs, index, work)
                )
        self.is_complete = True

    def constrain(self, grammar_output: Any) -> None:
        """Keep what grammars allow the followed requests; None constrains none."""
        if grammar_output is None:
            return
        followed = {work.req_id for work in self.work}
        for index, req_id in enumerate(grammar_output.structured_output_request_ids):
            if req_id in followed:
                self.grammar[req_id] = np.array(grammar_output.grammar_bitmask[index])

    def join(self, other: "Slice") -> None:
        """Take in a later slice that is about other requests."""
        self.finished += other.finished
        self.arrived += other.arrived
        self.restarted += other.restarted
        self.work += other.work
        self.answers |= other.answers
        self.grammar |= other.grammar
        self.num_steps += other.num_steps


def joined(slices: Sequence[Slice], max_num_tokens: int) -> list[Slice]:
    """Put slices together that have no request in common, so that there are fewer steps to run.

    Each request keeps the order of its slices, and what V1 ran together stays together. Each slice
    goes as far to the front as that allows, so there are about as many steps left as the request
    with the most slices has.

    Args:
        slices: In V1's order, with V1's answers. They are used up.
        max_num_tokens: Of a step.
    """
    steps: list[Slice] = []
    earliest: dict[str, int] = {}
    first = 0
    for part in slices:
        if part.forget_all:
            steps.append(part)
            first = len(steps)
            continue
        req_ids = part.req_ids
        at = max((earliest.get(req_id, first) for req_id in req_ids), default=first)
        at = max(at, first)
        while at < len(steps) and steps[at].num_tokens + part.num_tokens > max_num_tokens:
            at += 1
        if at < len(steps):
            steps[at].join(part)
        else:
            steps.append(part)
        earliest |= dict.fromkeys(req_ids, at + 1)
    return steps


_BYTES_OF_WORK = 500
"""A `Work` and its `Answered`: Python objects of about this size."""


def _logprobs(
    lists: Any, index: int, work: Work
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
    if lists is None or work.num_logprobs is None:
        return None
    row = lists.slice_request(index, 1)
    end = None if work.num_logprobs < 0 else work.num_logprobs
    return row.logprob_token_ids[0][:end].copy(), row.logprobs[0][:end].copy()


def _num_logprobs(params: Any) -> int | None:
    """Return how many logprobs of a request's draws are compared, as in `Work`."""
    if params.logprobs is None or params.logprob_token_ids is not None:
        return None
    return -1 if params.logprobs < 0 else int(params.logprobs) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The shadow's KV cache and rows."""

    num_blocks: int
    """Blocks that can be given away."""
    block_sizes: tuple[int, ...]
    """Tokens in a block, of each KV group; all groups take from the same blocks."""
    max_num_reqs: int
    max_model_len: int

    def needed(self, prompt_len: int, max_tokens: int | None) -> tuple[int, ...]:
        """Return the blocks of each group that a request can come to need."""
        longest = self.max_model_len
        if max_tokens is not None:
            longest = min(longest, prompt_len + max_tokens)
        return tuple(-(-longest // size) for size in self.block_sizes)


class Slicer:
    """Chooses requests, keeps account of the shadow's room, and cuts each step.

    Args:
        share: Of the requests that are drawn for the sample.
        room: What there is for them.
        refusal: Returns why mrv2 does not take a request's parameters; None if it does.
        count: Counts a request by the name of a counter.
    """

    def __init__(
        self,
        share: float,
        room: Room,
        refusal: Callable[[Any], str | None],
        count: Callable[[str], None],
    ) -> None:
        self._share = share
        self._room = room
        self._refusal = refusal
        self._count = count
        self._free = room.num_blocks
        self._followed: dict[str, int] = {}
        self._ended: dict[str, list[int]] = {}
        """Blocks of requests that V1 has ended, and the shadow not yet."""
        self._num_logprobs: dict[str, int | None] = {}

    @property
    def followed(self) -> Mapping[str, int]:
        """The blocks reserved for each followed request."""
        return self._followed

    def cut(self, scheduler_output: Any, *, is_behind: bool = False) -> Slice | None:
        """Return what concerns followed requests in a step; None where nothing does.

        Args:
            scheduler_output: The step.
            is_behind: Take no further request; what is followed is followed on.
        """
        finished = self._finished(scheduler_output) if self._followed else []
        arrived = [
            request
            for new in scheduler_output.scheduled_new_reqs
            if (request := self._consider(new, finished, is_behind)) is not None
        ]
        if not self._followed and not finished:
            return None
        found = Slice(finished=finished, arrived=arrived)
        self._add_work(found, scheduler_output)
        if not (found.work or finished or arrived):
            return None
        found.is_complete = not found.work
        return found

    def forget_all(self) -> int:
        """Let go of every request, and return how many there were."""
        num_followed = len(self._followed)
        self._followed.clear()
        self._ended.clear()
        self._num_logprobs.clear()
        self._free = self._room.num_blocks
        return num_followed

    def forget(self, req_id: str) -> None:
        """Let go of a request that the shadow has dropped.

        Where an earlier one with its id is not ended yet, that one may have been dropped: then this
        one keeps its room until its own end.
        """
        if req_id in self._ended:
            return
        self._free += self._followed.pop(req_id, 0)
        self._num_logprobs.pop(req_id, None)

    def give_back(self, req_id: str) -> None:
        """Take back the room of a request that the shadow has ended, as V1 did before."""
        if blocks := self._ended.get(req_id):
            self._free += blocks.pop(0)
            if not blocks:
                del self._ended[req_id]

    def _end(self, req_id: str) -> None:
        """Follow a request no further.

        It has its room until `give_back`: the shadow may run what arrives later before it runs this
        one's end.
        """
        self._ended.setdefault(req_id, []).append(self._followed.pop(req_id))
        self._num_logprobs.pop(req_id)

    def _has_row(self) -> bool:
        ended = sum(map(len, self._ended.values()))
        return len(self._followed) + ended < self._room.max_num_reqs

    def _finished(self, scheduler_output: Any) -> list[str]:
        gone = [req_id for req_id in self._followed if req_id in scheduler_output.finished_req_ids]
        for req_id in gone:
            self._end(req_id)
        return gone

    def _consider(self, new: Any, finished: list[str], is_behind: bool) -> Arrived | None:
        if new.req_id in self._followed:  # the next turn of a session: its rows start over
            self._end(new.req_id)
            finished.append(new.req_id)
            self._count("dropped_requests")
            return None
        if not is_drawn(new.req_id, self._share):
            return None
        if new.prompt_token_ids is None or new.sampling_params is None:
            self._count("unsupported_requests")
            return None
        if self._refusal(new.sampling_params) is not None:
            self._count("unsupported_requests")
            return None
        if is_behind:
            self._count("busy_requests")
            return None
        needed = self._room.needed(len(new.prompt_token_ids), new.sampling_params.max_tokens)
        if sum(needed) > self._free or not self._has_row():
            self._count("no_room_requests")
            return None
        self._free -= sum(needed)
        self._followed[new.req_id] = sum(needed)
        self._num_logprobs[new.req_id] = _num_logprobs(new.sampling_params)
        self._count("sampled_requests")
        return Arrived(
            req_id=new.req_id,
            prompt=list(new.prompt_token_ids),
            params=new.sampling_params,
            num_blocks=needed,
        )

    def _add_work(self, found: Slice, scheduler_output: Any) -> None:
        num_scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        starts = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        for req_id in self._followed:
            num_tokens = num_scheduled.get(req_id)
            if num_tokens is None:
                continue
            start = starts.get(req_id)
            if start is None:
                start = cached.num_computed_tokens[cached.req_ids.index(req_id)]
                if req_id in cached.resumed_req_ids:
                    found.restarted.append(req_id)
                    self._count("resumed_requests")
            found.work.append(
                Work(
                    req_id=req_id,
                    start=start,
                    end=start + num_tokens,
                    num_logprobs=self._num_logprobs[req_id],
                )
            )


def is_drawn(req_id: str, share: float) -> bool:
    """Draw a request for the sample, by its id alone, so that every worker draws the same."""
    digest = hashlib.blake2b(req_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64
