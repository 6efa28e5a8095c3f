"""Faults of what happens to logits: masks, biases, penalties, budgets, cuts, their order, draws."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from mrv2.sampling import (
    allowed_tokens,
    bad_words,
    columns,
    gumbel,
    logit_bias,
    min_p,
    min_tokens,
    penalties,
    temperature,
    thinking_budget,
    top_k_top_p,
)
from mrv2.sampling.grammar import GrammarMask
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.stage import StageFactory
from mrv2.sampling.stages import CUTTING, DIVIDING, PENALISING, RESHAPING
from mrv2_compat.vllm_v1 import runner as adapter
from mrv2_compat.vllm_v1.step import translate_in
from mrv2_diff.mutants.mutant import (
    Arguments,
    Mutant,
    after,
    before,
    by_batch_position,
    changed,
    late_by,
    of_a_neighbour,
)
from mrv2_diff.verdict import Verdict

Context = AbstractContextManager[object]


# Penalties.


def _penalties_one_step_late() -> Context:
    return late_by(penalties.penalise, 1)


def _prompt_spared_by_repetition_penalty() -> Context:
    def spare(arguments: Arguments) -> None:
        tokens = arguments["token_ids"].clone()
        for row, length in enumerate(arguments["prompt_len"].tolist()):
            tokens[row, :length] = -1
        arguments["token_ids"] = tokens

    return before(penalties.penalise, spare)


def _prompt_counted_by_presence() -> Context:
    def count(arguments: Arguments) -> None:
        arguments["prompt_len"] = torch.zeros_like(arguments["prompt_len"])

    return before(penalties.penalise, count)


def _frequency_is_presence() -> Context:
    def confuse(arguments: Arguments) -> None:
        arguments["presence"], arguments["frequency"] = (
            arguments["frequency"],
            arguments["presence"],
        )

    return before(penalties.penalise, confuse)


def _negative_logits_are_divided() -> Context:
    def faulty(apply: Callable[..., None]) -> Callable[..., None]:
        def always_divides(self: penalties.Penalties, logits: Tensor, view: Any) -> None:
            negative = logits < 0
            logits.abs_()
            apply(self, logits, view)
            logits.copy_(torch.where(negative, -logits, logits))

        return always_divides

    return changed(penalties.Penalties, "apply", faulty)


def _penalties_by_batch_position() -> Context:
    return by_batch_position(penalties.penalise)


# Masks and biases.


def _stops_held_one_step_longer() -> Context:
    return late_by(min_tokens.hold_stops, 1)


def _stops_let_go_one_step_early() -> Context:
    return late_by(min_tokens.hold_stops, -1)


def _least_number_counts_the_prompt() -> Context:
    return changed(
        min_tokens.MinTokens,
        "admit",
        lambda admit: lambda self, row, arrival: admit(self, row, replace(arrival, prompt_len=0)),
    )


def _end_of_sequence_is_no_stop() -> Context:
    def faulty(shaped: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def named(params: Any, vocab_size: int) -> dict[str, Any]:
            fields, listed = shaped(params, vocab_size), params.stop_token_ids or ()
            stops = tuple(i for i in fields["stop_token_ids"] if i in listed)
            return fields | {"stop_token_ids": stops}

        return named

    return changed(translate_in, "shaped", faulty)


def _bad_words_one_token_late() -> Context:
    return late_by(bad_words.mask_bad_words, 1)


def _bad_words_of_a_neighbour() -> Context:
    return of_a_neighbour(bad_words.mask_bad_words)


def _bad_words_begin_in_the_prompt() -> Context:
    def anywhere(arguments: Arguments) -> None:
        arguments["prompt_len"] = torch.zeros_like(arguments["prompt_len"])

    return before(bad_words.mask_bad_words, anywhere)


def _long_bad_words_ignored() -> Context:
    def faulty(encode: Callable[..., Any]) -> Callable[..., Any]:
        return lambda words: encode(tuple(word for word in words if len(word) == 1))

    return changed(bad_words, "encode", faulty)


def _bias_by_batch_position() -> Context:
    return by_batch_position(logit_bias.add_bias)


def _bias_in_place_of_the_logit() -> Context:
    def erase(arguments: Arguments) -> None:
        words, bounds = arguments["words"], arguments["bounds"]
        for index, row in enumerate(arguments["logit_rows"].tolist()):
            tokens = words[int(bounds[row]) : int(bounds[row + 1]) : 2].long()
            arguments["logits"][index, tokens] = 0.0

    return before(logit_bias.add_bias, erase)


def _allowed_tokens_of_another_row() -> Context:
    return of_a_neighbour(allowed_tokens.allow_tokens)


def _allowed_tokens_one_too_high() -> Context:
    def faulty(pack: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(token_ids: Sequence[int], vocab_size: int) -> Any:
            return pack([(token + 1) % vocab_size for token in token_ids], vocab_size)

        return shifted

    return changed(allowed_tokens, "pack", faulty)


# Thinking budgets and grammars.


def _budget_one_token_long() -> Context:
    def more(arguments: Arguments) -> None:
        budget = arguments["budget"]
        arguments["budget"] = torch.where(budget >= 0, budget + 1, budget)

    return before(thinking_budget.force_end, more)


def _end_begins_again_and_again() -> Context:
    def first_alone(arguments: Arguments) -> None:
        end = arguments["end"]
        arguments["end"] = end[:1].expand(len(end))

    return before(thinking_budget.force_end, first_alone)


def _masked_by(fault: Callable[[GrammarMask | None], GrammarMask | None]) -> Context:
    """Let a step's grammar mask be another than the translated one."""
    return changed(
        adapter, "grammar_mask", lambda translated: lambda *args: fault(translated(*args))
    )


