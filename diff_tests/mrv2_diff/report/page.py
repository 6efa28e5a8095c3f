"""`index.html`: one file that works offline and without scripts; all text is escaped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mrv2_diff.record import Agreement, Cost, Memory, Record
from mrv2_diff.report import figures, plots
from mrv2_diff.report.environments import environments, pairs_text
from mrv2_diff.report.pairs import PairsTable, pairs_table
from mrv2_diff.report.summary import budgets_line, counts, verdict_text
from mrv2_diff.selftest.result import Head
from mrv2_diff.verdict import Verdict

_TONES = {
    Verdict.MATCH: "good",
    Verdict.NEAR_TIE: "near",
    Verdict.KNOWN_DIFFERENCE: "near",
    Verdict.REFERENCE_WRONG: "theirs",
    Verdict.REFERENCE_CRASHED: "theirs",
    Verdict.INCONCLUSIVE: "open",
    Verdict.NOT_RUN: "open",
}
_SIGNS = {"good": "✓", "near": "≈", "theirs": "!", "open": "?", "bad": "✗"}

_KEY_FACTS = {
    "date": "",
    "vllm": "vLLM ",
    "mrv2": "mrv2 ",
    "torch": "torch ",
    "device": "",
    "commit": "commit ",
}
"""Facts named at the top of the page, each with what precedes its value."""

_MEMORY_ROWS = (
    ("Step peak, tensors", "step_peak_tensor_bytes"),
    ("Step peak, Python heap", "step_peak_python_bytes"),
    ("State held between steps", "state_held_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictView:
    """A verdict with its colour, sign and count."""

    text: str
    tone: str
    sign: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementView:
    """One kind of value, how it compared, and its floor."""

    name: str
    figures: Agreement
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """One kind of memory of both runners, as text."""

    name: str
    reference: str
    candidate: str
    ratio: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """One resource against its budget, as text."""

    quantity: str
    word: str
    tone: str
    ratio: str
    interval: str
    budget: str
    required: str
    samples: int
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseView:
    """Both runners' peaks in one phase, and what the candidate's is made of."""

    name: str
    reference: str
    candidate: str
    ratio: str
    ops: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseView:
    """Everything the page shows of one record."""

    anchor: str
    record: Record
    verdict: VerdictView
    head: figures.Headline
    agreements: list[AgreementView]
    memory: list[MemoryView]
    phases: list[PhaseView]
    costs: list[CostView]
    bars: list[plots.Bar]
    steps: plots.StepPlot | None
    steps_compared: int


def page(records: Sequence[Record], tested: Head | None = None) -> str:
    """Return the whole page; `tested` says how far the harness can be trusted."""
    cases = [_case(place, record) for place, record in enumerate(records)]
    heads = [case.head for case in cases]
    table = pairs_table(records)
    return _templates().get_template("index.html").render(
        areas=_by_area(cases),
        pair_names=[" and ".join(pair) for pair in table.pairs] if table else [],
        pair_rows=_pair_rows(table, cases) if table else [],
        failures=[case for case in cases if not case.record.verdict.passes],
        total=len(cases),
        at_fault=sum(_TONES.get(record.verdict) == "theirs" for record in records),
        passes=bool(cases) and all(record.verdict.passes for record in records),
        tally=[_verdict(verdict, number) for verdict, number in counts(records).items()],
        pairs=pairs_text(records),
        values=sum(head.values_compared for head in heads),
        tokens=sum(head.tokens_compared for head in heads),
        request_steps=sum(record.request_steps for record in records),
        environments=environments(records),
        budgets=budgets_line(records),
        key_facts=_key_facts(records),
        tested=tested,
    )  # fmt: skip


def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "count": figures.count_text,
        "number": figures.number_text,
        "ratio": figures.ratio_text,
        "budget": figures.budget_text,
        "time": lambda value: figures.MISSING if value is None else figures.time_text(value),
    }
    return templates


def _key_facts(records: Sequence[Record]) -> list[str]:
    """Return what the reader must know of the environment before any figure."""
    facts = []
    for name, prefix in _KEY_FACTS.items():
        values = dict.fromkeys(record.environment.get(name, "") for record in records)
        facts += [prefix + value for value in values if value]
    return facts


def _verdict(verdict: Verdict, count: int = 1) -> VerdictView:
    tone = _TONES.get(verdict, "bad")
    return VerdictView(text=verdict_text(verdict), tone=tone, sign=_SIGNS[tone], count=count)


def _case(place: int, record: Record) -> CaseView:
    floor = record.noise_floor
    latency = figures.sides(record.latency, record.pair)
    return CaseView(
        anchor=f"case-{place}",
        record=record,
        verdict=_verdict(record.verdict),
        head=figures.headline(record),
        agreements=[
            AgreementView(name=name, figures=agreement, floor=floor.get(name))
            for name, agreement in record.agreements.items()
        ],
        memory=_memory(*figures.sides(record.memory, record.pair)),
        phases=_phases(*figures.sides(record.memory, record.pair)),
        costs=[_cost(cost) for cost in record.costs],
        bars=plots.latency_bars(*latency, record.pair),
        steps=plots.step_plot(record.logit_diffs, floor.get("logits")),
        steps_compared=len(record.logit_diffs),
    )


def _memory(reference: Memory | None, candidate: Memory | None) -> list[MemoryView]:
    if reference is None or candidate is None:
        return []
    rows = []
    for name, attribute in _MEMORY_ROWS:
        before, after = getattr(reference, attribute), getattr(candidate, attribute)
        rows.append(
            MemoryView(
                name=name,
                reference=figures.bytes_text(before),
                candidate=figures.bytes_text(after),
                ratio=figures.ratio_text(figures.ratio(after, before)),
            )
        )
    return rows


def _pair_rows(
    table: PairsTable, cases: Sequence[CaseView]
) -> list[tuple[str, list[CaseView | None]]]:
    """Return each case's id and what the page shows of it on each pair."""
    views = {id(case.record): case for case in cases}
    return [
        (case_id, [views.get(id(kept)) if kept else None for kept in records])
        for case_id, records in table.rows
    ]


