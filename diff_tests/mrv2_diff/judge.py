"""From what a case's passes found to a verdict.

No runner and no vLLM here, so that every way to judge can be tested by hand.
"""

from dataclasses import dataclass, field

from mrv2_diff.case import Add, Case, Event
from mrv2_diff.compare import right as right_rows
from mrv2_diff.compare.right import Effects, RightRows, compare_right
from mrv2_diff.compare.steps import OF_PROMPTS, Expectations, compare_ledgers, compare_step
from mrv2_diff.compare.tally import HIDDEN, Place, Tally
from mrv2_diff.observation import Observation
from mrv2_diff.record import Cost, Latency, Memory
from mrv2_diff.referee import Ruling
from mrv2_diff.verdict import Divergence, Verdict

_ALWAYS = (
    "plan",
    "layout",
    "input_ids",
    "positions",
    "seq_lens",
    "slots",
    "logits",
    "processed_logits",
    "output",
    "ledger",
)
"""Values that every case compares; none at all is a failure."""

_FLOATS = frozenset({"logits", "processed_logits", "logprobs"})
"""Values of which nothing can be said where the noise is too large or V1's are not finite. So are
hidden states."""

MAX_NEAR_TIES = 0.01
"""Most tokens that may be near ties, of those that were compared. More are no accident."""

MAX_FLOOR = {"float32": 64.0, "tf32": 8.0, "bfloat16": 8.0, "float16": 8.0}
"""Largest noise floor that a verdict may rest on, in units of the arithmetic's epsilon at the row's
largest logit. Seen: 16 in float32, 1 in bfloat16 (tiny models on an AMD EPYC, 2026-11-29). TF32 is
float32 whose matrices are multiplied with the fraction of float16."""
_EPSILON_BITS = {"float32": 23, "tf32": 10, "bfloat16": 7, "float16": 10}

Ledgers = tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]


@dataclass(slots=True)
class Outcome:
    """What a case's passes found."""

    tally: Tally
    modes: list[str] = field(default_factory=list)
    """Comparing passes, in the order in which they ran."""
    draws_compared: dict[str, int] = field(default_factory=dict)
    """Drawn tokens whose logits were compared, by mode."""
    steps: int = 0
    request_steps: int = 0
    """Sum over compared steps of the requests scheduled in them."""
    events: dict[str, int] = field(default_factory=dict)
    graphs: str = "none"
    """One of `GRAPHS` of a case. With any, both runners must have replayed decodes."""
    steps_by_mode: dict[str, dict[str, int]] = field(default_factory=dict)
    """Steps of the comparing passes by runner and by how they reached the device."""
    logit_diffs: list[float] = field(default_factory=list)
    effects: Effects = field(default_factory=Effects)
    crash: str | None = None
    inconclusive: str | None = None
    """Why nothing can be said."""
    reference: str = "V1"
    """What sentences call the reference."""
    ruling: Ruling | None = None
    """What the referee says of the rows on which the two disagree, where it was asked."""
    memory: dict[str, Memory] = field(default_factory=dict)
    latency: dict[str, Latency] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)


def judge(case: Case, outcome: Outcome) -> tuple[Verdict, str]:
    """Return the verdict on a case and one sentence about it.

    Where the referee was asked and clears the candidate in every row of logits in dispute, and
    nothing before the logits differs, it is the reference that is wrong.
    """
    verdict, summary = _judge(case, outcome)
    ruling, first = outcome.ruling, outcome.tally.first
    if ruling is None or first is None:
        return verdict, summary
    is_models = first.value == "logits" or _is_hidden(first)
    if is_models and verdict is Verdict.WRONG_VALUE and ruling.clears_candidate:
        verdict = Verdict.REFERENCE_WRONG
    return verdict, f"{summary}; {ruling.sentence(outcome.reference)}"