def _grammars_ignored() -> Context:
    return _masked_by(lambda mask: None)


def _grammars_in_another_order() -> Context:
    def reverse(mask: GrammarMask | None) -> GrammarMask | None:
        return mask and replace(mask, bitmask=np.ascontiguousarray(mask.bitmask[::-1]))

    return _masked_by(reverse)


@contextmanager
def _grammars_one_step_old() -> Iterator[None]:
    last: dict[int, Any] = {}

    def old(mask: GrammarMask | None) -> GrammarMask | None:
        if mask is None:
            return None
        given = [last.get(row, own) for row, own in zip(mask.logit_idx, mask.bitmask, strict=True)]
        last.update(zip(mask.logit_idx.tolist(), mask.bitmask.copy(), strict=True))
        return replace(mask, bitmask=np.stack(given))

    with _masked_by(old):
        yield


def _last_tokens_escape_grammars() -> Context:
    def free(mask: GrammarMask | None) -> GrammarMask | None:
        if mask is None:
            return None
        bitmask = mask.bitmask.copy()
        bitmask[:, -1] = -1
        return replace(mask, bitmask=bitmask)

    return _masked_by(free)


# Cuts, and the order of it all.


@contextmanager
def _temperature_of_another_row() -> Iterator[None]:
    settle = Narrowing.settle

    def faulty(self: Narrowing, logits: Tensor, logit_rows: Tensor) -> None:
        settle(self, logits, logit_rows.roll(1))

    with patch.object(Narrowing, "settle", faulty):
        yield


def _temperature_ignored() -> Context:
    return patch.object(temperature.Temperature, "wants", lambda self, rows: False)


def _low_temperatures_are_greedy() -> Context:
    return patch.object(columns, "GREEDY_BELOW", 0.02)


def _top_p_one_token_short() -> Context:
    def raise_cutoffs(arguments: Arguments) -> None:
        rows, cutoff = arguments["logit_rows"].long(), arguments["cutoff"]
        by = arguments["divisor"][rows].unsqueeze(1)
        divided = arguments["logits"] / torch.where(by == 0.0, 1.0, by)
        for row in torch.isfinite(cutoff[: len(divided)]).nonzero().flatten().tolist():
            kept = divided[row][divided[row] >= cutoff[row]].sort().values
            cutoff[row] = kept[min(1, len(kept) - 1)]

    return after(top_k_top_p.cut_to_top, raise_cutoffs)


