"""A known difference of vLLM's V2 runner is one only where it shows as it is described."""

import dataclasses

from mrv2_diff.catalog import CASES
from mrv2_diff.compare.right import VALUE
from mrv2_diff.compare.tally import Tally, Total
from mrv2_diff.judge import Outcome
from mrv2_diff.known_upstream import KNOWN, judged
from mrv2_diff.small import has_small_form
from mrv2_diff.verdict import Divergence, Verdict

CASE, EXPECTED = next(iter(KNOWN.items()))
FIRST = Divergence(
    mode="forced", step=17, value=EXPECTED.value, req_id="a", index=92, reference="1e9",
    candidate="2.3", policy="at most 0 spacings",
)  # fmt: skip


def _outcome(first: Divergence | None, wrong_right_values: int) -> Outcome:
    total = Total("right", compared=900, differing=wrong_right_values)
    return Outcome(Tally({}, totals={VALUE: total}, first=first))


def test_every_case_with_one_is_run_beside_v2() -> None:
    assert all(has_small_form(CASES[case_id]) for case_id in KNOWN)


def test_it_is_known_where_v2_alone_is_off_the_right_value() -> None:
    verdict, summary = judged(CASE, _outcome(FIRST, 4), Verdict.WRONG_VALUE, "step 17")
    assert verdict is Verdict.KNOWN_DIFFERENCE
    assert summary == f"step 17; {EXPECTED.why}"


def test_it_is_wrong_where_v2_has_the_right_value_or_another_value_differs() -> None:
    wrong = Verdict.WRONG_VALUE, "step 17"
    assert judged(CASE, _outcome(FIRST, 0), *wrong) == wrong
    earlier = dataclasses.replace(FIRST, value="slots")
    assert judged(CASE, _outcome(earlier, 4), *wrong) == wrong
    assert judged("another.case", _outcome(FIRST, 4), *wrong) == wrong


def test_a_crash_stays_one() -> None:
    crashed = Verdict.CRASHED, "the candidate failed"
    assert judged(CASE, _outcome(None, 0), *crashed) == crashed


def test_one_that_does_not_show_is_missed() -> None:
    verdict, summary = judged(CASE, _outcome(None, 0), Verdict.MATCH, "all agree")
    assert verdict is Verdict.MISSING
    assert EXPECTED.why in summary
