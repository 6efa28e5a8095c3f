"""What one runner did in one step, in a form that two runners share.

Everything is copied out of the runner, so that later steps cannot change it, and keyed by request,
because runners are free to order their batches differently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLogprobs:
    """Log probabilities as a runner returned them, a row for each drawn token, or of a prompt."""

    token_ids: Ints
    """[num_rows, 1 + k]."""
    values: Floats
    """[num_rows, 1 + k]."""
    ranks: Ints
    """[num_rows]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One runner's step, in its own batch order."""

    req_ids: list[str]
    query_lens: Ints
    """[num_reqs]."""
    input_ids: Ints
    """[num_tokens]."""
    positions: Ints
    """[num_tokens]."""
    seq_lens: Ints
    """[num_reqs]."""
    slots: tuple[Ints, ...]
    """[num_tokens] for each KV group."""
    draw_ids: list[str]
    """Request of each drawn token."""
    logits: Tensor
    """[num_draws, vocab_size] float32, before any processing."""
    processed_logits: Tensor
    """[num_draws, vocab_size] float32, as drawn from."""
    tokens: Ints
    """[num_draws], the runner's own choice, as it returned it."""
    drawn: Ints
    """[num_draws], the runner's own choice, as its sampler made it."""
    logprobs: ObservedLogprobs | None
    prompt_logprobs: Mapping[str, ObservedLogprobs] = field(default_factory=dict)
    """Those that the step returned, by request: a row for each token of a prompt but the first."""
    blocks: Mapping[str, tuple[Ints, ...]] = field(default_factory=dict)
    """Blocks that attention reads for each request, by KV group; none where a subject does not say.
    """
    layers: tuple[Tensor, ...] = ()
    """[num_tokens, hidden_size] float32 behind each layer; none where they are not asked for."""


def merge(parts: Sequence[Observation]) -> Observation:
    """Join the observations of a step that was run in several parts.

    A request's tokens follow each other, its last length counts.
    """
    if len(parts) == 1:
        return parts[0]
    order = list(dict.fromkeys(req_id for part in parts for req_id in part.req_ids))
    whole = parts[0]
    for part in parts[1:]:
        whole = _concatenate(whole, part)
    index = token_index(whole, order)
    starts = _segments(whole)
    return replace(
        whole,
        req_ids=order,
        query_lens=np.array(
            [sum(end - start for start, end in starts[req_id]) for req_id in order]
        ),
        input_ids=whole.input_ids[index],
        positions=whole.positions[index],
        seq_lens=np.array([whole.seq_lens[_last(whole.req_ids, req_id)] for req_id in order]),
        slots=tuple(slots[index] for slots in whole.slots),
        layers=tuple(layer[torch.from_numpy(index)] for layer in whole.layers),
    )


def token_index(observation: Observation, order: Sequence[str]) -> Ints:
    """Return the token indices that list the requests' tokens in the given order."""
    segments = _segments(observation)
    ranges = [np.arange(start, end) for req_id in order for start, end in segments[req_id]]
    return np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)


def _segments(observation: Observation) -> dict[str, list[tuple[int, int]]]:
    segments: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for req_id, length in zip(observation.req_ids, observation.query_lens.tolist(), strict=True):
        segments.setdefault(req_id, []).append((start, start + length))
        start += length
    return segments


def _last(req_ids: Sequence[str], req_id: str) -> int:
    return len(req_ids) - 1 - req_ids[::-1].index(req_id)


def _concatenate(first: Observation, second: Observation) -> Observation:
    return Observation(
        req_ids=[*first.req_ids, *second.req_ids],
        query_lens=np.concatenate((first.query_lens, second.query_lens)),
        input_ids=np.concatenate((first.input_ids, second.input_ids)),
        positions=np.concatenate((first.positions, second.positions)),
        seq_lens=np.concatenate((first.seq_lens, second.seq_lens)),
        slots=tuple(np.concatenate(pair) for pair in zip(first.slots, second.slots, strict=True)),
        draw_ids=[*first.draw_ids, *second.draw_ids],
        logits=torch.cat((first.logits, second.logits)),
        processed_logits=torch.cat((first.processed_logits, second.processed_logits)),
        tokens=np.concatenate((first.tokens, second.tokens)),
        drawn=np.concatenate((first.drawn, second.drawn)),
        logprobs=_concatenate_logprobs(first, second),
        prompt_logprobs={**first.prompt_logprobs, **second.prompt_logprobs},
        blocks={**first.blocks, **second.blocks},
        layers=tuple(torch.cat(pair) for pair in zip(first.layers, second.layers, strict=True)),
    )


def _concatenate_logprobs(first: Observation, second: Observation) -> ObservedLogprobs | None:
    present = [part.logprobs for part in (first, second) if part.logprobs is not None]
    if not present:
        return None
    width = max(logprobs.token_ids.shape[1] for logprobs in present)
    padded = [_padded(part.logprobs, len(part.draw_ids), width) for part in (first, second)]
    return ObservedLogprobs(
        token_ids=np.concatenate([part.token_ids for part in padded]),
        values=np.concatenate([part.values for part in padded]),
        ranks=np.concatenate([part.ranks for part in padded]),
    )


def _padded(logprobs: ObservedLogprobs | None, num_draws: int, width: int) -> ObservedLogprobs:
    """Return a part's logprobs as wide as another part's; what it lacks is -1 and NaN."""
    token_ids = np.full((num_draws, width), -1, dtype=np.int64)
    values = np.full((num_draws, width), np.nan, dtype=np.float32)
    ranks = np.full(num_draws, -1, dtype=np.int64)
    if logprobs is not None:
        own = logprobs.token_ids.shape[1]
        token_ids[:, :own], values[:, :own], ranks[:] = (
            logprobs.token_ids,
            logprobs.values,
            logprobs.ranks,
        )
    return ObservedLogprobs(token_ids=token_ids, values=values, ranks=ranks)