def _top_k_one_token_more() -> Context:
    def more(arguments: Arguments) -> None:
        top_k = arguments["top_k"]
        arguments["top_k"] = torch.where(top_k > 0, top_k + 1, top_k)

    return before(top_k_top_p.cut_to_top, more)


def _top_p_of_all_tokens() -> Context:
    """Top-p is worked out over the vocabulary, not over what top-k leaves."""

    def apart(reference: Callable[..., None]) -> Callable[..., None]:
        def faulty(
            cutoff: Tensor,
            logits: Tensor,
            logit_rows: Tensor,
            temperature: Tensor,
            divisor: Tensor,
            top_k: Tensor,
            top_p: Tensor,
        ) -> None:
            shared = (logits, logit_rows, temperature, divisor)
            other = cutoff.clone()
            reference(cutoff, *shared, top_k, torch.ones_like(top_p))
            reference(other, *shared, torch.zeros_like(top_k), top_p)
            torch.maximum(cutoff, other, out=cutoff)

        return faulty

    return changed(top_k_top_p.cut_to_top, "reference", apart)


@contextmanager
def _cutoffs_of_another_row() -> Iterator[None]:
    settle = Narrowing.settle

    def faulty(self: Narrowing, logits: Tensor, logit_rows: Tensor) -> None:
        self.cutoff = self.cutoff[: len(logits)].flip(0)
        settle(self, logits, logit_rows)

    with patch.object(Narrowing, "settle", faulty):
        yield


def _min_p_ignored() -> Context:
    return patch.object(min_p.MinP, "wants", lambda self, rows: False)


def _min_p_of_the_sum() -> Context:
    """Min-p is a part of all probability, not of the likeliest token's."""

    def lower(arguments: Arguments) -> None:
        rows = arguments["logit_rows"].long()
        divisor = arguments["divisor"][rows].unsqueeze(1)
        divided = arguments["logits"].float() / torch.where(divisor == 0.0, 1.0, divisor)
        by = divided.logsumexp(dim=1) - divided.amax(dim=1)
        arguments["cutoff"][: len(rows)].add_(by)

    return after(min_p.cut_by_min_p, lower)


def _in_order(order: Sequence[StageFactory]) -> Context:
    """Let the stages act in another order."""
    return patch.object(adapter, "stages_with", lambda reshaping, narrowing: tuple(order))


def _biases_after_penalties() -> Context:
    return _in_order((*PENALISING, *RESHAPING, *DIVIDING, *CUTTING))


def _cuts_before_the_temperature() -> Context:
    return _in_order((*RESHAPING, *PENALISING, *CUTTING, *DIVIDING))


def _penalties_after_the_temperature() -> Context:
    return _in_order((*RESHAPING, *DIVIDING, *PENALISING, *CUTTING))


# Draws.


def _greedy_requests_draw_at_random() -> Context:
    def heat(arguments: Arguments) -> None:
        arguments["temperature"] = torch.ones_like(arguments["temperature"])

    return before(gumbel.draw, heat)


def _last_of_equals_wins() -> Context:
    def last(arguments: Arguments) -> None:
        logits, rows = arguments["logits"], arguments["logit_rows"].long()
        greedy = (arguments["temperature"][rows] == 0.0).nonzero().flatten()
        largest = logits[greedy] == logits[greedy].amax(dim=1, keepdim=True)
        vocabulary = torch.arange(logits.shape[1])
        arguments["token_ids"][greedy] = (largest * vocabulary).amax(dim=1)

    return after(gumbel.draw, last)


def _what_is_cut_is_drawn() -> Context:
    def least(arguments: Arguments) -> None:
        rows = arguments["logit_rows"].long()
        random = (arguments["temperature"][rows] != 0.0).nonzero().flatten()
        arguments["token_ids"][random] = arguments["logits"][random].argmin(dim=1)

    return after(gumbel.draw, least)


def _a_token_outside_the_vocabulary() -> Context:
    def outside(arguments: Arguments) -> None:
        arguments["token_ids"][-1] = arguments["logits"].shape[1]

    return after(gumbel.draw, outside)


