"""Hold a runner's values against those that `right_values` computes, request by request.

It keeps each request's tokens, so that a step's rows can be processed again from the logits that
the runner itself saw. It notes which parameters had an effect: one that was accepted and never
changed a logit was ignored, whether or not two runners agree on it. And where a case expects the
reference to be wrong, this is what shows it, row by row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrv2_diff.case import Add, Departure, Event
from mrv2_diff.compare.tally import FloatArray, Place, Tally
from mrv2_diff.observation import Ints, Observation
from mrv2_diff.right_values import (
    History,
    Markers,
    Parameters,
    Processed,
    log_softmax,
    processed_logits,
)

BOUND = 4.0
"""Largest difference of a processed logit or a logprob from its right value, in spacings at the
logit's size. Each step of the processing rounds once, a repetition penalty twice where it
multiplies by a reciprocal; a logprob also has the rounding of its normalizer."""

VALUE = "right_values"
"""Name of the comparison in a record."""


@dataclass(slots=True)
class Effects:
    """Which parameters could have changed a logit, and whose logits they changed."""

    possible: set[str] = field(default_factory=set)
    seen: dict[str, set[str]] = field(
        default_factory=lambda: {"reference": set(), "candidate": set()}
    )
    """By side."""

    def ignored(self) -> dict[str, list[str]]:
        """Return the parameters that had no effect though they could, by side."""
        missing = {side: sorted(self.possible - seen) for side, seen in self.seen.items()}
        return {side: names for side, names in missing.items() if names}


@dataclass(slots=True, kw_only=True)
class RightRows:
    """The right values of a pass: parameters and tokens of its requests."""

    parameters: Mapping[str, Parameters | None]
    """By request; None for one whose parameters `right_values` does not know."""
    logprobs: Mapping[str, "WantedLogprobs"] = field(default_factory=dict)
    """Of the requests that asked for any."""
    logprobs_mode: str = "raw_logprobs"
    effects: Effects = field(default_factory=Effects)
    departure: Departure | None = None
    spares_weightless: bool = True
    """Whether the candidate keeps what has no probability in float32; V1 may cut it."""
    histories: dict[str, History] = field(default_factory=dict)
    markers: Markers | None = None

    def arrive(self, req_id: str, prompt: Sequence[int], stop_token_ids: Iterable[int]) -> None:
        """Begin a request's tokens."""
        self.histories[req_id] = History(
            prompt=tuple(prompt), stop_token_ids=frozenset(stop_token_ids), markers=self.markers
        )

    def commit(self, reference: Observation) -> None:
        """Add the tokens of a step, those that the engine goes on with."""
        for req_id, token in zip(reference.draw_ids, reference.tokens.tolist(), strict=True):
            self.histories[req_id].outputs.append(token)

    def row(self, req_id: str, logits: npt.NDArray[Any], noise: float) -> Processed | None:
        """Return the right processed logits of a request's next token, from a runner's logits."""
        parameters = self.parameters[req_id]
        if parameters is None:
            return None
        return processed_logits(logits, parameters, self.histories[req_id], noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLogprobs:
    """The logprobs that a request asked for."""

    count: int
    """Likeliest tokens; -1 for the whole vocabulary."""
    token_ids: tuple[int, ...] | None = None
    """Given tokens, in place of the likeliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a step's draws are compared with: the reference's values, where those are right."""

    processed: FloatArray
    """[num_draws, vocab_size]."""
    size: FloatArray
    """[num_draws, vocab_size]. Where differences of the processed logits are measured."""
    undecided: npt.NDArray[np.bool_]
    """[num_draws, vocab_size]. Tokens that rounding keeps or cuts."""
    tokens: Ints
    """[num_draws]. The likeliest token where the reference departs, else its own."""
    departed: Ints
    """Rows in which the reference departs from the right processed logits."""
    logprobs_departed: Ints
    """Rows in which its logprobs do, or follow from processed logits that do."""


def parameters_of(events: Iterable[Event]) -> dict[str, Parameters | None]:
    """Return the parameters of a workload's requests.

    Raises:
        ValueError: Two requests share an id and differ in their parameters.
    """
    found: dict[str, Parameters | None] = {}
    for event in events:
        if not isinstance(event, Add):
            continue
        parameters = Parameters.of(event.temperature, event.further)
        if found.setdefault(event.req_id, parameters) != parameters:
            raise ValueError(f"two requests are called {event.req_id!r} and ask for other things")
    return found


def logprobs_of(events: Iterable[Event]) -> dict[str, WantedLogprobs]:
    """Return the logprobs that a workload's requests ask for, by request."""
    wanted = {}
    for event in events:
        if not isinstance(event, Add):
            continue
        token_ids: Any = event.further.get("logprob_token_ids")
        if event.logprobs is not None or token_ids is not None:
            count = event.logprobs if token_ids is None else len(token_ids)
            assert count is not None
            wanted[event.req_id] = WantedLogprobs(count=count, token_ids=token_ids)
    return wanted


def wanted_values(
    right: RightRows | None, noise: float, reference: Observation, same: npt.NDArray[np.bool_]
) -> Wanted:
    """Return what a step's draws are compared with.

    Args:
        right: None takes the reference at its word.
        noise: How far two runners' logits may be apart, in spacings.
        reference: The reference's step.
        same: [num_draws]. Whether the candidate has the very same logits.
    """
    processed = reference.processed_logits.numpy().astype(np.float64)
    size = np.repeat(row_sizes(processed)[:, None], processed.shape[1], axis=1)
    undecided = np.zeros(processed.shape, dtype=np.bool_)
    tokens, departed, following = reference.tokens.copy(), [], []
    for row, req_id in enumerate(reference.draw_ids if right is not None else ()):
        assert right is not None
        expected = right.row(req_id, reference.logits[row].numpy(), 0.0 if same[row] else noise)
        if expected is None:
            continue
        size[row], undecided[row] = expected.size, expected.undecided
        undecided[row] |= np.isneginf(processed[row]) & expected.weightless
        departs = right.departure
        if departs is None:
            continue
        if departs.value == "processed_logits" and _departs(expected, processed[row]):
            processed[row], tokens[row] = expected.values, int(expected.values.argmax())
            departed.append(row)
        if row in departed or (
            departs.value == "logprobs" and _logprob_faults(right, req_id, reference, row)
        ):
            following.append(row)
    return Wanted(
        processed=processed,
        size=size,
        undecided=undecided,
        tokens=tokens,
        departed=np.array(departed, dtype=np.int64),
        logprobs_departed=np.array(following, dtype=np.int64),
    )


def compare_right(
    tally: Tally, place: Place, right: RightRows, side: str, observation: Observation
) -> None:
    """Hold one runner's draws against their right values, and note what had an effect.

    Args:
        tally: Receives the comparison as `right_values`, for the candidate only.
        place: Mode and step.
        right: Parameters and tokens of the requests.
        side: `reference` or `candidate`.
        observation: The runner's step.
    """
    processed = observation.processed_logits.numpy().astype(np.float64)
    for row, req_id in enumerate(observation.draw_ids):
        logits = observation.logits[row].numpy()
        if not np.isfinite(logits).all():
            continue  # counted apart; nothing follows from such a row
        expected = right.row(req_id, logits, 0.0)
        if expected is None:
            _note_unknown(right, side, req_id, logits, processed[row])
            continue
        if side == "candidate":
            undecided = expected.undecided
            if not right.spares_weightless:
                undecided = undecided | expected.weightless
            given = excused(undecided, expected.values, processed[row])
            tally.close(
                VALUE, place, [req_id], expected.values[None], given[None], expected.size[None]
            )
            if req_id in right.logprobs:
                faults = _logprob_faults(right, req_id, observation, row)
                policy = "present" if observation.logprobs is None else "right logprobs"
                named = [f"logprobs of {req_id}: {fault}" for fault in faults]
                tally.structure(VALUE, place, 1, named, policy)
        _note_effects(right, side, req_id, logits, processed[row])


def excused(undecided: npt.NDArray[np.bool_], wanted: FloatArray, given: FloatArray) -> FloatArray:
    """Return given logits, with those that rounding may keep or cut put as wanted."""
    return np.where(undecided & (np.isneginf(wanted) != np.isneginf(given)), wanted, given)


def _far(expected: Processed, given: FloatArray, bound: float = BOUND) -> bool:
    """Say whether a row of processed logits is another than the right one."""
    given = excused(expected.undecided, expected.values, given)
    cut = np.isneginf(expected.values) != np.isneginf(given)
    spacing = np.spacing(expected.size.astype(np.float32))
    with np.errstate(invalid="ignore"):
        apart = np.abs(expected.values - given) > bound * spacing
    return bool((cut | apart).any())


def _departs(expected: Processed, given: FloatArray) -> bool:
    """Say whether the reference's row is wrong: it may cut what nobody draws."""
    return _far(expected, excused(expected.weightless, expected.values, given))


def _logprob_faults(right: RightRows, req_id: str, observation: Observation, row: int) -> list[str]:
    """Return what is wrong of a draw's logprobs, from the runner's own logits."""
    wanted, given = right.logprobs.get(req_id), observation.logprobs
    if wanted is None:
        return []
    if given is None:
        return ["there are none"]
    of_processed = right.logprobs_mode.startswith("processed")
    source = (observation.processed_logits if of_processed else observation.logits)[row].numpy()
    values = source if right.logprobs_mode.endswith("logits") else log_softmax(source)
    values = values.astype(np.float64)
    count = len(values) if wanted.count == -1 else wanted.count
    ids, own = given.token_ids[row, : 1 + count], given.values[row, : 1 + count]
    token = int(observation.tokens[row])
    if len(ids) != 1 + count or ids[0] != token or ids.min() < 0 or ids.max() >= len(values):
        return [f"token ids {ids.tolist()} for a draw of {token}"]
    slack = BOUND * float(np.spacing(np.float32(row_sizes(source[None])[0])))
    faults = []
    if wanted.token_ids is not None and tuple(ids[1:].tolist()) != wanted.token_ids:
        faults.append(f"token ids {ids[1:].tolist()} in place of {list(wanted.token_ids)}")
    if wanted.token_ids is None and count:
        top = np.sort(values)[::-1][:count]
        if len(set(ids[1:].tolist())) != count or not _near(values[ids[1:]], top, slack):
            faults.append(f"token ids {ids[1:].tolist()} are not the {count} likeliest")
    if not _near(values[ids], own, slack):
        faults.append(f"{own.tolist()} in place of {values[ids].tolist()}")
    rank = int(given.ranks[row])
    least = int(np.sum(values > values[token] + slack)) + 1
    if not least <= rank <= int(np.sum(values >= values[token] - slack)):
        faults.append(f"rank {rank} in place of {least}")
    return faults


def _near(wanted: FloatArray, given: npt.NDArray[Any], slack: float) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(((wanted == given) | (np.abs(wanted - given) <= slack)).all())


def row_sizes(logits: FloatArray) -> FloatArray:
    """Return the size of each row's largest finite logit, at least 1, [num_rows]."""
    finite = np.where(np.isfinite(logits), np.abs(logits), 0.0)
    largest: FloatArray = np.maximum(finite.max(axis=1), 1.0)
    return largest


def _note_unknown(
    right: RightRows, side: str, req_id: str, logits: FloatArray, given: FloatArray
) -> None:
    name = f"other parameters of {req_id}"
    right.effects.possible.add(name)
    if not np.array_equal(logits, given):
        right.effects.seen[side].add(name)


def _note_effects(
    right: RightRows, side: str, req_id: str, logits: FloatArray, given: FloatArray
) -> None:
    parameters, history = right.parameters[req_id], right.histories[req_id]
    assert parameters is not None
    seen = right.effects.seen[side]
    for name in parameters.in_use:
        if name in seen:
            continue
        without = processed_logits(logits, parameters.without(name), history, 0.0)
        if _far(without, processed_logits(logits, parameters, history, 0.0).values, 2.0 * BOUND):
            right.effects.possible.add(name)
            if _far(without, given, 2.0 * BOUND):
                seen.add(name)


def same_logits(reference: Observation, candidate: Observation, rows: Ints) -> Any:
    """Return for each draw whether two runners have the very same logits, [num_draws]."""
    return np.array(
        [
            torch.equal(reference.logits[row], candidate.logits[other])
            for row, other in enumerate(rows.tolist())
        ],
        dtype=np.bool_,
    )
