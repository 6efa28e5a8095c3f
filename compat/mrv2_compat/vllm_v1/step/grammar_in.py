"""From vLLM's GrammarOutput to the runner's GrammarMask. Pure, host values only."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import GrammarOutput

from mrv2 import GrammarMask, ProtocolError

_WORD_BITS = 32
_ALL_ALLOWED = -1
"""The word with every bit set."""
_NO_DRAFTS: Mapping[str, int] = MappingProxyType({})


def grammar_mask(
    grammar_output: GrammarOutput | None,
    req_ids: Sequence[str],
    cu_num_logits: npt.NDArray[np.int32],
    vocab_size: int,
    num_drafts: Mapping[str, int] = _NO_DRAFTS,
) -> GrammarMask | None:
    """Find the logits of each request that a grammar constrains.

    vLLM sends, request after request, a mask for each draft that it scheduled and one more. The
    scheduler's order is not the batch's. A request that it names may be missing from the step, or
    may run a part of its prompt and draw nothing: its masks are for no logit and are left out.

    Args:
        grammar_output: vLLM's; None constrains none.
        req_ids: [num_reqs], the step's requests in batch order.
        cu_num_logits: [num_reqs + 1]. Inclusive prefix sums of their logits, with a leading zero.
        vocab_size: Of the model. A tokenizer may know more tokens or fewer, and its masks are then
            of another width: what it does not know is allowed, as in V1.
        num_drafts: Drafts that vLLM scheduled, of each request that has any.

    Returns:
        The mask, or None where it would constrain no logit.

    Raises:
        ProtocolError: There are not as many masks as are due, or a request draws more tokens than
            it has masks.
    """
    if grammar_output is None:
        return None
    masked_ids = grammar_output.structured_output_request_ids
    bitmask = grammar_output.grammar_bitmask
    num_due = len(masked_ids) + sum(num_drafts.get(req_id, 0) for req_id in masked_ids)
    if len(bitmask) != num_due:
        raise ProtocolError(
            f"vLLM sends {len(bitmask)} grammar masks for {len(masked_ids)} requests with "
            f"{num_due - len(masked_ids)} drafts; {num_due} are due"
        )
    mask_idx, logit_idx = _located(masked_ids, req_ids, cu_num_logits, num_drafts)
    if not logit_idx:
        return None
    return GrammarMask(
        bitmask=_fitted(bitmask[mask_idx], vocab_size),
        logit_idx=np.array(logit_idx, dtype=np.int32),
    )


def _located(
    masked_ids: Sequence[str],
    req_ids: Sequence[str],
    cu_num_logits: npt.NDArray[np.int32],
    num_drafts: Mapping[str, int],
) -> tuple[list[int], list[int]]:
    """Return the masks that are for a logit, and the logit of each."""
    batch_idx = {req_id: index for index, req_id in enumerate(req_ids)}
    mask_idx: list[int] = []
    logit_idx: list[int] = []
    next_mask = 0
    for req_id in masked_ids:
        first_mask, num_masks = next_mask, 1 + num_drafts.get(req_id, 0)
        next_mask += num_masks
        at = batch_idx.get(req_id)
        if at is None:
            continue
        first, end = cu_num_logits[at : at + 2].tolist()
        if end - first > num_masks:
            raise ProtocolError(
                f"request {req_id!r} draws {end - first} tokens and has {num_masks} grammar masks"
            )
        mask_idx += range(first_mask, first_mask + end - first)
        logit_idx += range(first, end)
    return mask_idx, logit_idx


def _fitted(bitmask: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.int32]:
    """Cut or extend masks to the words of a vocabulary."""
    width = -(-vocab_size // _WORD_BITS)
    missing = max(width - bitmask.shape[1], 0)
    padding = ((0, 0), (0, missing))
    return np.pad(bitmask[:, :width], padding, constant_values=_ALL_ALLOWED)