def _judge(case: Case, outcome: Outcome) -> tuple[Verdict, str]:
    first = outcome.tally.first
    ignored = outcome.effects.ignored()
    if ignored and (first is None or first.value in ("processed_logits", right_rows.VALUE)):
        return Verdict.IGNORED, _ignored(ignored, outcome.reference)
    if (
        first is not None and first.value not in _FLOATS and not _is_hidden(first)
    ):  # a crash that follows is a consequence
        return _fault(first, outcome.reference)
    if first is None and outcome.crash is not None:
        return Verdict.CRASHED, f"the candidate failed: {outcome.crash.strip().splitlines()[-1]}"
    if outcome.inconclusive is not None:
        return Verdict.INCONCLUSIVE, outcome.inconclusive
    if outcome.tally.not_finite:
        return Verdict.INCONCLUSIVE, (
            f"{outcome.tally.not_finite} of {outcome.reference}'s logits are not finite"
        )
    if first is not None:
        return _fault(first, outcome.reference)
    absent = _absent(case, outcome)
    if absent:
        return Verdict.MISSING, f"nothing was compared of: {', '.join(absent)}"
    return _agreement(case, outcome.tally, outcome.request_steps)


def _agreement(case: Case, tally: Tally, request_steps: int) -> tuple[Verdict, str]:
    """Return the verdict where nothing is wrong of the candidate."""
    tokens = tally.totals["tokens"].compared if "tokens" in tally.totals else 0
    if tally.near_ties > MAX_NEAR_TIES * tokens:
        return Verdict.WRONG_VALUE, (
            f"{tally.near_ties} of {tokens} tokens differ where two logits lie within the floor; "
            f"at most {MAX_NEAR_TIES:.0%} may"
        )
    if case.departure is not None and (tally.departed or case.departure.is_certain):
        rows = f"{tally.departed} rows of {case.departure.value}"
        return case.departure.verdict, f"in {rows} only V1 is off its right value: " + (
            case.departure.why
        )
    if tally.near_ties:
        return Verdict.NEAR_TIE, (
            f"{tally.near_ties} of {tokens} tokens differ where two logits lie within the floor"
        )
    total = sum(item.compared for item in tally.totals.values())
    return Verdict.MATCH, f"{total} values agree over {request_steps} request-steps"


def _is_hidden(first: Divergence) -> bool:
    return first.value.startswith(HIDDEN)


def _ignored(ignored: dict[str, list[str]], reference: str) -> str:
    names = {"reference": reference, "candidate": "the candidate"}
    parts = [f"{', '.join(what)} in {names[side]}" for side, what in ignored.items()]
    return f"no logit was changed by {'; '.join(parts)}"


def _fault(first: Divergence, reference: str) -> tuple[Verdict, str]:
    verdicts = {"same shape": Verdict.WRONG_SHAPE, "present": Verdict.MISSING}
    return verdicts.get(first.policy, Verdict.WRONG_VALUE), _sentence(first, reference)


def add_step(
    outcome: Outcome,
    place: Place,
    expected: Expectations,
    reference: Observation | None,
    candidate: Observation | None,
    right: RightRows | None = None,
) -> None:
    """Add one step's observations to an outcome; a step that only one side has is a divergence.

    Args:
        outcome: Receives the comparison.
        place: Mode and step.
        expected: What the case says of its requests.
        reference: None for a step without tokens.
        candidate: None for a step without tokens, or if the candidate returned nothing.
        right: The right values of the pass, with the tokens before this step; receives its tokens.
            None compares the two with each other only.
    """
    if outcome.tally.stopped or (reference is None and candidate is None):
        return
    if reference is None or candidate is None:
        who = outcome.reference if candidate is None else "the candidate"
        outcome.tally.missing(place, f"only {who} ran this step")
        return
    compare_step(outcome.tally, place, expected, reference, candidate, right)
    if right is not None and sorted(reference.draw_ids) == sorted(candidate.draw_ids):
        compare_right(outcome.tally, place, right, "reference", reference)
        compare_right(outcome.tally, place, right, "candidate", candidate)
    outcome.request_steps += len(reference.req_ids)
    outcome.logit_diffs.append(outcome.tally.step_logit_diff)
    counts = outcome.draws_compared
    counts[place.mode] = counts.get(place.mode, 0) + len(reference.draw_ids)


def add_ledgers(outcome: Outcome, place: Place, ledgers: Ledgers | None) -> None:
    """Add what both runners remember of their requests, unless a near tie ended the comparison."""
    if ledgers is not None and not outcome.tally.stopped:
        compare_ledgers(outcome.tally, place, *ledgers)


