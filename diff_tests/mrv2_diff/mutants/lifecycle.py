"""Faults of rows and their lifecycle: arrival, chunks, preemption, resume, cached prefixes, end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from mrv2 import runner as core
from mrv2.batch.layout import BatchLayout
from mrv2.params import Sampling
from mrv2.plan import Arrival, NextDecode, Scheduled, StepPlan
from mrv2.state.block_tables import BlockTables
from mrv2.state.requests import RequestColumns
from mrv2_compat.vllm_v1 import runner as adapter
from mrv2_compat.vllm_v1.step import translate_in
from mrv2_compat.vllm_v1.step.ledger import RequestLedger
from mrv2_diff.mutants.mutant import Mutant, changed
from mrv2_diff.verdict import Verdict

Context = AbstractContextManager[object]


def _stale_row() -> Context:
    return patch.object(BlockTables, "evict", lambda self, row: None)


@contextmanager
def _resumed_keeps_old_block() -> Iterator[None]:
    admit = BlockTables.admit
    first_blocks: dict[str, int] = {}

    def faulty(self: BlockTables, row: int, arrival: Arrival) -> None:
        own = arrival.block_ids[0]
        old = first_blocks.setdefault(arrival.req_id, own[0])
        admit(self, row, replace(arrival, block_ids=([old, *own[1:]], *arrival.block_ids[1:])))

    with patch.object(BlockTables, "admit", faulty):
        yield


def _new_blocks_lost() -> Context:
    def faulty(append: Callable[..., None]) -> Callable[..., None]:
        def lost(self: BlockTables, row: int, block_ids: Sequence[Sequence[int]]) -> None:
            if self._num_blocks[0, row]:
                for index, blocks in enumerate(block_ids):
                    self._num_blocks[index, row] += len(blocks)
            else:
                append(self, row, block_ids)

        return lost

    return changed(BlockTables, "append", faulty)


def _second_group_as_the_first() -> Context:
    def faulty(append: Callable[..., None]) -> Callable[..., None]:
        def alike(self: BlockTables, row: int, block_ids: Sequence[Sequence[int]]) -> None:
            append(self, row, [block_ids[0]] * len(block_ids))

        return alike

    return changed(BlockTables, "append", faulty)


def _progress_of_the_last_owner() -> Context:
    def faulty(stage: Callable[..., None]) -> Callable[..., None]:
        def kept(self: RequestColumns, row: int, num_computed_tokens: int) -> None:
            if num_computed_tokens:
                stage(self, row, num_computed_tokens)
            else:
                self.progress.set(row, 0)

        return kept

    return changed(RequestColumns, "stage_progress", faulty)


def _cached_prefix_run_again() -> Context:
    def faulty(stage: Callable[..., None]) -> Callable[..., None]:
        def from_the_start(self: RequestColumns, row: int, num_computed_tokens: int) -> None:
            stage(self, row, 0)
            self.progress.set(row, num_computed_tokens)

        return from_the_start

    return changed(RequestColumns, "stage_progress", faulty)


def _arriving_with(fault: Callable[[Arrival], Arrival]) -> Context:
    """Let tokens and progress be taken from another arrival than the one that is planned."""
    return changed(
        RequestColumns,
        "admit",
        lambda admit: lambda self, row, arrival: admit(self, row, fault(arrival)),
    )


def _outputs_of_resumes_lost() -> Context:
    def lost(arrival: Arrival) -> Arrival:
        tokens = list(arrival.token_ids)
        tokens[arrival.prompt_len :] = [0] * (len(tokens) - arrival.prompt_len)
        return replace(arrival, token_ids=tokens)

    return _arriving_with(lost)


def _outputs_of_resumes_are_prompt() -> Context:
    return _arriving_with(lambda arrival: replace(arrival, prompt_len=len(arrival.token_ids)))


def _parameters_lost_on_resume() -> Context:
    def faulty(resume: Callable[..., Any]) -> Callable[..., Any]:
        def plain(*args: Any) -> Iterator[Arrival]:
            for arrival in resume(*args):
                yield replace(arrival, sampling=Sampling(temperature=arrival.sampling.temperature))

        return plain

    return changed(translate_in, "_resume", faulty)


def _laid_out_from(fault: Callable[[Scheduled], Scheduled]) -> Context:
    """Let a checked plan of a step with prompts be laid out from other numbers."""

    def faulty(lay_out: Callable[..., BatchLayout]) -> Callable[..., BatchLayout]:
        def other(scheduled: Scheduled | NextDecode, rows: Any, **options: Any) -> BatchLayout:
            if isinstance(scheduled, Scheduled):
                scheduled = fault(scheduled)
            return lay_out(scheduled, rows, **options)

        return other

    return changed(core, "layout_batch", faulty)


def _chunks_draw() -> Context:
    def all_draw(scheduled: Scheduled) -> Scheduled:
        ends = zip(scheduled.num_computed_tokens, scheduled.num_tokens, strict=True)
        return replace(scheduled, num_known_tokens=[start + count for start, count in ends])

    return _laid_out_from(all_draw)


def _last_chunk_of_one_token_draws_nothing() -> Context:
    def held(scheduled: Scheduled) -> Scheduled:
        return replace(
            scheduled,
            num_known_tokens=[
                known + 1 if max(scheduled.num_tokens) > 1 and count == 1 else known
                for known, count in zip(
                    scheduled.num_known_tokens, scheduled.num_tokens, strict=True
                )
            ],
        )

    return _laid_out_from(held)


def _planning(fault: Callable[[Any, RequestLedger, StepPlan], StepPlan]) -> Context:
    """Let the plan that the core is given be another than the translated one."""

    def faulty(plan_step: Callable[..., StepPlan]) -> Callable[..., StepPlan]:
        def other(scheduler_output: Any, ledger: RequestLedger, *args: Any) -> StepPlan:
            return fault(scheduler_output, ledger, plan_step(scheduler_output, ledger, *args))

        return other

    return changed(adapter, "plan_step", faulty)


def _departures_forgotten() -> Context:
    return _planning(lambda output, ledger, plan: replace(plan, departed=()))


def _preempted_requests_forgotten() -> Context:
    def forgetful(output: Any, ledger: RequestLedger, plan: StepPlan) -> StepPlan:
        for req_id in output.preempted_req_ids or ():
            ledger.forget(req_id)
        return plan

    return _planning(forgetful)


def _finished_requests_remembered() -> Context:
    return patch.object(RequestLedger, "forget", lambda self, req_id: None)


def _continuations_in_another_order() -> Context:
    """New blocks are handed to requests in the order of another list than theirs."""

    def shuffled(output: Any, ledger: RequestLedger, plan: StepPlan) -> StepPlan:
        given = plan.continuations
        blocks = [each.new_block_ids for each in reversed(given)]
        return replace(
            plan,
            continuations=tuple(
                replace(each, new_block_ids=other)
                for each, other in zip(given, blocks, strict=True)
            ),
        )

    return _planning(shuffled)


MUTANTS = (
    Mutant(
        id="stale-row",
        kind="rows",
        title="a row's blocks are not forgotten when its request leaves",
        case="lifecycle.abort_reuse",
        first="slots",
        apply=_stale_row,
    ),
    Mutant(
        id="resumed-keeps-old-block",
        kind="preemption",
        title="a resumed request reads the first block that it held before",
        case="lifecycle.preemption",
        first="slots",
        apply=_resumed_keeps_old_block,
    ),
    Mutant(
        id="new-blocks-lost",
        kind="block tables",
        title="blocks that a request gets as it grows never reach its table",
        case="lifecycle.greedy",
        first="slots",
        apply=_new_blocks_lost,
    ),
    Mutant(
        id="blocks-in-another-order",
        kind="block tables",
        title="of several requests that grow, each is given another's new block",
        case="lifecycle.churn",
        first="slots",
        apply=_continuations_in_another_order,
    ),
    Mutant(
        id="second-group-as-the-first",
        kind="block tables",
        title="every KV group is given the first one's blocks",
        case="attention.alternating_window",
        first="slots",
        apply=_second_group_as_the_first,
    ),
    Mutant(
        id="progress-of-the-last-owner",
        kind="rows",
        title="a request begins where the last owner of its row was",
        case="lifecycle.abort_reuse",
        first="input_ids",
        apply=_progress_of_the_last_owner,
    ),
    Mutant(
        id="cached-prefix-run-again",
        kind="prefix caching",
        title="the device begins at a prompt's first token where a prefix is cached",
        case="lifecycle.prefix_cache",
        first="input_ids",
        apply=_cached_prefix_run_again,
    ),
    Mutant(
        id="outputs-of-resumes-lost",
        kind="preemption",
        title="a resumed request comes back with its prompt alone",
        case="lifecycle.preemption",
        first="input_ids",
        apply=_outputs_of_resumes_lost,
    ),
    Mutant(
        id="outputs-of-resumes-are-prompt",
        kind="preemption",
        title="after a resume, earlier outputs count as prompt",
        case="sampling.presence_penalty",
        first="processed_logits",
        apply=_outputs_of_resumes_are_prompt,
    ),
    Mutant(
        id="parameters-lost-on-resume",
        kind="preemption",
        title="a resumed request has no bias, mask or penalty any more",
        case="sampling.logit_bias",
        first="processed_logits",
        apply=_parameters_lost_on_resume,
    ),
    Mutant(
        id="chunks-draw",
        kind="chunked prompts",
        title="a request draws in the middle of its prompt",
        case="lifecycle.chunked_prefill",
        first="output",
        apply=_chunks_draw,
    ),
    Mutant(
        id="one-token-beside-prompts-draws-nothing",
        kind="chunked prompts",
        title="beside prompts, a request that runs one token is not taken for one that draws",
        case="lifecycle.mixed",
        first="output",
        apply=_last_chunk_of_one_token_draws_nothing,
    ),
    Mutant(
        id="departures-forgotten",
        kind="rows",
        title="nobody ever leaves",
        case="lifecycle.abort_reuse",
        first=None,
        verdict=Verdict.CRASHED,
        apply=_departures_forgotten,
    ),
    Mutant(
        id="preempted-requests-forgotten",
        kind="preemption",
        title="what a preempted request asked for is not remembered",
        case="lifecycle.preemption",
        first="ledger",
        apply=_preempted_requests_forgotten,
    ),
    Mutant(
        id="finished-requests-remembered",
        kind="memory",
        title="what a finished request asked for is never forgotten",
        case="lifecycle.mixed",
        first="ledger",
        apply=_finished_requests_remembered,
    ),
)
