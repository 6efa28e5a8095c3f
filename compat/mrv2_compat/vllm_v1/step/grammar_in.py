"""From vLLM's GrammarOutput to the runner's GrammarMask. Pure, host values only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import GrammarOutput

from mrv2 import GrammarMask, ProtocolError

_WORD_BITS = 32
_ALL_ALLOWED = -1
"""The word with every bit set."""


def grammar_mask(
    grammar_output: GrammarOutput | None,
    req_ids: Sequence[str],
    cu_num_logits: npt.NDArray[np.int32],
    vocab_size: int,
) -> GrammarMask | None:
    """Find the logit of each request that a grammar constrains.

    The scheduler's order is not the batch's. A request that it names may be missing from the step,
    or may run a part of its prompt and draw nothing: its mask is for no logit and is left out.

    Args:
        grammar_output: vLLM's, a mask for each request that it names; None constrains none.
        req_ids: [num_reqs], the step's requests in batch order.
        cu_num_logits: [num_reqs + 1]. Inclusive prefix sums of their logits, with a leading zero.
        vocab_size: Of the model. A tokenizer may know more tokens or fewer, and its masks are then
            of another width: what it does not know is allowed, as in V1.

    Returns:
        The mask, or None where it would constrain no logit.

    Raises:
        ProtocolError: There is not one mask for each request that is named, or one is for a
            request that draws several tokens.
    """
    if grammar_output is None:
        return None
    masked_ids = grammar_output.structured_output_request_ids
    bitmask = grammar_output.grammar_bitmask
    if len(bitmask) != len(masked_ids):
        raise ProtocolError(
            f"vLLM sends {len(bitmask)} grammar masks for {len(masked_ids)} requests; "
            "one each is due without speculative decoding"
        )
    batch_idx = {req_id: index for index, req_id in enumerate(req_ids)}
    mask_idx, logit_idx = [], []
    for index, req_id in enumerate(masked_ids):
        at = batch_idx.get(req_id)
        if at is None:
            continue
        first, end = cu_num_logits[at : at + 2].tolist()
        if end - first > 1:
            raise ProtocolError(
                f"request {req_id!r} draws {end - first} tokens and has one grammar mask"
            )
        if end > first:
            mask_idx.append(index)
            logit_idx.append(first)
    if not logit_idx:
        return None
    return GrammarMask(
        bitmask=_fitted(bitmask[mask_idx], vocab_size),
        logit_idx=np.array(logit_idx, dtype=np.int32),
    )


def _fitted(bitmask: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.int32]:
    """Cut or extend masks to the words of a vocabulary."""
    width = -(-vocab_size // _WORD_BITS)
    missing = max(width - bitmask.shape[1], 0)
    padding = ((0, 0), (0, missing))
    return np.pad(bitmask[:, :width], padding, constant_values=_ALL_ALLOWED)
