"""Compare one step of two runners, value by value along the chain.

Rows are aligned by request, because a runner may order its batch as it likes. Where a request draws
at random, two runners choose different tokens and both are right; then the candidate's logprobs and
rank are held against the reference's *logits* at the token that the candidate chose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from deepdiff import DeepDiff

from mrv2_diff.compare.right import (
    RightRows,
    Wanted,
    excused,
    row_sizes,
    same_logits,
    wanted_values,
)
from mrv2_diff.compare.tally import BLOCKS, HIDDEN, FloatArray, Place, Tally
from mrv2_diff.observation import Ints, Observation, ObservedLogprobs, token_index

OF_PROMPTS = "prompt_logprobs"
"""The value that `compare_prompt_logprobs` counts. Only cases that ask for it have it."""

Ledger = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What a case says about its requests."""

    greedy: frozenset[str]
    """Requests whose tokens must be equal."""
    num_logprobs: Mapping[str, int | None]
    """Logprobs that each request asked for; -1 for the whole vocabulary."""
    structured: frozenset[str] = frozenset()
    """Requests under a grammar, whose logits may be -inf."""
    logprobs_mode: str = "raw_logprobs"
    """What the engine returns as logprobs."""

    def without(self, req_ids: frozenset[str]) -> "Expectations":
        """Return the expectations with no logprobs of some requests."""
        if not req_ids:
            return self
        kept = {req_id: n for req_id, n in self.num_logprobs.items() if req_id not in req_ids}
        return replace(self, num_logprobs=kept)


def compare_step(
    tally: Tally,
    place: Place,
    expected: Expectations,
    reference: Observation,
    candidate: Observation,
    right: RightRows | None = None,
) -> None:
    """Add one step to a tally.

    Args:
        tally: Receives the comparison.
        place: Mode and step.
        expected: What the case says of its requests.
        reference: The reference's step.
        candidate: The candidate's.
        right: Says what rounding leaves open, and where the reference departs; None takes the
            reference at its word.
    """
    same_requests = sorted(reference.req_ids) == sorted(candidate.req_ids)
    others = f"requests {candidate.req_ids} in place of {reference.req_ids}"
    tally.structure("plan", place, len(reference.req_ids), [] if same_requests else [others])
    if not same_requests:
        return
    _compare_inputs(tally, place, reference, candidate)
    _compare_blocks(tally, place, reference, candidate)
    _compare_layers(tally, place, reference, candidate)
    compare_prompt_logprobs(tally, place, reference.prompt_logprobs, candidate.prompt_logprobs)
    if sorted(reference.draw_ids) != sorted(candidate.draw_ids):
        tally.structure(
            "output", place, 1, [f"draws of {candidate.draw_ids} in place of {reference.draw_ids}"]
        )
        return
    rows = np.array(
        [candidate.draw_ids.index(req_id) for req_id in reference.draw_ids], dtype=np.int64
    )
    if len(rows):
        _compare_draws(tally, place, expected, reference, candidate, rows, right)


def compare_prompt_logprobs(
    tally: Tally,
    place: Place,
    reference: Mapping[str, ObservedLogprobs],
    candidate: Mapping[str, ObservedLogprobs],
) -> None:
    """Compare the logprobs of prompts that a step returned: values, tokens, ranks, and whose.

    Where two of the likeliest are as good as equal, either may be listed, and first. A table
    without rows says what no table says: of a prompt's only token there is no logprob.
    """
    reference, candidate = _with_rows(reference), _with_rows(candidate)
    if sorted(reference) != sorted(candidate):
        wrong = f"prompt logprobs of {sorted(candidate)} in place of {sorted(reference)}"
        tally.structure(OF_PROMPTS, place, 0, [wrong])
        return
    for req_id, ours in reference.items():
        theirs = candidate[req_id]
        finite = np.abs(ours.values[np.isfinite(ours.values)])
        size = max(1.0, float(finite.max(initial=1.0)))
        tally.close(
            OF_PROMPTS,
            place,
            [req_id] * len(ours.values),
            ours.values.astype(np.float64),
            theirs.values.astype(np.float64),
            np.full(len(ours.values), size),
        )
        bound = tally.bound(OF_PROMPTS)
        if bound is None or theirs.values.shape != ours.values.shape:
            continue
        slack = bound * float(np.spacing(np.float32(size)))
        faults = [
            f"{req_id}, token {position + 1} of the prompt: {fault}"
            for position in range(len(ours.values))
            for fault in _row_faults(ours, theirs, position, slack)
        ]
        tally.structure(OF_PROMPTS, place, ours.token_ids.size + ours.ranks.size, faults)


