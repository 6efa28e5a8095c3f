"""Whether a trace's steps make sense, so that a runner can be given them.

A runner believes its scheduler: a block that is not there would be written beyond the KV cache. So
every id, length and count is checked here before a replay starts, with the head's sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mrv2_diff.traces.events import Executed, Head, Known, NewRequest
from mrv2_diff.traces.format import Step, TraceError


@dataclass(slots=True)
class _Request:
    """What has been said of a request."""

    num_blocks: list[int]
    """By KV group."""


@dataclass(slots=True)
class Contents:
    """What a trace holds."""

    steps: int = 0
    steps_with_output: int = 0
    requests: int = 0
    tokens: int = 0
    masks: int = 0
    preemptions: int = 0
    resumes: int = 0
    in_flight: int = 0
    """Steps without an output, at the end."""


def check_steps(head: Head, steps: Iterable[Step]) -> Contents:
    """Go through all steps and return what they hold.

    Raises:
        TraceError: A step contradicts the head or the steps before. Names it, the value and the
            bound.
    """
    checker = _Checker(head)
    for step in steps:
        try:
            checker.see(step)
        except ValueError as error:
            raise TraceError(
                f"step {step.number} of the trace cannot be played: {error}; it was not written "
                "by mrv2-diff record, or by another version: record again"
            ) from error
    return checker.contents


class _Checker:
    def __init__(self, head: Head) -> None:
        self._head = head
        self._known: dict[str, _Request] = {}
        self.contents = Contents()

    def see(self, step: Step) -> None:
        executed, known = step.executed, step.executed.known
        for req_id in executed.finished_req_ids:
            self._known.pop(req_id, None)
        _need_lengths(known)
        names = [new.req_id for new in executed.new] + known.req_ids
        if len(set(names)) != len(names) or set(names) != set(executed.num_scheduled_tokens):
            raise ValueError("the requests are not those that have tokens scheduled, once each")
        _below("requests", len(names), self._head.engine.max_num_seqs + 1)
        total = sum(executed.num_scheduled_tokens.values())
        _below("tokens", total, self._head.engine.max_num_batched_tokens + 1)
        for new in executed.new:
            self._see_new(new, executed)
        self._see_known(known, executed)
        self._see_blocks(executed)
        self._see_output(step)
        contents = self.contents
        contents.steps += 1
        contents.requests += len(executed.new)
        contents.preemptions += len(executed.preempted_req_ids or ())
        contents.resumes += len(known.resumed_req_ids)

    def _see_new(self, new: NewRequest, executed: Executed) -> None:
        if not new.prompt:
            raise ValueError(f"request {new.req_id!r} has no prompt")
        self._tokens(new.prompt)
        params = new.params
        bias = () if params.logit_bias is None else params.logit_bias
        listed = (params.allowed_token_ids, params.logprob_token_ids, params.stop_token_ids, bias)
        for ids in (*listed, *(params.bad_words_token_ids or ())):
            self._tokens(list(ids or ()))
        self._known[new.req_id] = _Request([0] * len(self._head.kv.groups))
        self._extend(new.req_id, new.block_ids)
        scheduled = executed.num_scheduled_tokens[new.req_id]
        self._fits(new.req_id, new.num_computed_tokens + scheduled)

    def _see_known(self, known: Known, executed: Executed) -> None:
        resumed = set(known.resumed_req_ids)
        if not resumed <= set(known.req_ids):
            raise ValueError("a request is resumed that is not scheduled")
        for token_ids in known.all_token_ids.values():
            self._tokens(token_ids)
        for req_id, blocks, computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            if req_id not in self._known:
                raise ValueError(f"request {req_id!r} goes on and never came")
            if req_id in resumed:
                self._known[req_id].num_blocks = [0] * len(self._head.kv.groups)
            if blocks is not None:
                self._extend(req_id, blocks)
            self._fits(req_id, computed + executed.num_scheduled_tokens[req_id])

    def _see_blocks(self, executed: Executed) -> None:
        self._blocks(executed.new_block_ids_to_zero or ())
        for pair in executed.kv_cache_block_copies or ():
            self._blocks(pair)

    def _see_output(self, step: Step) -> None:
        names, contents = step.executed.num_scheduled_tokens, self.contents
        if step.sampled is not None:
            bits = step.sampled.mask.array()
            req_ids = step.sampled.req_ids
            words = -(-self._head.model.vocab_size // 32)
            if bits.shape != (len(req_ids), words) or not set(req_ids) <= set(names):
                raise ValueError(
                    f"masks of shape {bits.shape} for {len(req_ids)} requests and a vocabulary of "
                    f"{self._head.model.vocab_size}"
                )
            contents.masks += len(req_ids)
        if step.output is None:
            contents.in_flight += 1
            return
        contents.steps_with_output += 1
        if len(step.output.req_ids) != len(step.output.token_ids):
            raise ValueError("the output has not one list of tokens for each request")
        if not set(step.output.req_ids) <= set(names):
            raise ValueError("the output names a request that the step does not run")
        for token_ids in step.output.token_ids:
            _below("tokens of a request in one step", len(token_ids), 2)
            self._tokens(token_ids)
            contents.tokens += len(token_ids)

    def _extend(self, req_id: str, block_ids: list[list[int]]) -> None:
        held = self._known[req_id].num_blocks
        if len(block_ids) != len(held):
            raise ValueError(
                f"request {req_id!r} has blocks of {len(block_ids)} KV groups, and there are "
                f"{len(held)}"
            )
        for group, ids in enumerate(block_ids):
            self._blocks(ids)
            held[group] += len(ids)

    def _fits(self, req_id: str, num_tokens: int) -> None:
        """Need a place in the length and in the blocks for so many tokens."""
        engine = self._head.engine
        _below("a request's tokens", num_tokens, engine.max_model_len + 1)
        room = min(self._known[req_id].num_blocks) * engine.block_size
        if num_tokens > room:
            raise ValueError(f"request {req_id!r} runs {num_tokens} tokens in blocks for {room}")

    def _tokens(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            _below("a token id", max(token_ids), self._head.model.vocab_size)

    def _blocks(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            _below("a block id", max(block_ids), self._head.kv.num_blocks)


def _need_lengths(known: Known) -> None:
    lists = (known.new_block_ids, known.num_computed_tokens, known.num_output_tokens)
    if any(len(values) != len(known.req_ids) for values in lists):
        raise ValueError("the lists of requests that go on differ in length")


def _below(what: str, value: int, bound: int) -> None:
    if value >= bound:
        raise ValueError(f"{what}: {value}, which must be below {bound}")
