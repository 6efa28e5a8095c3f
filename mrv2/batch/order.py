"""The order of a batch that an attention backend wants, where it is not the host's.

Host arithmetic alone.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mrv2.plan import NextDecode, Scheduled

Int64 = npt.NDArray[np.int64]


def decodes_first(scheduled: Scheduled | NextDecode, threshold: int) -> Int64 | None:
    """Return the order in which short queries come first, each kind in the host's order.

    Args:
        scheduled: The step's work.
        threshold: Tokens of the longest query that counts as short.

    Returns:
        [num_reqs]. Batch position -> place in the host's order; None where they are the same.
    """
    is_long = np.array(scheduled.num_tokens) > threshold
    if not (is_long[:-1] & ~is_long[1:]).any():
        return None
    return is_long.argsort(kind="stable")


def in_order(scheduled: Scheduled | NextDecode, order: Int64) -> Scheduled:
    """Return the same work with its requests in another order.

    Args:
        scheduled: The step's work.
        order: [num_reqs]. New place -> place in `scheduled`.
    """
    listed = scheduled.listed() if isinstance(scheduled, NextDecode) else scheduled
    places = order.tolist()

    def moved(values: list[int]) -> list[int]:
        return [values[place] for place in places]

    return replace(
        listed,
        req_ids=[listed.req_ids[place] for place in places],
        num_tokens=moved(listed.num_tokens),
        num_computed_tokens=moved(listed.num_computed_tokens),
        num_known_tokens=moved(listed.num_known_tokens),
    )