def _with_rows(tables: Mapping[str, ObservedLogprobs]) -> dict[str, ObservedLogprobs]:
    return {req_id: table for req_id, table in tables.items() if len(table.ranks)}


def _row_faults(
    ours: ObservedLogprobs, theirs: ObservedLogprobs, row: int, slack: float
) -> list[str]:
    """Return what one row of a prompt's token ids and ranks gets wrong."""
    faults = []
    if int(ours.ranks[row]) != int(theirs.ranks[row]):
        faults.append(f"rank {theirs.ranks[row]} in place of {ours.ranks[row]}")
    wanted, given = ours.token_ids[row].tolist(), theirs.token_ids[row].tolist()
    known = dict(zip(wanted, ours.values[row].tolist(), strict=True))
    least = min(ours.values[row, 1:].tolist(), default=0.0)
    for token, value in zip(given[1:], theirs.values[row, 1:].tolist(), strict=True):
        if not abs(known.get(token, least) - value) <= slack and known.get(token, least) != value:
            faults.append(f"token {token} has {value} in place of {known.get(token)}")
    if given[0] != wanted[0] or len(set(given[1:])) != len(set(wanted[1:])):
        faults.append(f"token ids {given} in place of {wanted}")
    return faults


def compare_ledgers(tally: Tally, place: Place, reference: Ledger, candidate: Ledger) -> None:
    """Compare what two runners remember of their requests."""
    compared = sum(len(facts) for facts in reference.values())
    tally.structure(
        "ledger",
        place,
        compared,
        [] if reference == candidate else _differences(reference, candidate),
    )


def _compare_inputs(
    tally: Tally, place: Place, reference: Observation, candidate: Observation
) -> None:
    order = reference.req_ids
    requests = np.array([candidate.req_ids.index(req_id) for req_id in order])
    tally.exact("layout", place, order, reference.query_lens, candidate.query_lens[requests])
    index = token_index(candidate, order)
    owners = np.repeat(order, reference.query_lens).tolist()
    tally.exact("input_ids", place, owners, reference.input_ids, candidate.input_ids[index])
    tally.exact("positions", place, owners, reference.positions, candidate.positions[index])
    tally.exact("seq_lens", place, order, reference.seq_lens, candidate.seq_lens[requests])
    theirs = np.stack([slots[index] for slots in candidate.slots], axis=1)
    tally.exact("slots", place, owners, np.stack(reference.slots, axis=1), theirs)


def _compare_blocks(
    tally: Tally, place: Place, reference: Observation, candidate: Observation
) -> None:
    """Compare the blocks that attention reads, where both say which."""
    if not reference.blocks or not candidate.blocks:
        return
    order = reference.req_ids
    ours, theirs = (
        [np.concatenate(side.blocks[req_id]) for req_id in order] for side in (reference, candidate)
    )
    owners = np.repeat(order, [len(blocks) for blocks in ours]).tolist()
    tally.exact(BLOCKS, place, owners, np.concatenate(ours), np.concatenate(theirs))


def _compare_layers(
    tally: Tally, place: Place, reference: Observation, candidate: Observation
) -> None:
    """Compare hidden states layer by layer, where both were asked for them."""
    if not reference.layers or not candidate.layers:
        return
    if len(reference.layers) != len(candidate.layers):
        counts = f"{len(candidate.layers)} layers in place of {len(reference.layers)}"
        tally.structure(HIDDEN, place, 0, [counts])
        return
    index = token_index(candidate, reference.req_ids)
    owners = np.repeat(reference.req_ids, reference.query_lens).tolist()
    for number, (ours, theirs) in enumerate(zip(reference.layers, candidate.layers, strict=True)):
        values = ours.numpy().astype(np.float64)
        given = theirs.numpy()[index].astype(np.float64)
        tally.close(f"{HIDDEN}.{number}", place, owners, values, given, row_sizes(values))


