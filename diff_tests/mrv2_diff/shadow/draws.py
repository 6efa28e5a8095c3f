"""Whether V1's token and logprobs are what mrv2 would have given, for one draw.

A greedy token must be the likeliest one. A random one cannot be compared with ours, since V1 draws
from another generator: it must be one that mrv2 could have drawn. Differences that rounding
explains are near ties; the bound is in spacings of the model's dtype at the logits' magnitude, and
what was needed is always said.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2_diff.shadow.messages import Done
from mrv2_diff.shadow.slices import Answered

SPACINGS = 16.0
"""Differences up to this many spacings are near ties. V1 differs from itself by up to 15 spacings
of float32 on the models that the noise floor was measured on, when its batch changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One draw of mrv2's, with V1's token committed."""

    req_id: str
    position: int
    """Of the drawn token in its request."""
    is_greedy: bool
    token_id: int
    """What mrv2 drew."""
    logits: Tensor
    """[vocab_size] float32, behind the grammar's mask and before all else."""
    processed: Tensor
    """[vocab_size] float32, what the token was drawn from."""
    logprobs: tuple[Sequence[int], Sequence[float]] | None
    """mrv2's token ids and values, those of its drawn token first; None where none were asked."""
    returns_raw: bool
    """Whether logprobs are those of the raw logits."""


def compare(draw: Draw, theirs: Answered, dtype: torch.dtype, done: Done) -> None:
    """Compare V1's answer with a draw, and add what differs to `done`."""
    unit = spacing(draw.logits, dtype)
    done.compared_tokens += 1
    finding = _token(draw, theirs.token_id, unit)
    if finding is not None:
        done.findings.append({**_who(draw, theirs.token_id), **finding})
    if theirs.logprobs is not None:
        _compare_logprobs(draw, theirs, unit, done)


def spacing(logits: Tensor, dtype: torch.dtype) -> float:
    """Return the distance between neighbouring numbers of a dtype at the logits' magnitude."""
    finite = logits[torch.isfinite(logits)]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    exponent = math.floor(math.log2(largest)) if largest > 0 else 0
    return float(torch.finfo(dtype).eps) * 2.0**exponent


def _token(draw: Draw, token_id: int, unit: float) -> dict[str, object] | None:
    if not 0 <= token_id < len(draw.logits):
        return {"kind": "token", "verdict": "mismatch", "reason": "V1's token is no token"}
    if draw.is_greedy:
        if token_id == draw.token_id:
            return None
        gap = float(draw.processed[draw.token_id] - draw.processed[token_id])
    else:
        if draw.processed[token_id] > -math.inf:
            return None
        gap = _gap_to_kept(draw, token_id)
    needed = abs(gap) / unit
    is_tie = gap >= 0 and needed <= SPACINGS
    return {
        "kind": "token" if draw.is_greedy else "left out",
        "verdict": "near tie" if is_tie else "mismatch",
        "spacings_needed": needed if math.isfinite(needed) else None,
        "spacings_allowed": SPACINGS,
    }


def _gap_to_kept(draw: Draw, token_id: int) -> float:
    """Return how far a token that cannot be drawn is below the least likely one that can be."""
    kept = draw.logits[draw.processed > -math.inf]
    return float(kept.min() - draw.logits[token_id]) if kept.numel() else math.inf


def _compare_logprobs(draw: Draw, theirs: Answered, unit: float, done: Done) -> None:
    """Compare each value that V1 returned with ours for the same token.

    Ours come from what mrv2 returned; where it did not return a token, from its raw logits.
    """
    assert theirs.logprobs is not None
    ours = dict(zip(*draw.logprobs, strict=True)) if draw.logprobs is not None else {}
    raw = torch.log_softmax(draw.logits, dim=-1) if draw.returns_raw else None
    worst, where, values = 0.0, -1, (0.0, 0.0)
    token_ids, values_of_v1 = (part.tolist() for part in theirs.logprobs)
    for token_id, value in zip(token_ids, values_of_v1, strict=True):
        mine = ours.get(token_id)
        if mine is None and raw is not None and 0 <= token_id < len(raw):
            mine = float(raw[token_id])
        if mine is None:
            continue
        done.compared_logprobs += 1
        apart = 0.0 if mine == value else abs(mine - value)
        if not apart <= worst:  # NaN is apart from everything
            worst, where, values = apart, token_id, (value, mine)
    needed = worst / unit
    if needed <= 2 * SPACINGS:  # a logit and the normaliser
        return
    done.findings.append(
        {
            **_who(draw, theirs.token_id),
            "kind": "logprobs",
            "verdict": "mismatch",
            "of_token": where,
            "v1": _plain(values[0]),
            "mrv2": _plain(values[1]),
            "spacings_needed": _plain(needed),
            "spacings_allowed": 2 * SPACINGS,
        }
    )


def _who(draw: Draw, token_id: int) -> dict[str, object]:
    logprobs = torch.log_softmax(draw.logits, dim=-1)
    known = 0 <= token_id < len(logprobs)
    return {
        "request": draw.req_id,
        "position": draw.position,
        "v1_token": token_id,
        "mrv2_token": draw.token_id,
        "logprob_of_v1_token": _plain(float(logprobs[token_id])) if known else None,
        "logprob_of_mrv2_token": _plain(float(logprobs[draw.token_id])),
        "rank_of_v1_token": int((logprobs >= logprobs[token_id]).sum()) if known else None,
    }


def _plain(value: float) -> float | str:
    """Return a number as JSON has it: infinities and NaN by name."""
    return value if math.isfinite(value) else str(value)
