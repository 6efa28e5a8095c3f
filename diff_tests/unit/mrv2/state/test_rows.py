"""The row table: who owns which row, and what it refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.errors import CapacityError, ProtocolError
from mrv2.state.rows import RowTable


def test_the_row_that_was_freed_last_is_claimed_first() -> None:
    rows = RowTable(4)
    assert [rows.claim(name) for name in "abc"] == [0, 1, 2]
    assert (rows.release("a"), rows.release("c")) == (0, 2)
    assert [rows.claim(name) for name in "de"] == [2, 0]
    assert rows.rows(["b", "e", "d"]).tolist() == [1, 0, 2]
    assert rows.rows([]).tolist() == []


def test_what_is_refused() -> None:
    rows = RowTable(1)
    rows.claim("a")
    with pytest.raises(ProtocolError, match="'a' arrived twice"):
        rows.claim("a")
    with pytest.raises(CapacityError, match=r"all 1 rows are taken \(max_num_reqs\); 'b' has none"):
        rows.claim("b")
    with pytest.raises(ProtocolError, match="'b' has no row"):
        rows.row("b")
    with pytest.raises(ProtocolError, match="'b' is scheduled but has no row"):
        rows.rows(["a", "b"])
    assert rows.release("b") is None
    assert (len(rows), "a" in rows, "b" in rows, rows.row("a")) == (1, True, False, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=60))
def test_a_row_has_one_owner_and_none_is_lost(toggled: list[int]) -> None:
    rows, owned = RowTable(5), dict[str, int]()
    for number in toggled:
        name = f"r{number}"
        if name in owned:
            assert rows.release(name) == owned.pop(name)
        elif len(owned) == 5:
            with pytest.raises(CapacityError):
                rows.claim(name)
        else:
            row = rows.claim(name)
            assert 0 <= row < 5
            assert row not in owned.values()
            owned[name] = row
        assert len(rows) == len(owned)
        assert rows.rows(list(owned)).tolist() == list(owned.values())


def test_requests_without_a_row_are_named() -> None:
    rows = RowTable(3)
    rows.claim("a")
    rows.claim("b")
    rows.release("b")
    assert rows.rows_if_live(["b", "a", "c"]).tolist() == [-1, rows.row("a"), -1]