def _compare_draws(
    tally: Tally,
    place: Place,
    expected: Expectations,
    reference: Observation,
    candidate: Observation,
    rows: Ints,
    right: RightRows | None,
) -> None:
    owners = reference.draw_ids
    outside = [int(token) for token in candidate.tokens if not 0 <= token < _vocab_size(reference)]
    if outside:
        tally.structure("tokens", place, 0, [f"tokens {outside} are outside the vocabulary"])
        return
    logits = reference.logits.numpy().astype(np.float64)
    tally.close(
        "logits",
        place,
        owners,
        logits,
        candidate.logits.numpy()[rows].astype(np.float64),
        row_sizes(logits),
    )
    same = same_logits(reference, candidate, rows)
    wanted = wanted_values(right, tally.bound("logits") or 0.0, reference, same)
    theirs = candidate.processed_logits.numpy()[rows].astype(np.float64)
    if theirs.shape == wanted.processed.shape:
        theirs = excused(wanted.undecided, wanted.processed, theirs)
        theirs[wanted.departed] = wanted.processed[wanted.departed]  # held against right ones alone
    tally.close("processed_logits", place, owners, wanted.processed, theirs, wanted.size)
    greedy = np.array(
        [index for index, owner in enumerate(owners) if owner in expected.greedy], dtype=np.int64
    )
    tally.not_finite += _num_not_finite(expected, owners, logits)
    tally.departed += len(wanted.logprobs_departed)
    tokens = _without_near_ties(tally, place, wanted, candidate.tokens[rows], greedy)
    tally.exact(
        "tokens",
        place,
        [owners[index] for index in greedy],
        wanted.tokens[greedy],
        tokens[greedy],
    )
    cut = _cut_tokens(candidate)
    if cut:  # a draw that is not compared is not counted either
        tally.structure("tokens", place, 0, cut)
    departed = frozenset(owners[row] for row in wanted.logprobs_departed)
    _compare_logprobs(tally, place, expected.without(departed), reference, candidate, rows)
    has, gives = _structure(expected, reference), _structure(expected, candidate)
    for (
        req_id
    ) in departed:  # the reference's are wrong; the candidate's are held against right ones
        has[req_id]["logprobs"] = gives[req_id]["logprobs"] = None
    differences = [] if has == gives else _differences(has, gives)
    tally.structure("output", place, sum(map(len, has.values())), differences)
    if not np.array_equal(candidate.tokens, candidate.drawn):
        wrong = f"returned {candidate.tokens.tolist()}, drew {candidate.drawn.tolist()}"
        tally.structure("output", place, 0, [wrong])


def _cut_tokens(observation: Observation) -> list[str]:
    """Name the draws of what a runner itself had cut, which no random draw may be, either."""
    processed, tokens = observation.processed_logits, torch.from_numpy(observation.tokens)
    if len(processed) != len(tokens) or int(tokens.max()) >= processed.shape[1]:
        return []  # their shape is another, which is said elsewhere
    drawn = processed.gather(1, tokens.unsqueeze(1)).squeeze(1)
    others = processed.amax(dim=1)
    wrong = (torch.isneginf(drawn) & torch.isfinite(others)).nonzero().flatten().tolist()
    return [
        f"{observation.draw_ids[row]} drew token {observation.tokens[row]}, which is cut"
        for row in wrong
    ]


def _num_not_finite(expected: Expectations, owners: list[str], logits: FloatArray) -> int:
    """Count the logits that say nothing: of a grammar's request, -inf only where all are."""
    wrong = ~np.isfinite(logits)
    for row, owner in enumerate(owners):
        if owner in expected.structured and not np.isneginf(logits[row]).all():
            wrong[row] &= ~np.isneginf(logits[row])
    return int(wrong.sum())


def _vocab_size(observation: Observation) -> int:
    return int(observation.logits.shape[1])


def _without_near_ties(
    tally: Tally, place: Place, wanted: Wanted, tokens: Ints, greedy: Ints
) -> Ints:
    """Return the candidate's tokens, those that lost by no more than rounding replaced."""
    bound = tally.bound("processed_logits")
    if bound is None:  # the reference beside itself, to measure: rounding may turn a token
        return wanted.tokens
    differing = greedy[wanted.tokens[greedy] != tokens[greedy]]
    if not len(differing):
        return tokens
    chosen, other = (differing, wanted.tokens[differing]), (differing, tokens[differing])
    with np.errstate(invalid="ignore"):  # two that are cut
        gaps = np.abs(wanted.processed[chosen] - wanted.processed[other])
    size = np.maximum(wanted.size[chosen], wanted.size[other])
    tied = differing[gaps <= bound * np.spacing(size.astype(np.float32))]
    tally.near_ties += len(tied)
    tally.stopped |= len(tied) > 0 and place.mode.startswith("free")
    tokens = tokens.copy()
    tokens[tied] = wanted.tokens[tied]
    return tokens


