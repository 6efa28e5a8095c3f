"""Faults of what a step gives back: logprobs, ranks, prompt logprobs, whose tokens are whose."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from mrv2.features import prompt_logprobs
from mrv2.features.prompt_logprobs import PromptLogprobs
from mrv2.output import PendingOutput
from mrv2.sampling import logprobs
from mrv2.sampling.logprobs import LogprobsTensors, SampledLogprobs, gather_logprobs
from mrv2_compat.vllm_v1 import runner as adapter
from mrv2_compat.vllm_v1.step.translate_out import BatchIndices
from mrv2_diff.compare.steps import OF_PROMPTS
from mrv2_diff.mutants.mutant import Arguments, Mutant, after, changed, of_a_neighbour

Context = AbstractContextManager[object]


def _outputs_in_another_order() -> Context:
    return changed(
        PendingOutput,
        "_token_ids",
        lambda token_ids: lambda self: list(reversed(token_ids(self))),
    )


def _requests_found_elsewhere() -> Context:
    def faulty(of: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
        def reversed_order(self: BatchIndices, batch_id: int, req_ids: list[str]) -> dict[str, int]:
            found = of(self, batch_id, req_ids)
            return {name: len(req_ids) - 1 - at for name, at in found.items()}

        return reversed_order

    return changed(BatchIndices, "of", faulty)


@contextmanager
def _outputs_of_the_last_step() -> Iterator[None]:
    last: dict[tuple[str, ...], Any] = {}

    def faulty(made: Callable[..., Any]) -> Callable[..., Any]:
        def late(ran: Any, *args: Any) -> Any:
            names = tuple(ran.req_ids)
            given = replace(ran, token_ids=last.get(names, ran.token_ids))
            last.clear()
            last[names] = ran.token_ids
            return made(given, *args)

        return late

    with changed(adapter, "model_runner_output", faulty):
        yield


def _gathered(fault: Callable[[LogprobsTensors], LogprobsTensors], where: Any) -> Context:
    """Let what was gathered of logits be something else, of draws or of prompts."""
    return patch.object(
        where, "gather_logprobs", lambda *args, **kwargs: fault(gather_logprobs(*args, **kwargs))
    )


def _wrong_rank() -> Context:
    return _gathered(lambda made: replace(made, ranks=made.ranks + 1), logprobs)


def _logprobs_of_a_neighbour() -> Context:
    return _gathered(lambda made: replace(made, values=made.values.flip(0)), logprobs)


def _likeliest_in_place_of_the_drawn() -> Context:
    def likeliest(made: LogprobsTensors) -> LogprobsTensors:
        values = made.values.clone()
        values[:, 0] = values.amax(dim=1)
        return replace(made, values=values)

    return _gathered(likeliest, logprobs)


def _likeliest_without_the_first() -> Context:
    def faulty(gather: Callable[..., LogprobsTensors]) -> Callable[..., LogprobsTensors]:
        def shifted(logits: Tensor, token_ids: Tensor, count: int, **kwargs: Any) -> Any:
            if count and count < logits.shape[1]:
                kwargs["num_columns"] = 2 + count
                made = gather(logits, token_ids, count + 1, **kwargs)
                keep = [0, *range(2, 2 + count)]
                return replace(
                    made,
                    token_ids=made.token_ids[:, keep].contiguous(),
                    values=made.values[:, keep].contiguous(),
                )
            return gather(logits, token_ids, count, **kwargs)

        return shifted

    return changed(logprobs, "gather_logprobs", faulty)


def _logits_for_logprobs() -> Context:
    def faulty(gather: Callable[..., LogprobsTensors]) -> Callable[..., LogprobsTensors]:
        def raw(*args: Any, **kwargs: Any) -> LogprobsTensors:
            return gather(*args, **{**kwargs, "normalises": False})

        return raw

    return changed(logprobs, "gather_logprobs", faulty)


@contextmanager
def _logprobs_of_processed_logits() -> Iterator[None]:
    # A class attribute shadows nothing: each instance has its own, so its setting is intercepted.
    of_processed = property(lambda self: True, lambda self, value: None)
    with patch.object(SampledLogprobs, "of_processed", of_processed, create=True):
        yield


@contextmanager
def _logprobs_of_raw_logits() -> Iterator[None]:
    of_processed = property(lambda self: False, lambda self, value: None)
    with patch.object(SampledLogprobs, "of_processed", of_processed, create=True):
        yield


def _lists_of_a_neighbour() -> Context:
    return of_a_neighbour(logprobs.list_columns)


def _lists_one_token_short() -> Context:
    def cut(arguments: Arguments) -> None:
        arguments["token_ids"][:, -1] = 0
        arguments["values"][:, -1] = -float("inf")

    return after(logprobs.list_columns, cut)


def _scoring(fault: Callable[..., tuple[Any, ...]]) -> Context:
    """Let a chunk of a prompt be scored from other arguments: row, first position, logits."""

    def faulty(score_chunk: Callable[..., None]) -> Callable[..., None]:
        def other(
            self: PromptLogprobs, prompt: Any, scores: Any, row: int, first: int, logits: Tensor
        ) -> None:
            score_chunk(self, prompt, scores, *fault(row, first, logits))

        return other

    return changed(PromptLogprobs, "_score_chunk", faulty)


def _prompt_logprobs_shifted() -> Context:
    return _scoring(lambda row, first, logits: (row, first, logits.roll(1, dims=0)))


def _prompt_logprobs_of_another_row() -> Context:
    return _scoring(lambda row, first, logits: (row ^ 1, first, logits))


def _first_of_each_chunk_not_scored() -> Context:
    return _scoring(lambda row, first, logits: (row, first + 1, logits[1:]))


def _prompt_logprobs_given_again() -> Context:
    def faulty(admit: Callable[..., None]) -> Callable[..., None]:
        def again(self: PromptLogprobs, row: int, arrival: Any) -> None:
            tokens = arrival.token_ids[: arrival.prompt_len]
            admit(self, row, replace(arrival, token_ids=tokens))

        return again

    return changed(PromptLogprobs, "admit", faulty)


def _prompt_ranks_count_from_zero() -> Context:
    return _gathered(lambda made: replace(made, ranks=made.ranks - 1), prompt_logprobs)


def _mutant(
    name: str, kind: str, title: str, case: str, apply: Callable[[], Context], first: str
) -> Mutant:
    return Mutant(id=name, kind=kind, title=title, case=case, first=first, apply=apply)


MUTANTS = (
    _mutant(
        "outputs-in-another-order",
        "order of outputs",
        "the tokens of a step are returned to other requests",
        "lifecycle.greedy",
        _outputs_in_another_order,
        "tokens",
    ),
    _mutant(
        "requests-found-elsewhere",
        "order of outputs",
        "the index of a request names another one's tokens",
        "lifecycle.greedy",
        _requests_found_elsewhere,
        "tokens",
    ),
    _mutant(
        "outputs-of-the-last-step",
        "order of outputs",
        "a step returns the tokens of the one before",
        "lifecycle.greedy",
        _outputs_of_the_last_step,
        "tokens",
    ),
    _mutant(
        "wrong-rank",
        "logprobs",
        "ranks count one token too many",
        "logprobs.counts",
        _wrong_rank,
        "ranks",
    ),
    _mutant(
        "logprobs-of-a-neighbour",
        "logprobs",
        "a request is given the logprobs of another one's draw",
        "logprobs.counts",
        _logprobs_of_a_neighbour,
        "logprobs",
    ),
    _mutant(
        "likeliest-in-place-of-the-drawn",
        "logprobs",
        "the drawn token is given the logprob of the likeliest",
        "logprobs.of_random_draws",
        _likeliest_in_place_of_the_drawn,
        "logprobs",
    ),
    _mutant(
        "likeliest-without-the-first",
        "logprobs",
        "the likeliest tokens begin with the second",
        "logprobs.counts",
        _likeliest_without_the_first,
        "logprobs",
    ),
    _mutant(
        "logits-for-logprobs",
        "logprobs",
        "logprobs are not normalised",
        "logprobs.counts",
        _logits_for_logprobs,
        "logprobs",
    ),
    _mutant(
        "logprobs-of-processed-logits",
        "logprobs modes",
        "logprobs are those of the divided logits",
        "logprobs.of_random_draws",
        _logprobs_of_processed_logits,
        "logprobs",
    ),
    _mutant(
        "logprobs-of-raw-logits",
        "logprobs modes",
        "logprobs are those of the raw logits where the processed ones are asked for",
        "logprobs.processed_logprobs",
        _logprobs_of_raw_logits,
        "logprobs",
    ),
    _mutant(
        "lists-of-a-neighbour",
        "logprobs",
        "a request is given the logprobs of the tokens that another one named",
        "logprobs.given_tokens",
        _lists_of_a_neighbour,
        "logprobs",
    ),
    _mutant(
        "lists-one-token-short",
        "logprobs",
        "the last of the tokens that the longest list names is left out",
        "logprobs.given_tokens",
        _lists_one_token_short,
        "logprobs",
    ),
    _mutant(
        "prompt-logprobs-shifted",
        "prompt logprobs",
        "each prompt token is scored by the logits of the one before",
        "logprobs.of_prompts",
        _prompt_logprobs_shifted,
        OF_PROMPTS,
    ),
    _mutant(
        "prompt-logprobs-of-another-row",
        "prompt logprobs",
        "a prompt is scored by the tokens of another row",
        "logprobs.of_prompts",
        _prompt_logprobs_of_another_row,
        OF_PROMPTS,
    ),
    _mutant(
        "first-of-each-chunk-not-scored",
        "prompt logprobs",
        "the first token of each chunk of a prompt is not scored",
        "logprobs.of_prompts",
        _first_of_each_chunk_not_scored,
        OF_PROMPTS,
    ),
    _mutant(
        "prompt-logprobs-given-again",
        "prompt logprobs",
        "a request that was preempted behind its prompt is given its prompt logprobs again",
        "logprobs.of_preempted_prompts",
        _prompt_logprobs_given_again,
        OF_PROMPTS,
    ),
    _mutant(
        "prompt-ranks-count-from-zero",
        "prompt logprobs",
        "ranks of a prompt's tokens count one too few",
        "logprobs.of_prompts",
        _prompt_ranks_count_from_zero,
        OF_PROMPTS,
    ),
)
