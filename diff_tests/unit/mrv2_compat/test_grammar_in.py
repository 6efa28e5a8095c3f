"""Grammar masks from vLLM: each finds the logit of its request, whatever the scheduler's order."""

from typing import Any

import numpy as np
import pytest

from mrv2 import GrammarMask, ProtocolError

pytestmark = pytest.mark.vllm

VOCAB = 70
REQ_IDS = ["a", "b", "c", "d"]
CU_NUM_LOGITS = np.array([0, 1, 1, 2, 3], dtype=np.int32)
"""The request "b" is in the middle of its prompt and draws nothing."""


def translated(req_ids: list[str], bitmask: Any, vocab_size: int = VOCAB) -> GrammarMask | None:
    from vllm.v1.core.sched.output import GrammarOutput

    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    output = GrammarOutput(req_ids, np.array(bitmask, dtype=np.int32))
    return grammar_mask(output, REQ_IDS, CU_NUM_LOGITS, vocab_size)


def test_no_grammar_is_no_mask() -> None:
    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    assert grammar_mask(None, REQ_IDS, CU_NUM_LOGITS, VOCAB) is None


def test_masks_follow_their_requests_and_not_the_schedulers_order() -> None:
    mask = translated(["d", "a"], [[1, 2, 3], [4, 5, 6]])
    assert mask is not None
    assert dict(zip(mask.logit_idx.tolist(), mask.bitmask.tolist(), strict=True)) == {
        2: [1, 2, 3],
        0: [4, 5, 6],
    }
    mask.check(3, VOCAB)


def test_requests_that_are_not_in_the_step_or_draw_nothing_are_left_out() -> None:
    mask = translated(["gone", "b", "c", "later"], [[9] * 3, [8] * 3, [1, 2, 3], [7] * 3])
    assert mask is not None
    assert mask.logit_idx.tolist() == [1]
    assert mask.bitmask.tolist() == [[1, 2, 3]]


def test_masks_for_no_logit_at_all() -> None:
    assert translated(["gone", "b"], [[9] * 3, [8] * 3]) is None


def test_masks_of_another_width_leave_tokens_that_the_grammar_does_not_know() -> None:
    wider = translated(["a"], [[1, 2, 3, 4, 5]])
    narrower = translated(["a"], [[1]])
    assert wider is not None
    assert narrower is not None
    assert wider.bitmask.tolist() == [[1, 2, 3]]
    assert narrower.bitmask.tolist() == [[1, -1, -1]]
    assert narrower.bitmask.dtype == np.int32


def test_more_masks_than_requests_are_refused() -> None:
    with pytest.raises(ProtocolError, match="3 grammar masks for 2 requests"):
        translated(["a", "c"], [[1] * 3] * 3)


def test_one_mask_for_a_request_that_draws_several_tokens_is_refused() -> None:
    from vllm.v1.core.sched.output import GrammarOutput

    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    output = GrammarOutput(["a"], np.ones((1, 3), dtype=np.int32))
    with pytest.raises(ProtocolError, match="'a' draws 2 tokens"):
        grammar_mask(output, ["a"], np.array([0, 2], dtype=np.int32), VOCAB)


DRAFTED = np.array([0, 3, 3, 4, 6], dtype=np.int32)
"""The request "a" runs two drafts, "b" draws nothing, "c" runs none, and "d" runs one."""


def drafted(
    req_ids: list[str], num_drafts: dict[str, int], rows: list[int], cu_num_logits: Any = DRAFTED
) -> list[tuple[int, int]]:
    """Return the logit of each mask that is for one, with the mask's first word."""
    from vllm.v1.core.sched.output import GrammarOutput

    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    bitmask = np.array([[row, 0, 0] for row in rows], dtype=np.int32)
    output = GrammarOutput(req_ids, bitmask)
    mask = grammar_mask(output, REQ_IDS, cu_num_logits, VOCAB, num_drafts)
    if mask is None:
        return []
    mask.check(int(cu_num_logits[-1]), VOCAB)
    return list(zip(mask.logit_idx.tolist(), mask.bitmask[:, 0].tolist(), strict=True))


def test_a_request_has_a_mask_for_each_draft_and_one_more() -> None:
    found = drafted(["d", "c", "a"], {"a": 2, "d": 1}, [10, 11, 20, 30, 31, 32])
    assert found == [(4, 10), (5, 11), (3, 20), (0, 30), (1, 31), (2, 32)]


def test_masks_of_drafts_that_are_not_in_the_step_are_passed_over() -> None:
    found = drafted(["gone", "a", "b", "c"], {"gone": 2, "a": 2}, [1, 2, 3, 30, 31, 32, 40, 20])
    assert found == [(0, 30), (1, 31), (2, 32), (3, 20)]


def test_a_request_that_draws_fewer_tokens_than_it_has_masks_has_the_first_ones() -> None:
    cu_num_logits = np.array([0, 2, 2, 3, 3], dtype=np.int32)
    found = drafted(["a", "d"], {"a": 2, "d": 1}, [30, 31, 32, 10, 11], cu_num_logits)
    assert found == [(0, 30), (1, 31)]


@pytest.mark.parametrize("num_masks", [3, 5])
def test_masks_that_are_not_as_many_as_drafts_want_are_refused(num_masks: int) -> None:
    with pytest.raises(ProtocolError, match=f"{num_masks} grammar masks for 2 requests.* 4 are"):
        drafted(["a", "c"], {"a": 2}, list(range(num_masks)))


def test_masks_are_those_that_vllm_makes_with_drafts() -> None:
    # The order in which vLLM's manager fills its rows, by its own source: request after request, a
    # row for each scheduled draft, then one more.
    import inspect

    from vllm.v1.structured_output import StructuredOutputManager

    source = inspect.getsource(StructuredOutputManager.grammar_bitmask)
    serial = source[source.index("for i, token in enumerate(req_tokens)") :]
    assert "scheduled_spec_decode_tokens.get(req_id" in source
    assert serial.count("cumulative_index += 1") == 3


def test_vllms_own_arrays_are_left_as_they_are() -> None:
    from vllm.v1.core.sched.output import GrammarOutput

    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    given = np.arange(6, dtype=np.int32).reshape(2, 3)
    mask = grammar_mask(GrammarOutput(["c", "a"], given), REQ_IDS, CU_NUM_LOGITS, VOCAB)
    assert mask is not None
    mask.bitmask[:] = 0
    assert given.tolist() == [[0, 1, 2], [3, 4, 5]]