def _phases(reference: Memory | None, candidate: Memory | None) -> list[PhaseView]:
    if reference is None or candidate is None:
        return []
    return [
        PhaseView(
            name=name,
            reference=figures.bytes_text(reference.phases[name].peak_bytes),
            candidate=figures.bytes_text(peak.peak_bytes),
            ratio=figures.ratio_text(
                figures.ratio(peak.peak_bytes, reference.phases[name].peak_bytes)
            ),
            ops=[f"{figures.bytes_text(held.bytes)} {held.op}" for held in peak.held_by],
        )
        for name, peak in candidate.phases.items()
        if name in reference.phases
    ]


def _cost(cost: Cost) -> CostView:
    known = cost.low is not None and cost.high is not None and cost.low != cost.high
    return CostView(
        quantity=cost.quantity,
        word=figures.budget_text(cost.verdict),
        tone=_TONES.get(cost.verdict, "bad"),
        ratio=figures.ratio_text(cost.ratio),
        interval=f"{cost.low:.3f} to {cost.high:.3f}" if known else figures.MISSING,
        budget=figures.ratio_text(cost.budget),
        required=figures.MISSING if cost.required is None else f"{cost.required:.3f}",
        samples=cost.samples,
        says=cost.summary,
    )


def _by_area(cases: Sequence["CaseView"]) -> list[tuple[str, list["CaseView"]]]:
    """Return the cases of each area, areas in the order in which they first appear."""
    areas: dict[str, list[CaseView]] = {}
    for case in cases:
        areas.setdefault(case.record.area, []).append(case)
    return list(areas.items())