def _compare_logprobs(
    tally: Tally,
    place: Place,
    expected: Expectations,
    reference: Observation,
    candidate: Observation,
    rows: Ints,
) -> None:
    ours, theirs = reference.logprobs, candidate.logprobs
    if ours is None or theirs is None:
        return
    normalised = _values(reference, expected.logprobs_mode)
    vocab_size = normalised.shape[1]
    for row, owner in enumerate(reference.draw_ids):
        wanted = expected.num_logprobs.get(owner)
        if wanted is None:
            continue
        count = vocab_size if wanted == -1 else wanted
        token = int(candidate.tokens[rows[row]])
        same_token = token == int(reference.tokens[row])
        drawn = ours.values[row, 0] if same_token else normalised[row, token]
        expected_values = np.concatenate(([drawn], ours.values[row, 1 : 1 + count]))
        values = theirs.values[rows[row], : 1 + count]
        scale = row_sizes(reference.logits[row : row + 1].numpy().astype(np.float64))
        tally.close("logprobs", place, [owner], _row(expected_values), _row(values), scale)
        ids = theirs.token_ids[rows[row], : 1 + count]
        tally.exact("output", place, [owner], np.array([token]), ids[:1])
        # The token ids beside the values: each must carry, in the reference, the logprob that it
        # is listed with.
        known = (ids[1:] >= 0) & (ids[1:] < vocab_size)
        at_ids = np.concatenate(([drawn], normalised[row, np.where(known, ids[1:], 0)]))
        at_ids[1:][~known] = np.nan
        tally.close("logprobs", place, [owner], _row(at_ids), _row(values), scale)
        rank = int(ours.ranks[row])
        if not same_token:
            rank = int(np.sum(normalised[row] >= normalised[row, token]))
        given = int(theirs.ranks[rows[row]])
        same_logits = torch.equal(reference.logits[row], candidate.logits[rows[row]])
        if not same_logits and _rounds_to(tally, normalised[row], token, given, scale):
            rank = given
        tally.exact("ranks", place, [owner], np.array([rank]), np.array([given]))


def _values(observation: Observation, mode: str) -> npt.NDArray[np.float32]:
    """Return what a mode takes for logprobs, [num_draws, vocab_size]."""
    of_processed = mode.startswith("processed")
    logits = observation.processed_logits if of_processed else observation.logits
    values: npt.NDArray[np.float32] = (
        logits if mode.endswith("logits") else torch.log_softmax(logits, dim=-1)
    ).numpy()
    return values


def _rounds_to(
    tally: Tally, normalised: npt.NDArray[np.float32], token: int, rank: int, scale: FloatArray
) -> bool:
    """Say whether rounding within the bound can give a token this rank.

    Args:
        tally: Holds the bound of logprobs; none allows any rank.
        normalised: [vocab_size]. The reference's logprobs.
        token: The token.
        rank: Its rank by the candidate.
        scale: [1]. Size of the row's largest logit.
    """
    bound = tally.bound("logprobs")
    if bound is None:
        return True
    slack = bound * float(np.spacing(scale.astype(np.float32))[0])
    least = int(np.sum(normalised > normalised[token] + slack)) + 1
    return least <= rank <= int(np.sum(normalised >= normalised[token] - slack))


def _structure(expected: Expectations, observation: Observation) -> dict[str, dict[str, object]]:
    """Return what a step's output consists of, by request, without its values."""
    structure: dict[str, dict[str, object]] = {
        req_id: {"tokens": 0, "logprobs": None} for req_id in observation.req_ids
    }
    for row, owner in enumerate(observation.draw_ids):
        entry = structure.setdefault(owner, {"tokens": 0, "logprobs": None})
        entry["tokens"] = observation.draw_ids.count(owner)
        entry["logprobs"] = _num_distinct(observation, row, expected.num_logprobs.get(owner))
    return structure


def _num_distinct(observation: Observation, row: int, wanted: int | None) -> int | None:
    """Return how many different tokens a row of logprobs lists, of those that were asked for."""
    logprobs = observation.logprobs
    if logprobs is None or wanted is None:
        return None
    count = logprobs.token_ids.shape[1] - 1 if wanted == -1 else wanted
    return len(set(logprobs.token_ids[row, 1 : 1 + count].tolist()))


def _row(values: Any) -> FloatArray:
    row: FloatArray = np.asarray(values, dtype=np.float64)[None, :]
    return row


def _differences(reference: object, candidate: object) -> list[str]:
    difference = DeepDiff(reference, candidate, verbose_level=2)
    return [
        f"{kind}: {detail}" for kind, details in difference.items() for detail in _details(details)
    ]


def _details(details: Any) -> list[str]:
    if isinstance(details, Mapping):
        return [f"{path} = {change}" for path, change in details.items()]
    return [str(detail) for detail in details]
