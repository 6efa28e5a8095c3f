"""Two engines' continuations of the same prompts, and where they part.

On a GPU two right runners may part: where two tokens are nearly as likely, the last bit of a
logit decides, and it depends on the batch that a matrix product happened to be in. So what matters
of a difference is the gap between the two tokens that the reference found likeliest there.
"""

from dataclasses import dataclass

from mrv2_diff.drivers.one_engine import Continuation, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first token in which one request's continuations differ; the later ones follow."""

    request: int
    position: int
    """Index in the continuation."""
    ours: int | None
    """Token id; None where the continuation has ended."""
    theirs: int | None
    gap: float | None
    """Logprob of the reference's likeliest token less that of its second; None without logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two outcomes agree."""

    num_requests: int
    num_tokens: int
    """Tokens compared: up to each request's divergence, that one included."""
    divergences: list[Divergence]
    num_logprobs: int
    """Logprobs compared: those of every token before the divergence."""
    largest_logprob_difference: float
    """0 where none was compared."""


def agreement(ours: Outcome, theirs: Outcome) -> Agreement:
    """Compare two outcomes of one job, `theirs` being the reference.

    Raises:
        ValueError: They continue different numbers of prompts.
    """
    pairs = list(zip(ours.continuations, theirs.continuations, strict=True))
    ends = [_first_difference(mine.token_ids, other.token_ids) for mine, other in pairs]
    found = [
        _divergence(request, end, *pair)
        for request, (end, pair) in enumerate(zip(ends, pairs, strict=True))
        if end is not None
    ]
    differences = [
        abs(left - right)
        for end, (mine, other) in zip(ends, pairs, strict=True)
        for mine_row, other_row in zip(mine.logprobs[:end], other.logprobs[:end], strict=True)
        for left, right in zip(mine_row, other_row, strict=True)
    ]
    return Agreement(
        num_requests=len(pairs),
        num_tokens=sum(
            len(other.token_ids) if end is None else end + 1
            for end, (_, other) in zip(ends, pairs, strict=True)
        ),
        divergences=found,
        num_logprobs=len(differences),
        largest_logprob_difference=max(differences, default=0.0),
    )


def _first_difference(ours: list[int], theirs: list[int]) -> int | None:
    for position, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _divergence(request: int, at: int, ours: Continuation, theirs: Continuation) -> Divergence:
    row = theirs.logprobs[at] if at < len(theirs.logprobs) else []
    return Divergence(
        request=request,
        position=at,
        ours=ours.token_ids[at] if at < len(ours.token_ids) else None,
        theirs=theirs.token_ids[at] if at < len(theirs.token_ids) else None,
        gap=row[1] - row[2] if len(row) > 2 else None,
    )