def _mutant(
    name: str,
    kind: str,
    title: str,
    case: str,
    apply: Callable[[], Context],
    first: str | None = "processed_logits",
    verdict: Verdict = Verdict.WRONG_VALUE,
) -> Mutant:
    return Mutant(
        id=name,
        kind=kind,
        title=title,
        case=f"sampling.{case}",
        first=first,
        apply=apply,
        verdict=verdict,
    )


MUTANTS = (
    _mutant(
        "penalties-one-step-late",
        "penalties",
        "the last output is not counted by penalties",
        "presence_penalty",
        _penalties_one_step_late,
    ),
    _mutant(
        "prompt-spared-by-repetition-penalty",
        "penalties",
        "a repetition penalty counts outputs only",
        "repetition_penalty",
        _prompt_spared_by_repetition_penalty,
    ),
    _mutant(
        "prompt-counted-by-presence",
        "penalties",
        "presence penalties count the prompt",
        "presence_penalty",
        _prompt_counted_by_presence,
    ),
    _mutant(
        "frequency-is-presence",
        "penalties",
        "a frequency penalty acts once on a token, however often it was drawn",
        "frequency_penalty",
        _frequency_is_presence,
    ),
    _mutant(
        "negative-logits-are-divided",
        "penalties",
        "a repetition penalty divides negative logits, too",
        "repetition_penalty",
        _negative_logits_are_divided,
    ),
    _mutant(
        "penalties-by-batch-position",
        "penalties",
        "penalties and counts are looked up by batch position in place of the row",
        "frequency_penalty",
        _penalties_by_batch_position,
    ),
    _mutant(
        "stops-held-one-step-longer",
        "min tokens",
        "stop tokens are masked for one output too many",
        "min_tokens",
        _stops_held_one_step_longer,
    ),
    _mutant(
        "stops-let-go-one-step-early",
        "min tokens",
        "stop tokens are masked for one output too few",
        "min_tokens",
        _stops_let_go_one_step_early,
    ),
    _mutant(
        "least-number-counts-the-prompt",
        "min tokens",
        "the prompt counts to the least number of tokens",
        "min_tokens",
        _least_number_counts_the_prompt,
    ),
    _mutant(
        "end-of-sequence-is-no-stop",
        "min tokens",
        "only the user's stop tokens are masked, and not the end of the sequence",
        "min_tokens",
        _end_of_sequence_is_no_stop,
    ),
    _mutant(
        "bad-words-one-token-late",
        "bad words",
        "the beginning of a bad word is looked for one token early",
        "bad_words",
        _bad_words_one_token_late,
    ),
    _mutant(
        "bad-words-of-a-neighbour",
        "bad words",
        "a request's bad words act on another one",
        "bad_words",
        _bad_words_of_a_neighbour,
    ),
    _mutant(
        "bad-words-begin-in-the-prompt",
        "bad words",
        "the beginning of a bad word is found in the prompt as well",
        "bad_words",
        _bad_words_begin_in_the_prompt,
    ),
    _mutant(
        "long-bad-words-ignored",
        "bad words",
        "bad words of several tokens are accepted and do nothing",
        "bad_words",
        _long_bad_words_ignored,
    ),
    _mutant(
        "bias-by-batch-position",
        "logit bias",
        "biases are looked up by batch position in place of the row",
        "logit_bias",
        _bias_by_batch_position,
    ),
    _mutant(
        "bias-in-place-of-the-logit",
        "logit bias",
        "a bias replaces the logit that it should be added to",
        "logit_bias",
        _bias_in_place_of_the_logit,
    ),
    _mutant(
        "allowed-tokens-of-another-row",
        "allowed tokens",
        "a request is given the allowed tokens of a neighbour",
        "allowed_tokens",
        _allowed_tokens_of_another_row,
    ),
    _mutant(
        "allowed-tokens-one-too-high",
        "allowed tokens",
        "each allowed token allows the next one in its place",
        "allowed_tokens",
        _allowed_tokens_one_too_high,
    ),
    _mutant(
        "budget-one-token-long",
        "thinking budget",
        "a thinking section may have one token more than its budget",
        "thinking_budget",
        _budget_one_token_long,
    ),
    _mutant(
        "end-begins-again-and-again",
        "thinking budget",
        "of an end marker of two tokens, only the first is ever forced",
        "thinking_budget",
        _end_begins_again_and_again,
    ),
    _mutant(
        "grammars-ignored",
        "grammars",
        "a grammar is accepted and masks nothing",
        "structured",
        _grammars_ignored,
        first="logits",
    ),
    _mutant(
        "grammars-in-another-order",
        "grammars",
        "masks are handed to requests in the scheduler's order backwards",
        "structured",
        _grammars_in_another_order,
        first="logits",
    ),
    _mutant(
        "grammars-one-step-old",
        "grammars",
        "a request is masked by what its place of the batch was allowed in the last step",
        "structured",
        _grammars_one_step_old,
        first="logits",
    ),
    _mutant(
        "last-tokens-escape-grammars",
        "grammars",
        "the last word of a mask, which is not full, allows everything",
        "structured",
        _last_tokens_escape_grammars,
        first="logits",
    ),
    _mutant(
        "temperature-of-another-row",
        "temperature",
        "logits are divided by a neighbour's temperature",
        "temperature_seeded",
        _temperature_of_another_row,
    ),
    _mutant(
        "temperature-ignored",
        "temperature",
        "a temperature is accepted and divides nothing",
        "temperature_seeded",
        _temperature_ignored,
        verdict=Verdict.IGNORED,
    ),
    _mutant(
        "low-temperatures-are-greedy",
        "temperature",
        "the least temperature is taken for none",
        "temperature_beside_greedy",
        _low_temperatures_are_greedy,
    ),
    _mutant(
        "top-p-one-token-short",
        "top-k and top-p",
        "top-p leaves out the last token that it should keep",
        "top_p",
        _top_p_one_token_short,
    ),
    _mutant(
        "top-k-one-token-more",
        "top-k and top-p",
        "top-k keeps one token too many",
        "top_k",
        _top_k_one_token_more,
    ),
    _mutant(
        "top-p-of-all-tokens",
        "top-k and top-p",
        "top-p is worked out beside top-k, not over what it leaves",
        "pairs",
        _top_p_of_all_tokens,
    ),
    _mutant(
        "cutoffs-of-another-row",
        "top-k and top-p",
        "logits are cut off where a neighbour's should be",
        "top_k",
        _cutoffs_of_another_row,
    ),
    _mutant(
        "min-p-ignored",
        "min-p",
        "min-p is accepted and does nothing",
        "min_p",
        _min_p_ignored,
        verdict=Verdict.IGNORED,
    ),
    _mutant(
        "min-p-of-the-sum",
        "min-p",
        "min-p is a part of all probability, not of the likeliest token's",
        "min_p",
        _min_p_of_the_sum,
    ),
    _mutant(
        "biases-after-penalties",
        "order of stages",
        "penalties act before masks and biases",
        "pairs",
        _biases_after_penalties,
    ),
    _mutant(
        "cuts-before-the-temperature",
        "order of stages",
        "top-k and top-p act on logits that are not divided yet",
        "pairs",
        _cuts_before_the_temperature,
    ),
    _mutant(
        "penalties-after-the-temperature",
        "order of stages",
        "penalties act on logits that are divided already",
        "pairs",
        _penalties_after_the_temperature,
    ),
    _mutant(
        "greedy-requests-draw-at-random",
        "draws",
        "a greedy request is drawn with noise",
        "temperature_beside_greedy",
        _greedy_requests_draw_at_random,
        first="tokens",
    ),
    _mutant(
        "last-of-equals-wins",
        "draws",
        "of equal logits a greedy request takes the last",
        "ties",
        _last_of_equals_wins,
        first=None,
    ),
    _mutant(
        "what-is-cut-is-drawn",
        "draws",
        "a random request is given a token that was cut",
        "top_k",
        _what_is_cut_is_drawn,
        first="tokens",
    ),
    _mutant(
        "a-token-outside-the-vocabulary",
        "draws",
        "a draw returns the size of the vocabulary",
        "temperature_beside_greedy",
        _a_token_outside_the_vocabulary,
        first="tokens",
    ),
)
