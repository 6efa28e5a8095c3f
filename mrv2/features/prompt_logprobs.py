"""Logprobs of a prompt's own tokens: what the model thought of each one, given those before it.

The hidden state at position j scores token j + 1. The tokens are read from the row on the device,
where a prompt never changes, at the positions that the step's layout names; so it does not matter
how a prompt is cut into steps, or whether positions run again. Within a step the rows are scored in
chunks, so that memory does not grow with the prompt. What was scored goes to the host at once, into
arrays of the prompt's length, which are handed out with the step that completes the prompt. Nothing
of it stays on the device.

Sampling parameters do not act on a prompt, so raw and processed values are the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrv2.batch.layout import BatchLayout
from mrv2.errors import ProtocolError
from mrv2.extension import ExtensionResources, StepExtension
from mrv2.output import Logprobs, Reader, host_logprobs
from mrv2.params import ALL_LOGPROBS
from mrv2.plan import Arrival, StepPlan
from mrv2.sampling.logprobs import gather_logprobs
from mrv2.step import Step

Int32 = npt.NDArray[np.int32]

PROMPT_LOGPROBS = "prompt_logprobs"
"""The extension's name."""

CHUNK_BYTES = 1 << 28
"""Bound on a chunk's logits and results, in the dtype of the hidden states. With half of it the
host is in the way: 39 ms for a prompt of 32,768 tokens and a vocabulary of 151,936, of which an
H200 needs about 23 (2026-11-29)."""
_BYTES_PER_COLUMN = 24
"""A token's id, its value, and what `torch.topk` makes to find them."""
_ROWS = 64
"""Chunks are multiples of this many rows where they can be: matrix units take rows in tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Values of a prompt's tokens in host memory, a row for each token but the first."""

    token_ids: Tensor
    """[prompt_len - 1, 1 + n] int32. The prompt's token, then the n likeliest."""
    values: Tensor
    """[prompt_len - 1, 1 + n] float32."""
    ranks: Tensor
    """[prompt_len - 1] int32. Rank of the prompt's token."""


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """A prompt whose logprobs are wanted and not handed out yet."""

    req_id: str
    num_logprobs: int
    num_wanted: int
    """Positions that score a token of the prompt: all but the last."""
    num_scored: int = 0
    """Positions scored so far, without a gap."""
    scores: PromptScores | None = None


