"""Prompts and engines that the catalog's cases draw from."""

import random

from mrv2_diff.case import EngineSpec
from mrv2_diff.models.spec import ModelSpec

TINY = ModelSpec()
"""Full attention in every layer."""

ROOMY = EngineSpec(model=TINY)
"""Enough blocks that nothing is preempted."""
CACHED = EngineSpec(model=TINY, prefix_caching=True)
TIGHT = EngineSpec(model=TINY, num_blocks=14, max_num_seqs=8)
"""13 usable blocks for 8 requests of up to 8 blocks each: requests are preempted and resumed."""
CHUNKED = EngineSpec(model=TINY, max_num_batched_tokens=48)
"""A budget below most prompts, so that they are cut into chunks."""


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Return `length` token ids without a pattern, the same for the same seed."""
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(length))
