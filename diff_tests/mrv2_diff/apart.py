"""Run a case in engines of their own, each in its process, and compare their tokens.

This is for what a lockstep run cannot show: a reference that crashes would take the engine and the
candidate down with it, and a feature that only the reference has has no candidate. Three engines
run the same requests: the reference as the case has it, the candidate, and one whose tokens are
right because it does without what goes wrong.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mrv2_diff.case import Add, Apart, Case, Variant
from mrv2_diff.drivers.one_engine import OURS, Job, Outcome, run_job
from mrv2_diff.record import Agreement
from mrv2_diff.referee import Referee, TokenRuling, rule_tokens
from mrv2_diff.verdict import Divergence, Verdict

MODE = "apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one engine did: an outcome, or why there is none."""

    outcome: Outcome | None
    error: str | None = None
    """End of the program's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the three engines of a case did, and what it comes to."""

    verdict: Verdict
    summary: str
    tokens: Agreement
    """The candidate's against the right ones."""
    events: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    first: Divergence | None = None
    error: str | None = None


def run_apart(
    case: Case,
    model: Path,
    device: str = "cpu",
    graphs: str = "none",
    referee: Referee | None = None,
) -> Findings:
    """Run a case's three engines, two at a time, and judge what they did.

    Args:
        case: The case.
        model: Folder of the checkpoint.
        device: `cpu` or `cuda`.
        graphs: How steps may reach the device; with any, ours must have replayed decodes.
        referee: Says whose tokens are right where V1's and the candidate's part; None is not asked.
    """
    apart = case.apart
    assert apart is not None
    variants = (apart.reference, apart.candidate, apart.right)
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [_job(case, variant, model, device, graphs) for variant in variants]
        found = list(pool.map(_run, jobs, [variant.runner for variant in variants]))
    ours = found[1].outcome
    if graphs != "none" and ours is not None and not ours.steps_by_mode.get("decode"):
        return Findings(
            verdict=Verdict.MISSING,
            summary=f"no decode was replayed from a graph; steps: {ours.steps_by_mode}",
            tokens=_NOTHING,
        )
    findings = judge_apart(case, *found)
    theirs = found[0].outcome
    if referee is None or theirs is None or ours is None:
        return findings
    ruling = rule_tokens(parted(case, theirs, ours), referee.logits, referee.rounded)
    return with_ruling(findings, ruling, referee.dtype)


def parted(
    case: Case, reference: Outcome, candidate: Outcome
) -> list[tuple[tuple[int, ...], int, int]]:
    """Return where two engines' greedy tokens part: the tokens before, then the next of each."""
    found = []
    for index, add in enumerate(case.workload()):
        if not isinstance(add, Add) or add.temperature != 0.0:
            continue
        ours = reference.continuations[index].token_ids
        theirs = candidate.continuations[index].token_ids
        for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                found.append(((*add.prompt, *ours[:place]), one, other))
                break
    return found


def with_ruling(findings: Findings, ruling: TokenRuling, dtype: str) -> Findings:
    """Return findings with what the referee says; it can take a verdict back, not give one.

    Args:
        findings: By the engine whose tokens are right.
        ruling: On the tokens on which reference and candidate part.
        dtype: Of the referee.
    """
    if not ruling.requests:
        return findings
    verdict, summary = findings.verdict, f"{findings.summary}; {ruling.sentence(dtype)}"
    if verdict is Verdict.REFERENCE_WRONG and ruling.candidate != ruling.requests:
        verdict = Verdict.INCONCLUSIVE
    return replace(findings, verdict=verdict, summary=summary)


_NOTHING = Agreement(
    compared=0, differing=0, max_abs_diff=0.0, required_tolerance=0.0, policy="exact"
)


def judge_apart(case: Case, reference: Found, candidate: Found, right: Found) -> Findings:
    """Return the verdict on a case, from what its three engines did."""
    apart = case.apart
    assert apart is not None
    if candidate.outcome is None:
        summary = f"the candidate failed: {_last_line(candidate.error)}"
        return Findings(
            verdict=Verdict.CRASHED, summary=summary, tokens=_NOTHING, error=candidate.error
        )
    if right.outcome is None:
        summary = f"the engine with the right tokens failed: {_last_line(right.error)}"
        return Findings(
            verdict=Verdict.INCONCLUSIVE, summary=summary, tokens=_NOTHING, error=right.error
        )
    wrong = _wrong_runner(apart, candidate.outcome, right.outcome)
    if wrong is not None:
        return Findings(verdict=Verdict.INCONCLUSIVE, summary=wrong, tokens=_NOTHING)
    requests = _comparable(case, apart.candidate, apart.right)
    tokens, first = _compare(case, requests, candidate.outcome, right.outcome)
    verdict, summary = (
        (Verdict.WRONG_VALUE, f"{first.req_id} differs at token {first.index}")
        if first is not None
        else _of_reference(case, apart, reference, right.outcome)
    )
    if not tokens.compared:
        verdict, summary = Verdict.MISSING, "no token was compared"
    return Findings(
        verdict=verdict,
        summary=summary,
        tokens=tokens,
        events={"arrivals": len(case.workload()), "preemptions": candidate.outcome.preemptions},
        steps=candidate.outcome.steps,
        first=first,
        error=reference.error,
    )


