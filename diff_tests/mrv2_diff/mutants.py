"""Faults that are put into the runner from outside, one at a time, to see whether they are found.

Each names beforehand the first value of the step chain that must differ, and a case in which it
can. The runner has no switch for any of this: a fault replaces a method or one half of an op for as
long as it is applied.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mrv2 import output
from mrv2.batch import commit, decode, inputs
from mrv2.memory.arena import Arena
from mrv2.ops.twin import TwinOp
from mrv2.plan import Arrival
from mrv2.sampling import (
    allowed_tokens,
    bad_words,
    logit_bias,
    logprobs,
    min_p,
    min_tokens,
    penalties,
    top_k_top_p,
)
from mrv2.sampling.logprobs import SampledLogprobs, gather_logprobs
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.prompt_logprobs import PromptLogprobs
from mrv2.state import block_tables
from mrv2.state.block_tables import BlockTables
from mrv2_diff.compare.steps import OF_PROMPTS
from mrv2_diff.verdict import Verdict

Patch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault."""

    id: str
    title: str
    case: str
    """Case that must find it."""
    first: str
    """First value of the chain that must differ."""
    apply: Patch
    """Makes a context in which the runner has the fault."""
    verdict: Verdict = Verdict.WRONG_VALUE


def _after(
    op: "TwinOp[...]", fault: Callable[[dict[str, Any]], None]
) -> AbstractContextManager[object]:
    """Let a fault change an op's arguments after its reference has run; CPU runs the reference."""
    reference = op.reference

    def faulty(*args: Any, **kwargs: Any) -> None:
        reference(*args, **kwargs)
        fault(dict(zip(op.parameters, args, strict=False)) | kwargs)

    return patch.object(op, "reference", faulty)


def _before(
    op: "TwinOp[...]", fault: Callable[[dict[str, Any]], None]
) -> AbstractContextManager[object]:
    """Let a fault change what an op's reference is given."""
    reference = op.reference

    def faulty(*args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(op.parameters, args, strict=False)) | kwargs
        fault(arguments)
        reference(**arguments)

    return patch.object(op, "reference", faulty)


def _of_a_neighbour(op: "TwinOp[...]") -> AbstractContextManager[object]:
    """Let an op read the rows of its batch in reverse."""

    def swap(arguments: dict[str, Any]) -> None:
        arguments["logit_rows"] = arguments["logit_rows"].flip(0)

    return _before(op, swap)


def _one_token_late(op: "TwinOp[...]") -> AbstractContextManager[object]:
    """Let an op see one token less than there is."""

    def late(arguments: dict[str, Any]) -> None:
        arguments["positions"] = arguments["positions"] - 1

    return _before(op, late)


def _stale_row() -> AbstractContextManager[object]:
    return patch.object(BlockTables, "evict", lambda self, row: None)


def _off_by_one_position() -> AbstractContextManager[object]:
    return _after(inputs.gather_tokens, lambda arguments: arguments["positions"].add_(1))


