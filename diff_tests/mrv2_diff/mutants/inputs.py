"""Faults of what a step runs: tokens, positions, lengths, slots, attention, logits, commit."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mrv2.batch import commit, decode, inputs
from mrv2.batch.inputs import InputBatch
from mrv2.head.check import Forced
from mrv2.memory.arena import Arena
from mrv2.output import PendingOutput
from mrv2.ports import ForwardInputs, ForwardOutput
from mrv2.runner import Runner
from mrv2.state import block_tables
from mrv2_compat.vllm_v1.host.attention import VllmAttentionPlanner
from mrv2_compat.vllm_v1.host.model import VllmModel
from mrv2_diff.mutants.mutant import Arguments, Mutant, after, before, changed

Context = AbstractContextManager[object]


def _off_by_one_position() -> Context:
    return after(inputs.gather_tokens, lambda arguments: arguments["positions"].add_(1))


def _slot_from_wrong_block() -> Context:
    return after(
        block_tables.slot_mapping,
        lambda arguments: arguments["slots"].add_(arguments["block_size"]),
    )


@contextmanager
def _lost_staged_write() -> Iterator[None]:
    flush = Arena.flush

    def faulty(self: Arena) -> None:
        if self.num_staged > 1:  # the last is the layout; kernels leave memory without it
            del self._values[: self._lengths[0]], self._starts[0], self._lengths[0]
        flush(self)

    with patch.object(Arena, "flush", faulty):
        yield


def _sequence_length_one_short() -> Context:
    return after(inputs.gather_tokens, lambda arguments: arguments["seq_lens"].sub_(1))


def _off_by_one_position_of_decodes() -> Context:
    return after(decode.decode_tokens, lambda arguments: arguments["positions"].add_(1))


def _sequence_length_of_decodes_one_short() -> Context:
    return after(decode.decode_tokens, lambda arguments: arguments["seq_lens"].sub_(1))


def _tokens_of_decodes_one_position_too_far() -> Context:
    def too_far(arguments: Arguments) -> None:
        drawing = (arguments["num_sampled"] > 0) & (arguments["num_logits"] == 1)
        rows, own = arguments["rows"][drawing].long(), arguments["seq_lens"][drawing].long()
        table, tokens = arguments["token_table"], arguments["token_ids"][drawing, 0]
        table[rows, own] = 0
        table[rows, (own + 1).clamp(max=table.shape[1] - 1)] = tokens.to(torch.int32)

    return after(commit.commit_step, too_far)


def _slot_of_decodes_from_wrong_block() -> Context:
    return after(
        decode.decode_blocks,
        lambda arguments: arguments["slots"].add_(arguments["block_size"]),
    )


def _rolled_rows(arguments: Arguments) -> None:
    arguments["rows"] = arguments["rows"].roll(1)


def _blocks_of_decodes_of_another_row() -> Context:
    return before(decode.decode_blocks, _rolled_rows)


def _blocks_of_prompts_of_another_row() -> Context:
    return before(block_tables.gather_block_table, _rolled_rows)


def _tokens_of_decodes_of_another_row() -> Context:
    return before(decode.decode_tokens, _rolled_rows)


def _tokens_of_prompts_of_another_row() -> Context:
    return before(inputs.gather_tokens, _rolled_rows)


def _block_size_of_the_first_column() -> Context:
    def off_within_block(arguments: Arguments) -> None:
        slots, size = arguments["slots"], arguments["block_size"]
        slots.copy_(slots.div(size, rounding_mode="floor") * size)

    return after(block_tables.slot_mapping, off_within_block)


def _swapped_logit_row() -> Context:
    def swap(arguments: Arguments) -> None:
        indices: Tensor = arguments["logits_indices"]
        indices[:2] = indices[:2].flip(0)

    return after(inputs.locate_logits, swap)


def _logits_of_the_first_token() -> Context:
    def first(arguments: Arguments) -> None:
        starts, counts = arguments["query_start_loc"][:-1], arguments["cu_num_logits"].diff()
        drawing = starts[counts > 0]
        arguments["logits_indices"][: len(drawing)] = drawing

    return after(inputs.locate_logits, first)


def _planned_from(fault: Callable[[InputBatch], InputBatch]) -> Context:
    """Let attention be planned from another batch than the one that is shown."""
    return changed(
        VllmAttentionPlanner,
        "plan",
        lambda plan: lambda self, batch: plan(self, fault(batch)),
    )


def _attention_one_token_short() -> Context:
    return _planned_from(lambda batch: replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=1)))


def _attention_reads_a_neighbours_blocks() -> Context:
    return _planned_from(
        lambda batch: replace(
            batch, block_tables=tuple(table.roll(1, dims=0) for table in batch.block_tables)
        )
    )


def _keys_written_one_slot_behind() -> Context:
    return _planned_from(
        lambda batch: replace(batch, slots=tuple((slots - 1).clamp(min=0) for slots in batch.slots))
    )


def _rotary_positions_from_the_chunk() -> Context:
    def faulty(forward: Callable[..., ForwardOutput]) -> Callable[..., ForwardOutput]:
        def from_the_chunk(self: VllmModel, given: ForwardInputs) -> ForwardOutput:
            first = given.positions[..., :1] if given.positions.shape[-1] else 0
            return forward(self, replace(given, positions=given.positions - first))

        return from_the_chunk

    return changed(VllmModel, "forward", faulty)


def _logits_that_are_not_numbers() -> Context:
    def faulty(compute_logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoiled(self: VllmModel, hidden: Tensor) -> Tensor:
            logits = compute_logits(self, hidden)
            logits[-1] = torch.nan
            return logits

        return spoiled

    return changed(VllmModel, "compute_logits", faulty)


def _token_committed_twice() -> Context:
    def again(arguments: Arguments) -> None:
        drawing = arguments["num_sampled"] > 0
        rows, lengths = arguments["rows"][drawing].long(), arguments["seq_lens"][drawing].long()
        last = arguments["token_table"].shape[1] - 1
        tokens = arguments["token_ids"][drawing, 0].to(torch.int32)
        arguments["token_table"][rows, (lengths + 1).clamp(max=last)] = tokens
        arguments["num_computed_tokens"][rows] += 1

    return after(commit.commit_step, again)


def _token_committed_to_a_neighbour() -> Context:
    def swap(arguments: Arguments) -> None:
        arguments["token_ids"] = arguments["token_ids"].flip(0)

    return before(commit.commit_step, swap)


def _chunks_do_not_advance() -> Context:
    def hold(arguments: Arguments) -> None:
        drawing = arguments["num_sampled"] > 0
        for name in ("rows", "seq_lens", "num_logits", "token_ids", "num_sampled"):
            arguments[name] = arguments[name][drawing]

    return before(commit.commit_step, hold)


def _own_tokens_not_committed() -> Context:
    def forget(arguments: Arguments) -> None:
        arguments["token_ids"] = torch.zeros_like(arguments["token_ids"])

    def faulty(sample: Callable[..., PendingOutput]) -> Callable[..., PendingOutput]:
        def forgetful(
            self: Runner, step: Any, forced: Forced | None = None, grammar: Any = None
        ) -> PendingOutput:
            with nullcontext() if forced is not None else before(commit.commit_step, forget):
                return sample(self, step, forced, grammar)

        return forgetful

    return changed(Runner, "sample", faulty)


MUTANTS = (
    Mutant(
        id="off-by-one-position",
        kind="positions",
        title="every position of a step with prompt tokens is one too large",
        case="lifecycle.greedy",
        first="positions",
        apply=_off_by_one_position,
    ),
    Mutant(
        id="slot-from-wrong-block",
        kind="slots",
        title="slots point into the next block in steps with prompt tokens",
        case="lifecycle.greedy",
        first="slots",
        apply=_slot_from_wrong_block,
    ),
    Mutant(
        id="lost-staged-write",
        kind="staged writes",
        title="the first of a step's staged writes never reaches the device",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_lost_staged_write,
    ),
    Mutant(
        id="sequence-length-one-short",
        kind="lengths",
        title="attention sees one token too few in steps with prompt tokens",
        case="lifecycle.greedy",
        first="seq_lens",
        apply=_sequence_length_one_short,
    ),
    Mutant(
        id="off-by-one-position-of-decodes",
        kind="positions",
        title="the position of a decode's token is one too large",
        case="lifecycle.greedy",
        first="positions",
        apply=_off_by_one_position_of_decodes,
    ),
    Mutant(
        id="sequence-length-of-decodes-one-short",
        kind="lengths",
        title="attention sees one token too few in decodes",
        case="lifecycle.greedy",
        first="seq_lens",
        apply=_sequence_length_of_decodes_one_short,
    ),
    Mutant(
        id="decodes-draw-one-position-too-far",
        kind="commit",
        title="a decode's token is put one position behind its own",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_tokens_of_decodes_one_position_too_far,
    ),
    Mutant(
        id="slot-of-decodes-from-wrong-block",
        kind="slots",
        title="the slot of a decode's token points into the next block",
        case="lifecycle.greedy",
        first="slots",
        apply=_slot_of_decodes_from_wrong_block,
    ),
    Mutant(
        id="blocks-of-decodes-of-another-row",
        kind="block tables",
        title="decodes are given a neighbour's blocks",
        case="lifecycle.greedy",
        first="slots",
        apply=_blocks_of_decodes_of_another_row,
    ),
    Mutant(
        id="blocks-of-prompts-of-another-row",
        kind="block tables",
        title="steps with prompt tokens are given a neighbour's blocks",
        case="lifecycle.greedy",
        first="slots",
        apply=_blocks_of_prompts_of_another_row,
    ),
    Mutant(
        id="tokens-of-decodes-of-another-row",
        kind="inputs",
        title="decodes run a neighbour's last token",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_tokens_of_decodes_of_another_row,
    ),
    Mutant(
        id="tokens-of-prompts-of-another-row",
        kind="inputs",
        title="steps with prompt tokens run a neighbour's",
        case="lifecycle.chunked_prefill",
        first="input_ids",
        apply=_tokens_of_prompts_of_another_row,
    ),
    Mutant(
        id="slots-at-the-start-of-blocks",
        kind="slots",
        title="the place within its block is left out of a slot",
        case="lifecycle.chunked_prefill",
        first="slots",
        apply=_block_size_of_the_first_column,
    ),
    Mutant(
        id="swapped-logit-row",
        kind="logits",
        title="two requests get each other's logits in a step with prompt tokens",
        case="lifecycle.greedy",
        first="logits",
        apply=_swapped_logit_row,
    ),
    Mutant(
        id="logits-of-the-first-token",
        kind="logits",
        title="the first token of a prompt gives the logits in place of the last",
        case="lifecycle.greedy",
        first="logits",
        apply=_logits_of_the_first_token,
    ),
    Mutant(
        id="logits-that-are-not-numbers",
        kind="logits",
        title="the last row of logits is NaN",
        case="lifecycle.greedy",
        first="logits",
        apply=_logits_that_are_not_numbers,
    ),
    Mutant(
        id="attention-one-token-short",
        kind="attention metadata",
        title="attention is told of one token less than the batch has",
        case="lifecycle.greedy",
        first="logits",
        apply=_attention_one_token_short,
    ),
    Mutant(
        id="attention-reads-a-neighbours-blocks",
        kind="attention metadata",
        title="attention is given the block tables in another order than the batch",
        case="lifecycle.greedy",
        first="logits",
        apply=_attention_reads_a_neighbours_blocks,
    ),
    Mutant(
        id="keys-written-one-slot-behind",
        kind="attention metadata",
        title="keys and values are written one slot before their own",
        case="lifecycle.greedy",
        first="logits",
        apply=_keys_written_one_slot_behind,
    ),
    Mutant(
        id="positions-of-the-model-from-the-chunk",
        kind="positions",
        title="the model is given positions that start anew with each step",
        case="lifecycle.chunked_prefill",
        first="logits",
        apply=_rotary_positions_from_the_chunk,
    ),
    Mutant(
        id="token-committed-twice",
        kind="commit",
        title="a drawn token is appended, and counted, twice",
        case="lifecycle.greedy",
        first="positions",
        apply=_token_committed_twice,
    ),
    Mutant(
        id="token-committed-to-a-neighbour",
        kind="commit",
        title="requests are given each other's tokens to go on with",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_token_committed_to_a_neighbour,
    ),
    Mutant(
        id="chunks-do-not-advance",
        kind="chunked prompts",
        title="a request that draws nothing in a step does not advance",
        case="lifecycle.chunked_prefill",
        first="input_ids",
        apply=_chunks_do_not_advance,
    ),
    Mutant(
        id="own-tokens-not-committed",
        kind="commit",
        title="what the runner drew itself is not what it goes on with",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_own_tokens_not_committed,
    ),
)