def _of_reference(
    case: Case, apart: Apart, reference: Found, right: Outcome
) -> tuple[Verdict, str]:
    """Return the verdict where the candidate is right."""
    if apart.raises is not None:
        if reference.outcome is not None:
            return Verdict.MISSING, (
                f"V1 was expected to raise {apart.raises!r} and did not; "
                "compare this case in lockstep"
            )
        if apart.raises not in (reference.error or ""):
            return Verdict.INCONCLUSIVE, f"V1 failed otherwise: {_last_line(reference.error)}"
        return Verdict.REFERENCE_CRASHED, f"V1 raises {apart.raises!r}; {apart.why}"
    if reference.outcome is None:
        return Verdict.INCONCLUSIVE, f"V1 failed: {_last_line(reference.error)}"
    requests = _comparable(case, apart.reference, apart.right)
    tokens, first = _compare(case, requests, reference.outcome, right)
    if first is None:
        return Verdict.MISSING, f"V1 was expected to be wrong and is not; {apart.why}"
    return Verdict.REFERENCE_WRONG, (
        f"{tokens.differing} of V1's {tokens.compared} tokens are wrong; {apart.why}"
    )


def _wrong_runner(apart: Apart, candidate: Outcome, right: Outcome) -> str | None:
    """Return what ran where something else was asked for."""
    for variant, outcome in ((apart.candidate, candidate), (apart.right, right)):
        if (outcome.runner_class == OURS) != (variant.runner == "mrv2"):
            return f"{outcome.runner_class} ran in place of {variant.runner}"
    return None


def _comparable(case: Case, first: Variant, second: Variant) -> list[int]:
    """Return the requests whose tokens two engines must agree on.

    Random ones draw from another generator in another runner, and in V1 whenever what is drawn
    beside them changes.
    """
    adds = [event for event in case.workload() if isinstance(event, Add)]
    ours = first.runner == second.runner == "mrv2"
    return [index for index, add in enumerate(adds) if ours or add.temperature == 0.0]


def _compare(
    case: Case, requests: list[int], given: Outcome, right: Outcome
) -> tuple[Agreement, Divergence | None]:
    adds = [event for event in case.workload() if isinstance(event, Add)]
    compared = differing = 0
    first: Divergence | None = None
    for index in requests:
        theirs, wanted = given.continuations[index].token_ids, right.continuations[index].token_ids
        compared += max(len(theirs), len(wanted))
        places = [
            place
            for place in range(max(len(theirs), len(wanted)))
            if theirs[place : place + 1] != wanted[place : place + 1]
        ]
        differing += len(places)
        if places and first is None:
            place = places[0]
            first = Divergence(
                mode=MODE,
                step=place,
                value="tokens",
                req_id=adds[index].req_id,
                index=place,
                reference=str(wanted[place : place + 1]),
                candidate=str(theirs[place : place + 1]),
                policy="exact",
            )
    agreement = Agreement(
        compared=compared,
        differing=differing,
        max_abs_diff=0.0,
        required_tolerance=0.0,
        policy="exact",
    )
    return agreement, first


def _run(job: Job, runner: str) -> Found:
    try:
        return Found(outcome=run_job(job, runner))
    except RuntimeError as error:
        return Found(outcome=None, error=str(error))


def _job(case: Case, variant: Variant, model: Path, device: str, graphs: str) -> Job:
    adds: list[Any] = list(case.workload())
    if any(not isinstance(event, Add) or event.step for event in adds):
        raise ValueError(f"{case.id} runs apart; its requests must all arrive at step 0")
    engine = case.engine.arguments(device, graphs) | _mutable(dict(variant.engine))
    del engine["skip_tokenizer_init"]
    return Job(
        model=str(model),
        engine=engine,
        tokenizer=case.engine.tokenizer,
        prompts=[list(add.prompt) for add in adds],
        max_tokens=[add.max_tokens for add in adds],
        logprobs=[add.logprobs for add in adds],
        options=[
            {"temperature": add.temperature, "seed": add.seed} | _mutable(add.further)
            for add in adds
        ],
    )


def _mutable(values: dict[str, object]) -> dict[str, Any]:
    return {
        name: dict(value) if isinstance(value, tuple) and name.endswith("config") else value
        for name, value in values.items()
    }


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else "no output"