def _slot_from_wrong_block() -> AbstractContextManager[object]:
    return _after(
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


def _sequence_length_one_short() -> AbstractContextManager[object]:
    return _after(inputs.gather_tokens, lambda arguments: arguments["seq_lens"].sub_(1))


def _off_by_one_position_of_decodes() -> AbstractContextManager[object]:
    return _after(decode.decode_tokens, lambda arguments: arguments["positions"].add_(1))


def _sequence_length_of_decodes_one_short() -> AbstractContextManager[object]:
    return _after(decode.decode_tokens, lambda arguments: arguments["seq_lens"].sub_(1))


def _decodes_draw_one_position_too_far() -> AbstractContextManager[object]:
    def too_far(arguments: dict[str, Any]) -> None:
        last = arguments["token_table"].shape[1] - 1
        arguments["draw_positions"].add_(1).clamp_(max=last)

    return _after(decode.decode_tokens, too_far)


def _slot_of_decodes_from_wrong_block() -> AbstractContextManager[object]:
    return _after(
        decode.decode_blocks,
        lambda arguments: arguments["slots"].add_(arguments["block_size"]),
    )


def _blocks_of_decodes_of_another_row() -> AbstractContextManager[object]:
    def roll(arguments: dict[str, Any]) -> None:
        arguments["rows"] = arguments["rows"].roll(1)

    return _before(decode.decode_blocks, roll)


def _swapped_logit_row() -> AbstractContextManager[object]:
    def swap(arguments: dict[str, Any]) -> None:
        indices: Tensor = arguments["logits_indices"]
        indices[:2] = indices[:2].flip(0)

    return _after(inputs.locate_logits, swap)


@contextmanager
def _wrong_rank() -> Iterator[None]:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        gathered = gather_logprobs(*args, **kwargs)
        return replace(gathered, ranks=gathered.ranks + 1)

    with patch.object(logprobs, "gather_logprobs", faulty):
        yield


@contextmanager
def _temperature_of_another_row() -> Iterator[None]:
    settle = Narrowing.settle

    def faulty(self: Narrowing, logits: Tensor, logit_rows: Tensor) -> None:
        settle(self, logits, logit_rows.roll(1))

    with patch.object(Narrowing, "settle", faulty):
        yield


def _token_committed_twice() -> AbstractContextManager[object]:
    def again(arguments: dict[str, Any]) -> None:
        rows, positions = arguments["logit_rows"], arguments["positions"]
        last = arguments["token_table"].shape[1] - 1
        arguments["token_table"][rows, (positions + 1).clamp(max=last)] = arguments["drawn"].to(
            torch.int32
        )
        arguments["num_computed_tokens"][rows] += 1

    return _after(commit.commit_step, again)


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


@contextmanager
def _outputs_in_another_order() -> Iterator[None]:
    split = output._split

    def faulty(*args: Any) -> Any:
        return list(reversed(split(*args)))

    with patch.object(output, "_split", faulty):
        yield


def _penalties_one_step_late() -> AbstractContextManager[object]:
    return _one_token_late(penalties.penalise)


def _stops_held_one_step_longer() -> AbstractContextManager[object]:
    return _one_token_late(min_tokens.hold_stops)


def _bad_words_one_token_late() -> AbstractContextManager[object]:
    return _one_token_late(bad_words.mask_bad_words)


def _prompt_spared_by_repetition_penalty() -> AbstractContextManager[object]:
    def spare(arguments: dict[str, Any]) -> None:
        tokens = arguments["token_ids"].clone()
        for row, length in enumerate(arguments["prompt_len"].tolist()):
            tokens[row, :length] = -1
        arguments["token_ids"] = tokens

    return _before(penalties.penalise, spare)


def _bias_by_batch_position() -> AbstractContextManager[object]:
    def by_position(arguments: dict[str, Any]) -> None:
        rows: Tensor = arguments["logit_rows"]
        arguments["logit_rows"] = torch.arange(len(rows), dtype=rows.dtype)

    return _before(logit_bias.add_bias, by_position)


def _allowed_tokens_of_another_row() -> AbstractContextManager[object]:
    return _of_a_neighbour(allowed_tokens.allow_tokens)


def _top_p_one_token_short() -> AbstractContextManager[object]:
    def raise_cutoffs(arguments: dict[str, Any]) -> None:
        rows, cutoff = arguments["logit_rows"].long(), arguments["cutoff"]
        by = arguments["divisor"][rows].unsqueeze(1)
        divided = arguments["logits"] / torch.where(by == 0.0, 1.0, by)
        for row in torch.isfinite(cutoff[: len(divided)]).nonzero().flatten().tolist():
            kept = divided[row][divided[row] >= cutoff[row]].sort().values
            cutoff[row] = kept[min(1, len(kept) - 1)]

    return _after(top_k_top_p.cut_to_top, raise_cutoffs)


@contextmanager
def _cutoffs_of_another_row() -> Iterator[None]:
    settle = Narrowing.settle

    def faulty(self: Narrowing, logits: Tensor, logit_rows: Tensor) -> None:
        self.cutoff = self.cutoff[: len(logits)].flip(0)
        settle(self, logits, logit_rows)

    with patch.object(Narrowing, "settle", faulty):
        yield


def _min_p_ignored() -> AbstractContextManager[object]:
    return patch.object(min_p.MinP, "wants", lambda self, rows: False)


@contextmanager
def _logprobs_of_processed_logits() -> Iterator[None]:
    # A class attribute shadows nothing: each instance has its own, so its setting is intercepted.
    of_processed = property(lambda self: True, lambda self, value: None)
    with patch.object(SampledLogprobs, "of_processed", of_processed, create=True):
        yield


@contextmanager
def _prompt_logprobs_shifted() -> Iterator[None]:
    score_chunk = PromptLogprobs._score_chunk

    def faulty(
        self: PromptLogprobs, prompt: Any, scores: Any, row: int, first: int, logits: Tensor
    ) -> None:
        score_chunk(self, prompt, scores, row, first, logits.roll(1, dims=0))

    with patch.object(PromptLogprobs, "_score_chunk", faulty):
        yield


MUTANTS = (
    Mutant(
        id="stale-row",
        title="a row's blocks are not forgotten when its request leaves",
        case="lifecycle.abort_reuse",
        first="slots",
        apply=_stale_row,
    ),
    Mutant(
        id="off-by-one-position",
        title="every position of a step with prompt tokens is one too large",
        case="lifecycle.greedy",
        first="positions",
        apply=_off_by_one_position,
    ),
    Mutant(
        id="slot-from-wrong-block",
        title="slots point into the next block in steps with prompt tokens",
        case="lifecycle.greedy",
        first="slots",
        apply=_slot_from_wrong_block,
    ),
    Mutant(
        id="lost-staged-write",
        title="the first of a step's staged writes never reaches the device",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_lost_staged_write,
    ),
    Mutant(
        id="sequence-length-one-short",
        title="attention sees one token too few in steps with prompt tokens",
        case="lifecycle.greedy",
        first="seq_lens",
        apply=_sequence_length_one_short,
    ),
    Mutant(
        id="off-by-one-position-of-decodes",
        title="the position of a decode's token is one too large",
        case="lifecycle.greedy",
        first="positions",
        apply=_off_by_one_position_of_decodes,
    ),
    Mutant(
        id="sequence-length-of-decodes-one-short",
        title="attention sees one token too few in decodes",
        case="lifecycle.greedy",
        first="seq_lens",
        apply=_sequence_length_of_decodes_one_short,
    ),
    Mutant(
        id="decodes-draw-one-position-too-far",
        title="a decode's token is put one position behind its own",
        case="lifecycle.greedy",
        first="input_ids",
        apply=_decodes_draw_one_position_too_far,
    ),
    Mutant(
        id="slot-of-decodes-from-wrong-block",
        title="the slot of a decode's token points into the next block",
        case="lifecycle.greedy",
        first="slots",
        apply=_slot_of_decodes_from_wrong_block,
    ),
    Mutant(
        id="blocks-of-decodes-of-another-row",
        title="decodes are given a neighbour's blocks",
        case="lifecycle.greedy",
        first="slots",
        apply=_blocks_of_decodes_of_another_row,
    ),
    Mutant(
        id="swapped-logit-row",
        title="two requests get each other's logits in a step with prompt tokens",
        case="lifecycle.greedy",
        first="logits",
        apply=_swapped_logit_row,
    ),
    Mutant(
        id="wrong-rank",
        title="ranks count one token too many",
        case="logprobs.counts",
        first="ranks",
        apply=_wrong_rank,
    ),
    Mutant(
        id="temperature-of-another-row",
        title="logits are divided by a neighbour's temperature",
        case="sampling.temperature_seeded",
        first="processed_logits",
        apply=_temperature_of_another_row,
    ),
    Mutant(
        id="token-committed-twice",
        title="a drawn token is appended, and counted, twice",
        case="lifecycle.greedy",
        first="positions",
        apply=_token_committed_twice,
    ),
    Mutant(
        id="outputs-in-another-order",
        title="the tokens of a step are returned to other requests",
        case="lifecycle.greedy",
        first="tokens",
        apply=_outputs_in_another_order,
    ),
    Mutant(
        id="resumed-keeps-old-block",
        title="a resumed request reads the first block that it held before",
        case="lifecycle.preemption",
        first="slots",
        apply=_resumed_keeps_old_block,
    ),
    Mutant(
        id="penalties-one-step-late",
        title="the last output is not counted by penalties",
        case="sampling.presence_penalty",
        first="processed_logits",
        apply=_penalties_one_step_late,
    ),
    Mutant(
        id="prompt-spared-by-repetition-penalty",
        title="a repetition penalty counts outputs only",
        case="sampling.repetition_penalty",
        first="processed_logits",
        apply=_prompt_spared_by_repetition_penalty,
    ),
    Mutant(
        id="stops-held-one-step-longer",
        title="stop tokens are masked for one output too many",
        case="sampling.min_tokens",
        first="processed_logits",
        apply=_stops_held_one_step_longer,
    ),
    Mutant(
        id="bad-words-one-token-late",
        title="the beginning of a bad word is looked for one token early",
        case="sampling.bad_words",
        first="processed_logits",
        apply=_bad_words_one_token_late,
    ),
    Mutant(
        id="bias-by-batch-position",
        title="biases are looked up by batch position in place of the row",
        case="sampling.logit_bias",
        first="processed_logits",
        apply=_bias_by_batch_position,
    ),
    Mutant(
        id="allowed-tokens-of-another-row",
        title="a request is given the allowed tokens of a neighbour",
        case="sampling.allowed_tokens",
        first="processed_logits",
        apply=_allowed_tokens_of_another_row,
    ),
    Mutant(
        id="top-p-one-token-short",
        title="top-p leaves out the last token that it should keep",
        case="sampling.top_p",
        first="processed_logits",
        apply=_top_p_one_token_short,
    ),
    Mutant(
        id="cutoffs-of-another-row",
        title="logits are cut off where a neighbour's should be",
        case="sampling.top_k",
        first="processed_logits",
        apply=_cutoffs_of_another_row,
    ),
    Mutant(
        id="min-p-ignored",
        title="min-p is accepted and does nothing",
        case="sampling.min_p",
        first="processed_logits",
        apply=_min_p_ignored,
        verdict=Verdict.IGNORED,
    ),
    Mutant(
        id="logprobs-of-processed-logits",
        title="logprobs are those of the divided logits",
        case="logprobs.of_random_draws",
        first="logprobs",
        apply=_logprobs_of_processed_logits,
    ),
    Mutant(
        id="prompt-logprobs-shifted",
        title="each prompt token is scored by the logits of the one before",
        case="logprobs.of_prompts",
        first=OF_PROMPTS,
        apply=_prompt_logprobs_shifted,
    ),
)
