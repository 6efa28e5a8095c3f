"""Two failures are the same by verdict, value and pass; a vote says how often one was seen."""

from collections.abc import Callable

import pytest

from mrv2_diff.record import Record
from mrv2_diff.shrinking.signature import Vote, needed, signature_of
from mrv2_diff.verdict import Divergence, Verdict

MakeRecord = Callable[..., Record]

FIRST = Divergence(
    mode="forced", step=3, value="slots", req_id="a", index=0,
    reference="1", candidate="2", policy="exact",
)  # fmt: skip


def test_a_wrong_value_is_known_by_its_name_and_pass(make_record: MakeRecord) -> None:
    record = make_record(verdict=Verdict.WRONG_VALUE, first_divergence=FIRST, summary="one")
    later = make_record(verdict=Verdict.WRONG_VALUE, first_divergence=FIRST, summary="another")
    assert signature_of(record) == signature_of(later)
    assert str(signature_of(record)) == "WRONG_VALUE at slots (forced)"


def test_a_crash_is_known_by_its_exception(make_record: MakeRecord) -> None:
    error = (
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "    raise ValueError(3)\n"
        "mrv2.errors.ProtocolError: row 3: of two\nlines\n"
    )
    record = make_record(verdict=Verdict.CRASHED, error=error)
    assert str(signature_of(record)) == "CRASHED (mrv2.errors.ProtocolError)"


def test_what_was_ignored_is_part_of_it_and_the_fault_is_not(make_record: MakeRecord) -> None:
    plain = make_record(verdict=Verdict.IGNORED, summary="no logit was changed by min_p")
    planted = make_record(
        verdict=Verdict.IGNORED,
        summary="no logit was changed by min_p; with the planted fault min-p-ignored",
    )
    other = make_record(verdict=Verdict.IGNORED, summary="no logit was changed by top_k")
    assert signature_of(plain) == signature_of(planted) != signature_of(other)


@pytest.mark.parametrize(
    ("seen", "runs", "repeat", "least"), [(5, 5, 1, 1), (5, 5, 4, 4), (4, 10, 10, 2), (1, 9, 9, 1)]
)
def test_a_try_must_fail_half_as_often(seen: int, runs: int, repeat: int, least: int) -> None:
    assert needed(Vote(seen=seen, runs=runs), repeat) == least