def floor_fault(floor: dict[str, float], arithmetic: str) -> str | None:
    """Return why a noise floor is too high to judge by; None if it is not.

    Args:
        floor: Spacings of float32, by value.
        arithmetic: Of the model: its dtype, or `tf32`. One that is not in `MAX_FLOOR` has no bound
            and cannot be judged.
    """
    if arithmetic not in MAX_FLOOR:
        return (
            f"there is no bound on the noise of dtype {arithmetic}; "
            "run float32, bfloat16 or float16"
        )
    limit = MAX_FLOOR[arithmetic] * 2 ** (_EPSILON_BITS["float32"] - _EPSILON_BITS[arithmetic])
    for value, spacings in floor.items():
        if not spacings <= limit:
            return (
                f"V1 differs from itself by {spacings:g} spacings in {value}; "
                f"{limit:g} is the most that a verdict in {arithmetic} may rest on"
            )
    return None


def right_values_of(case: Case, effects: Effects) -> RightRows | None:
    """Return the right values of a pass over a case; None where no parameter changes a logit.

    Args:
        case: The case.
        effects: Receives which parameters had one.
    """
    events = case.workload()
    parameters = right_rows.parameters_of(events)
    logprobs = right_rows.logprobs_of(events)
    if not logprobs and all(each is not None and not each.in_use for each in parameters.values()):
        return None
    return RightRows(
        parameters=parameters,
        logprobs=logprobs,
        logprobs_mode=case.engine.logprobs_mode,
        effects=effects,
        departure=case.departure,
    )


def expectations(events: tuple[Event, ...], logprobs_mode: str = "raw_logprobs") -> Expectations:
    """Return what a workload says about its requests, on an engine with this mode."""
    adds = [event for event in events if isinstance(event, Add)]
    wanted = right_rows.logprobs_of(adds)
    return Expectations(
        greedy=frozenset(event.req_id for event in adds if event.temperature == 0.0),
        num_logprobs={
            event.req_id: wanted[event.req_id].count if event.req_id in wanted else None
            for event in adds
        },
        logprobs_mode=logprobs_mode,
        structured=frozenset(
            event.req_id for event in adds if event.further.get("structured_outputs")
        ),
    )


def _absent(case: Case, outcome: Outcome) -> list[str]:
    absent = [value for value in _expected_values(case) if not _compared(outcome, value)]
    absent += [
        f"events of kind {kind}" for kind in sorted(case.expects) if not outcome.events.get(kind)
    ]
    departs = case.departure is not None and case.departure.is_certain
    if departs and not outcome.tally.departed:
        assert case.departure is not None
        absent.append(f"rows in which V1 is expected to be wrong ({case.departure.why})")
    absent += [
        f"rows that {name} could change"
        for name in sorted(_parameters_in_use(case) - outcome.effects.possible)
    ]
    counts = outcome.draws_compared
    absent += [f"the pass {mode!r}" for mode in outcome.modes if not counts.get(mode)]
    if outcome.graphs != "none":
        modes = outcome.steps_by_mode
        absent += [
            f"decodes that {name} replayed from graphs (its steps: {modes[name]})"
            for name in modes
            if not modes[name].get("decode")
        ]
        if not modes:
            absent.append("decodes replayed from graphs")
    return absent


def _expected_values(case: Case) -> list[str]:
    expected = expectations(case.workload())
    values = list(_ALWAYS)
    if expected.greedy:
        values.append("tokens")
    if any(count is not None for count in expected.num_logprobs.values()):
        values += ["logprobs", "ranks"]
    events = case.workload()
    if any(
        event.further.get("prompt_logprobs") is not None and len(event.prompt) > 1
        for event in events
        if isinstance(event, Add)
    ):
        values.append(OF_PROMPTS)
    if right_values_of(case, Effects()) is not None:
        values.append(right_rows.VALUE)
    return values


def _parameters_in_use(case: Case) -> set[str]:
    parameters = right_rows.parameters_of(case.workload()).values()
    return {name for each in parameters if each is not None for name in each.in_use}


def _compared(outcome: Outcome, value: str) -> int:
    total = outcome.tally.totals.get(value)
    return total.compared if total is not None else 0


def _sentence(first: Divergence, reference: str) -> str:
    where = f"step {first.step} ({first.mode})"
    whose = f" of {first.req_id} at {first.index}" if first.req_id else ""
    if first.value == right_rows.VALUE and first.reference:
        return f"{where}: {first.value}{whose} is {first.candidate}, right is {first.reference}"
    if not first.reference:
        return f"{where}: {first.value}: {first.candidate}"
    return f"{where}: {first.value}{whose} is {first.candidate}, {reference} has {first.reference}"
