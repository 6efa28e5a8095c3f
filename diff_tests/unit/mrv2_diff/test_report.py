"""Reports: complete, self-contained, the same every time, and closed to hostile text."""

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mrv2_diff import record as records_file
from mrv2_diff.record import Cost, HeldBy, PhasePeak, Quartiles, Record
from mrv2_diff.report import figures, pairs_table, parity_line, plots, render, render_committed
from mrv2_diff.report.figures import MISSING
from mrv2_diff.report.markdown import escape
from mrv2_diff.report.page import page
from mrv2_diff.verdict import Divergence, Neighbour, Verdict

MakeRecord = Callable[..., Record]
MakeCosts = Callable[..., tuple[Cost, ...]]

HOSTILE = "<script>alert(1)</script>|\"'`[x](y)&amp;"
TIMES = "\N{MULTIPLICATION SIGN}"
VOID = {"meta", "link", "br"}


class Structure(HTMLParser):
    """Collects a page's tags, attributes and text, and checks that its elements are balanced."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _structure(html: str) -> Structure:
    structure = Structure()
    structure.feed(html)
    structure.close()
    assert structure.open == []
    return structure


def _hostile(make_record: MakeRecord) -> Record:
    text = HOSTILE
    plain = make_record()
    peak = PhasePeak(peak_bytes=9, held_by=(HeldBy(op=text, bytes=9),))
    return make_record(
        id=text,
        area=text,
        feature=text,
        pair=(text, "mrv2"),
        verdict=Verdict.WRONG_VALUE,
        summary=text,
        modes=(text,),
        events={text: 1},
        agreements={text: dataclasses.replace(plain.agreements["tokens"], policy=text)},
        noise_floor={text: 1.0},
        first_divergence=Divergence(
            mode=text,
            step=1,
            value=text,
            req_id=text,
            index=0,
            reference=text,
            candidate=text,
            policy=text,
        ),
        error=text,
        command=text,
        environment={text: text, "vllm": text},
        latency={text: plain.latency["v1"], "mrv2": plain.latency["mrv2"]},
        memory={
            text: dataclasses.replace(plain.memory["v1"], phases={text: peak}),
            "mrv2": dataclasses.replace(plain.memory["mrv2"], phases={text: peak}),
        },
        costs=(
            Cost(
                quantity=text,
                verdict=Verdict.OVER_BUDGET,
                budget=1.0,
                ratio=2.0,
                samples=1,
                phase=text,
                op=text,
                summary=text,
            ),
        ),
    )


def test_the_three_files_are_written(tmp_path: Path, make_record: MakeRecord) -> None:
    render([make_record()], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "PARITY.md",
        "index.html",
        "summary.json",
    ]


def test_the_summary_has_counts_and_figures(tmp_path: Path, make_record: MakeRecord) -> None:
    render([make_record(), make_record(id="b", verdict=Verdict.CRASHED)], tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["counts"] == {"MATCH": 1, "CRASHED": 1}
    assert summary["passes"] is False
    case = summary["cases"][0]
    assert {"id", "area", "feature", "pair", "verdict", "summary", "figures", "costs"} == set(case)
    assert case["figures"]["tokens_compared"] == 384
    assert case["figures"]["latency_ratio"] == pytest.approx(1210 / 1850)
    assert case["figures"]["memory_ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("verdicts", "line"),
    [
        ([], "parity: 0 cases, 0 match"),
        ([Verdict.MATCH], "parity: 1 case, 1 match"),
        ([Verdict.CRASHED] * 2, "parity: 2 cases, 0 match, 2 crashed"),
        (
            [Verdict.WRONG_VALUE, Verdict.NEAR_TIE, Verdict.MATCH],
            "parity: 3 cases, 1 match, 1 near tie, 1 wrong value",
        ),
    ],
)
def test_the_parity_line(verdicts: list[Verdict], line: str, make_record: MakeRecord) -> None:
    assert parity_line([make_record(verdict=verdict) for verdict in verdicts]) == line


def test_the_page_needs_nothing_else(make_record: MakeRecord) -> None:
    html = page([make_record()])
    structure = _structure(html)
    assert not {"script", "img", "iframe", "object"} & set(structure.tags)
    outside = [
        value
        for name, value in structure.attributes
        if name in ("src", "href") and not value.startswith(("#", "data:"))
    ]
    assert outside == []
    assert "url(" not in html
    assert "@import" not in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_the_page_tells_each_figure(make_record: MakeRecord) -> None:
    record = make_record(
        verdict=Verdict.WRONG_VALUE,
        error="RuntimeError: at the end",
        first_divergence=Divergence(
            mode="free",
            step=31,
            value="slots",
            req_id="req-5",
            index=17,
            reference="1041",
            candidate="977",
            policy="exact",
        ),
    )
    text = " ".join(_structure(page([record])).text.split())
    for told in (
        "Greedy decoding",
        "wrong value",
        "384",
        "3.1e-06 / 4.2e-06",
        f"0.50{TIMES}",
        f"0.65{TIMES}",
        "step 31, free: slots of request req-5, index 17",
        "1041",
        "977",
        "RuntimeError: at the end",
        "mrv2-diff run --case sampling-greedy --pair v1,mrv2",
        "vLLM 0.32.0",
        "1.85 ms",
        "8 arrivals",
    ):
        assert told in text, told
    assert "preemptions" not in text


def test_each_case_opens_and_is_reachable_from_the_failures(make_record: MakeRecord) -> None:
    structure = _structure(page([make_record(), make_record(id="b", verdict=Verdict.CRASHED)]))
    assert structure.tags.count("details") == 2
    links = [value[1:] for name, value in structure.attributes if name == "href" and "#" in value]
    assert "case-1" in links
    assert set(links) <= {value for name, value in structure.attributes if name == "id"}


def test_hostile_text_stays_text(tmp_path: Path, make_record: MakeRecord) -> None:
    render([_hostile(make_record)], tmp_path)
    structure = _structure((tmp_path / "index.html").read_text())
    assert "script" not in structure.tags
    assert structure.text.count(HOSTILE) > 15
    lines = (tmp_path / "PARITY.md").read_text().splitlines()
    assert not any("<" in line for line in lines)
    rows = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {10}


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain_name-1", "plain_name-1"),
        ("_led_", r"\_led\_"),
        ("a|b", r"a\|b"),
        (r"a\|b", r"a\\\|b"),
        ("two\nlines", "two lines"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("`x` *y* [z]", r"\`x\` \*y\* \[z\]"),
    ],
)
def test_markdown_is_escaped(text: str, escaped: str) -> None:
    assert escape(text) == escaped


def test_a_case_without_figures_is_told_with_dashes(make_record: MakeRecord) -> None:
    bare = make_record(
        verdict=Verdict.NOT_RUN,
        agreements={},
        noise_floor={},
        memory={},
        latency={},
        logit_diffs=[],
        events={},
    )
    text = _structure(page([bare])).text
    assert "not run" in text
    assert "Logits were not compared." in text
    assert figures.headline(bare).memory_ratio is None
    assert figures.ratio_text(None) == figures.number_text(None) == figures.MISSING


def test_budgets_are_told_with_their_intervals(
    tmp_path: Path, make_record: MakeRecord, make_costs: MakeCosts
) -> None:
    costs = make_costs(Verdict.OVER_BUDGET, Verdict.INCONCLUSIVE)
    plain = make_record(costs=costs)
    peak = PhasePeak(peak_bytes=3072, held_by=(HeldBy(op="aten::zeros in f", bytes=2048),))
    memory = {name: dataclasses.replace(item, phases={"sample": peak})
              for name, item in plain.memory.items()}  # fmt: skip
    times = Quartiles(q1=1.0, median=2.0, q3=3.0, count=4, p90=5.0, p99=6.0)
    latency = {name: dataclasses.replace(item, total_us=times, device_us=times)
               for name, item in plain.latency.items()}  # fmt: skip
    whole = dataclasses.replace(plain, memory=memory, latency=latency)
    render([whole, make_record(id="b")], tmp_path)
    text = _structure((tmp_path / "index.html").read_text()).text
    for told in (figures.time_text(5.0), figures.time_text(6.0),
                 "0.830 to 0.870", "2.0 KiB aten::zeros in f", "open", "over",
                 "budgets: memory 0 within, 1 over; host time 0 within, 1 open"):  # fmt: skip
        assert told in text
    parity = (tmp_path / "PARITY.md").read_text()
    sign = figures.ratio_text(1.25)[-1]
    assert f"| 1.25{sign} over | 0.85{sign} open |" in parity
    assert f"| 0.50{sign} | 0.65{sign} |" in parity  # without budgets: as in former records
    assert "Over budget:\n\n- sampling-greedy: memory: 1.250 times V1's\n" in parity
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [cost["verdict"] for cost in summary["cases"][0]["costs"]] == [
        "OVER_BUDGET", "INCONCLUSIVE"
    ]  # fmt: skip
    assert summary["cases"][0]["figures"]["memory_ratio"] == 1.25
    assert summary["passes"] is True  # budgets have verdicts of their own


def test_nothing_at_all_is_said_to_be_nothing(tmp_path: Path) -> None:
    render([], tmp_path)
    assert "No case was run." in (tmp_path / "index.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["passes"] is False


def test_a_runner_compared_with_itself_has_two_sides() -> None:
    assert figures.sides({"v1": 1, "v1 again": 2}, ("v1", "v1")) == (1, 2)
    assert figures.sides({"v1": 1}, ("v1", "v1")) == (1, 1)
    assert figures.sides({"mrv2": 2}, ("v1", "mrv2")) == (None, 2)


def test_equal_logits_need_no_plot(make_record: MakeRecord) -> None:
    assert plots.step_plot([0.0, 0.0], 1e-6) is None
    assert "equal at all 2 steps" in page([make_record(logit_diffs=[0.0, 0.0])])


@pytest.mark.parametrize("diffs", [[1e-6], [0.0, float("inf"), 2.0], [1.0] * 5000, [1e-30, 1e30]])
def test_every_stick_is_inside_its_plot(diffs: list[float]) -> None:
    plot = plots.step_plot(diffs, 1e-6)
    assert plot is not None
    sticks = re.findall(r"M([\d.]+) 100v-([\d.]+)h([\d.]+)", plot.svg)
    assert 1 <= len(sticks) <= 250
    for left, height, width in sticks:
        assert 0 <= float(left) <= 1000 - float(width) + 0.1
        assert 0 < float(height) <= 100


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.125, "0.125"), (1234.5, "1,234"), (3.1e-6, "3.1e-06"), (float("nan"), "nan")],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert figures.number_text(value) == text


def test_units_are_written_for_people() -> None:
    assert [figures.bytes_text(size) for size in (0, 1023, 1536, 5 * 2**20, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert figures.time_text(412.4) == "412 µs"
    assert figures.time_text(1240.0) == "1.24 ms"


def test_the_report_is_the_same_every_time(tmp_path: Path, make_record: MakeRecord) -> None:
    for name in ("one", "two"):
        render([make_record()], tmp_path / name)
    for file in ("summary.json", "PARITY.md", "index.html"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_kept_records_give_one_table_a_device(tmp_path: Path, make_record: MakeRecord) -> None:
    cpu = tmp_path / "parity" / "0.32.0" / "cpu.jsonl"
    gpu = tmp_path / "parity" / "0.33.0" / "h200.jsonl"
    records_file.append(cpu, make_record(verdict=Verdict.CRASHED))
    records_file.append(cpu, make_record())
    records_file.append(cpu, make_record(pair=("v1", "v1")))
    records_file.append(gpu, make_record(id="other", feature="Only here"))
    text = render_committed(tmp_path)
    first, itself, second = text.split("## vLLM ")[1:]
    assert first.startswith("0.32.0, cpu: v1 and mrv2")
    assert "1 case: 1 match, 1 without a record here." in first
    assert "| Only here | other | not run |" in first
    assert itself.startswith("0.32.0, cpu: v1 and v1")
    assert "without a record" not in itself
    assert second.startswith("0.33.0, h200: v1 and mrv2")
    assert "| Greedy decoding | sampling-greedy | not run |" in second


def test_kept_records_with_graphs_have_a_table_of_their_own(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    file = tmp_path / "parity" / "0.33.0" / "h200.jsonl"
    for graphs in ("none", "FULL_DECODE_ONLY"):
        records_file.append(file, make_record(environment={"graphs": graphs}))
    eager, replayed = render_committed(tmp_path).split("## vLLM ")[1:]
    assert eager.startswith("0.33.0, h200: v1 and mrv2\n")
    assert replayed.startswith(r"0.33.0, h200: v1 and mrv2, CUDA graphs FULL_DECODE_ONLY")
    assert "1 case: 1 match." in eager
    assert "1 case: 1 match." in replayed


def test_kept_records_of_three_runners_have_a_table_of_cases_by_pairs(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    file = tmp_path / "parity" / "0.32.0" / "cpu.jsonl"
    records_file.append(file, make_record())
    records_file.append(file, make_record(id="whole only"))
    small = {"form": "small"}
    for pair, verdict in (
        (("v1", "mrv2"), Verdict.MATCH),
        (("v1", "vllm-v2"), Verdict.KNOWN_DIFFERENCE),
    ):
        records_file.append(file, make_record(pair=pair, verdict=verdict, environment=small))
    text = render_committed(tmp_path)
    whole, first, _, table = text.split("## vLLM ")[1:]
    assert whole.startswith("0.32.0, cpu: v1 and mrv2\n")
    assert first.startswith("0.32.0, cpu: v1 and mrv2, small form\n")
    assert "not run" not in first, "the whole cases are no record of the small ones"
    assert table.startswith("0.32.0, cpu: case by pair, small form\n")
    assert "| Case | v1 and mrv2 | v1 and vllm-v2 |" in table
    assert "| sampling-greedy | match | known difference |" in table
    assert "whole only" not in table


def test_the_values_around_a_divergence_are_on_the_page(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    around = tuple(Neighbour(index=n, reference=f"r{n}", candidate=f"c{n}") for n in range(2))
    first = Divergence(
        mode="forced", step=3, value="slots", req_id="r-7", index=1, reference="r1",
        candidate="c1", policy="exact", around=around,
    )  # fmt: skip
    render([make_record(verdict=Verdict.WRONG_VALUE, first_divergence=first)], tmp_path)
    text = (tmp_path / "index.html").read_text()
    assert "around it" in text
    for name in ("r0", "c0", "r1", "c1"):
        assert name in text


def test_without_kept_records_the_page_says_so(tmp_path: Path) -> None:
    assert "No records are kept yet." in render_committed(tmp_path)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_page_marks_what_failed_and_nothing_that_passed(
    make_record: MakeRecord, verdict: Verdict
) -> None:
    text = page([make_record(verdict=verdict)])
    assert ("tone-bad" in text.split("</style>")[1]) is (
        not verdict.passes and verdict not in (Verdict.INCONCLUSIVE, Verdict.NOT_RUN)
    )
    theirs = verdict in (Verdict.REFERENCE_WRONG, Verdict.REFERENCE_CRASHED)
    assert ("in 1 the fault that it shows is the reference's" in text) is theirs


# Three runners.


def _of_three(make_record: MakeRecord) -> list[Record]:
    pairs = (("v1", "mrv2"), ("v1", "vllm-v2"), ("mrv2", "vllm-v2"))
    records = [
        make_record(id=f"case_{number}", pair=pair) for number in (1, 2) for pair in pairs[:-1]
    ]
    wrong = make_record(id="case_2", pair=pairs[-1], verdict=Verdict.WRONG_VALUE)
    return [*records, wrong]


def test_three_runners_give_a_table_of_cases_by_pairs(
    make_record: MakeRecord, tmp_path: Path
) -> None:
    records = _of_three(make_record)
    table = pairs_table(records)
    assert table is not None
    assert [re.split("  +", line) for line in table.lines] == [
        ["case", "v1,mrv2", "v1,vllm-v2", "mrv2,vllm-v2"],
        ["case_1", "match", "match", MISSING],
        ["case_2", "match", "match", "wrong value"],
    ]
    render(records, tmp_path)
    parity = (tmp_path / "PARITY.md").read_text()
    assert "| Case | v1 and mrv2 | v1 and vllm-v2 | mrv2 and vllm-v2 |" in parity
    assert "| case_2 | match | match | wrong value |" in parity
    assert parity.count("## Pair ") == 3
    page = (tmp_path / "index.html").read_text()
    assert "Case by pair" in page
    assert page.count("case_2, mrv2 and vllm-v2") == 1


def test_two_runners_give_none(make_record: MakeRecord, tmp_path: Path) -> None:
    records = [make_record(), make_record(pair=("v1", "v1"))]
    assert pairs_table(records) is None
    render(records, tmp_path)
    assert "Case by pair" not in (tmp_path / "index.html").read_text()
