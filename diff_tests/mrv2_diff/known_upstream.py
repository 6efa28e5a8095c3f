"""Where vLLM's own V2 runner is known to leave what V1 and ours agree on.

A difference is one of these only where it is in the case and value that are named here, and where
the right value, computed apart from all runners, is the reference's and not V2's. A case that is
named and does not show its difference does not pass.
"""

from dataclasses import dataclass

from mrv2_diff.compare.right import VALUE
from mrv2_diff.judge import Outcome
from mrv2_diff.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One such difference."""

    value: str
    """First value of the chain that differs."""
    why: str


KNOWN = {
    "sampling.thinking_detours": Known(
        value="processed_logits",
        why="vllm-v2 counts a thinking budget from the latest start marker, V1 and mrv2 from the "
        "first one of the section (decision 0025)",
    ),
}
"""By case."""


def judged(case_id: str, outcome: Outcome, verdict: Verdict, summary: str) -> tuple[Verdict, str]:
    """Return the verdict on a case in which V2 is the candidate, with what is known of V2.

    Args:
        case_id: The case.
        outcome: What its passes found.
        verdict: Without this knowledge.
        summary: Likewise.
    """
    known = KNOWN.get(case_id)
    if known is None:
        return verdict, summary
    first, right = outcome.tally.first, outcome.tally.totals.get(VALUE)
    if first is None:
        if not verdict.passes:
            return verdict, summary
        return Verdict.MISSING, f"nothing was seen of a known difference: {known.why}"
    is_known = first.value == known.value and right is not None and right.differing > 0
    if verdict is not Verdict.WRONG_VALUE or not is_known:
        return verdict, summary
    return Verdict.KNOWN_DIFFERENCE, f"{summary}; {known.why}"
