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


def test_vllms_own_arrays_are_left_as_they_are() -> None:
    from vllm.v1.core.sched.output import GrammarOutput

    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    given = np.arange(6, dtype=np.int32).reshape(2, 3)
    mask = grammar_mask(GrammarOutput(["c", "a"], given), REQ_IDS, CU_NUM_LOGITS, VOCAB)
    assert mask is not None
    mask.bitmask[:] = 0
    assert given.tolist() == [[0, 1, 2], [3, 4, 5]]