class PromptLogprobs(StepExtension):
    """Which rows want logprobs of their prompts, and how far they are.

    A request that arrives with outputs had its prompt completed before, and gets nothing again. One
    that was preempted in the middle of its prompt starts over.

    Its output is a `Logprobs` for each request that asked and whose prompt the step completed, by
    id: a row for each token of the prompt but the first. They are given once.

    Args:
        resources: What it is built from.
    """

    name = PROMPT_LOGPROBS

    def __init__(self, resources: ExtensionResources) -> None:
        config = resources.config
        self._requests = resources.requests
        self._transfers = resources.transfers
        self._compute_logits = resources.model.compute_logits
        self._vocab_size = config.vocab_size
        self._normalises = config.logprobs_mode in ("raw_logprobs", "processed_logprobs")
        self._prompts: dict[int, _Prompt] = {}
        self._completed: dict[int, _Prompt] = {}
        """Those of the last step that was scored, until no error can end it any more."""

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request's wishes."""
        self.evict(row)
        count = arrival.sampling.num_prompt_logprobs
        if count is not None and len(arrival.token_ids) == arrival.prompt_len:
            self._prompts[row] = _Prompt(
                req_id=arrival.req_id,
                num_logprobs=self._vocab_size if count == ALL_LOGPROBS else count,
                num_wanted=arrival.prompt_len - 1,
            )

    def evict(self, row: int) -> None:
        """Forget a row."""
        self._prompts.pop(row, None)
        self._completed.pop(row, None)

    def check(self, plan: StepPlan) -> None:
        """Refuse a step that leaves positions of a prompt out, and change nothing.

        Raises:
            ProtocolError: Such positions would have no hidden states.
        """
        if not self._prompts:
            return
        starts = dict(zip(plan.scheduled.req_ids, plan.scheduled.num_computed_tokens, strict=True))
        for prompt in self._prompts.values():
            start = starts.get(prompt.req_id, 0)
            if start > prompt.num_scored and prompt.req_id not in plan.departed:
                raise ProtocolError(
                    f"request {prompt.req_id!r} wants logprobs of its prompt and goes on from "
                    f"position {start}; {prompt.num_scored} were run: leave none out"
                )

    def outputs(self, step: Step) -> Reader | None:
        """Score the step's prompt tokens; see `score`."""
        self._completed.clear()
        if not self._prompts:
            return None
        layout = step.layout
        completed = self.score(
            layout.rows,
            layout.num_computed_tokens,
            layout.query_start_loc,
            step.output.hidden,
            self._compute_logits,
        )
        return partial(_on_the_host, completed) if completed else None

    def give_up(self, layout: BatchLayout) -> None:
        """Take prompts that the step completed for unfinished: they run again."""
        self._prompts.update(self._completed)
        self._completed.clear()

    def score(
        self,
        rows: Int32,
        num_computed_tokens: Int32,
        query_start_loc: Int32,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> Mapping[str, PromptScores]:
        """Queue the scoring of the step's prompt tokens, and the copies to the host.

        No position of a prompt was left out, as `check` sees to.

        Args:
            rows: [num_reqs]. Batch position -> state row.
            num_computed_tokens: [num_reqs]. Tokens before this step's.
            query_start_loc: [num_reqs + 1]. First token of each request in the batch.
            hidden: [num_tokens, hidden_size]. The step's hidden states.
            compute_logits: Turns rows of them into logits.

        Returns:
            The scores of each request whose prompt the step completes, valid once an event that is
            recorded from now on has passed.
        """
        completed: dict[str, PromptScores] = {}
        if not self._prompts:
            return completed
        for index, row in enumerate(rows.tolist()):
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            offset, behind = query_start_loc[index : index + 2].tolist()
            start = int(num_computed_tokens[index])
            if prompt.scores is None:
                prompt.scores = self._empty(prompt.num_wanted, 1 + prompt.num_logprobs)
            stop = min(start + behind - offset, prompt.num_wanted)
            size = rows_per_chunk(hidden, self._vocab_size, 1 + prompt.num_logprobs)
            for first in range(start, stop, size):
                last = min(first + size, stop)
                part = hidden[offset + first - start : offset + last - start]
                self._score_chunk(prompt, prompt.scores, row, first, compute_logits(part))
            prompt.num_scored = max(stop, start)
            if start + behind - offset > prompt.num_wanted:
                completed[prompt.req_id] = prompt.scores
                self._completed[row] = self._prompts.pop(row)
        return completed

    def _score_chunk(
        self, prompt: _Prompt, scores: PromptScores, row: int, first: int, logits: Tensor
    ) -> None:
        """Score the tokens that follow `first` and the positions after it, one for each logits row.

        A function of its own: its tensors are freed before the next chunk's logits are made.
        """
        last = first + len(logits)
        targets = self._requests.token_ids.tensor[row, first + 1 : last + 1]
        made = gather_logprobs(logits, targets, prompt.num_logprobs, normalises=self._normalises)
        into = self._transfers.download_into
        into(scores.token_ids[first:last], made.token_ids)
        into(scores.values[first:last], made.values)
        into(scores.ranks[first:last], made.ranks)

    def _empty(self, num_rows: int, num_columns: int) -> PromptScores:
        host = self._transfers.host_array
        return PromptScores(
            token_ids=host((num_rows, num_columns), torch.int32),
            values=host((num_rows, num_columns), torch.float32),
            ranks=host((num_rows,), torch.int32),
        )


def _on_the_host(completed: Mapping[str, PromptScores]) -> dict[str, Logprobs]:
    return {
        req_id: host_logprobs(scores.token_ids, scores.values, scores.ranks)
        for req_id, scores in completed.items()
    }


def rows_per_chunk(hidden: Tensor, vocab_size: int, num_columns: int) -> int:
    """Return how many rows of hidden states are turned into logits and scored at once.

    Args:
        hidden: [num_tokens, hidden_size]. Logits are taken to be of its dtype.
        vocab_size: Width of the logits.
        num_columns: Tokens that are returned for each row.
    """
    row = vocab_size * hidden.element_size() + num_columns * _BYTES_PER_COLUMN
    size = max(1, CHUNK_BYTES // row)
    return size // _ROWS * _ROWS if size >= _ROWS else size


def score_unattached(
    hidden: Tensor, vocab_size: int, compute_logits: Callable[[Tensor], Tensor]
) -> None:
    """Score one chunk of a prompt that belongs to no request, to measure the peak.

    Args:
        hidden: [num_tokens, hidden_size]. As many hidden states as a step can hold.
        vocab_size: Width of the logits.
        compute_logits: Turns rows of them into logits.
    """
    logits = compute_logits(hidden[: rows_per_chunk(hidden, vocab_size, 1)])
    targets = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    gather_logprobs(logits, targets, 0)
