"""What the subjects share: copies of values out of a runner, and what fills a KV cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.outputs import ModelRunnerOutput

from mrv2_diff.observation import Ints, ObservedLogprobs

POISON = 977.0
"""Far from any key or value, and finite.

Attention multiplies what it masks by 0, and 0 times NaN would be NaN in both runners.
"""

Forced = Mapping[str, int]
"""Token to commit for each request that draws one."""


def poison(tensors: list[Tensor]) -> None:
    """Fill KV caches with `POISON`: a block that is read before it was written shows at once."""
    for tensor in tensors:
        tensor.fill_(POISON)


def ints(tensor: Tensor) -> Ints:
    """Return a copy of integers."""
    return tensor.cpu().numpy().astype(np.int64, copy=True)


def used_blocks(
    tables: Sequence[Tensor], block_sizes: Sequence[int], req_ids: Sequence[str], seq_lens: Ints
) -> dict[str, tuple[Ints, ...]]:
    """Return copies of the blocks that hold each request's tokens, for each KV group.

    Args:
        tables: [at least num_reqs, max_blocks] for each group, in the order of the batch.
        block_sizes: Tokens of a block, for each group.
        req_ids: Requests of the batch.
        seq_lens: [num_reqs]. Tokens of each, with this step's.
    """
    copies = [ints(table[: len(req_ids)]) for table in tables]
    return {
        req_id: tuple(
            table[row, : -(-int(seq_lens[row]) // size)]
            for table, size in zip(copies, block_sizes, strict=True)
        )
        for row, req_id in enumerate(req_ids)
    }


def block_sizes_of(runner: Any) -> list[int]:
    """Return the tokens of a block, for each KV group of a runner."""
    groups = runner.kv_cache_config.kv_cache_groups
    return [group.kv_cache_spec.block_size for group in groups]


def rows_of_logprobs(output: ModelRunnerOutput, drawn: list[int]) -> ObservedLogprobs | None:
    """Return the logprobs of the rows that draw; None where no request asked for any."""
    if output.logprobs is None:
        return None
    token_ids, values, ranks, cu = output.logprobs
    rows = drawn if cu is None else [cu[index] for index in drawn]
    return ObservedLogprobs(
        token_ids=np.asarray(token_ids)[rows].astype(np.int64),
        values=np.asarray(values)[rows].astype(np.float32),
        ranks=np.asarray(ranks)[rows].astype(np.int64),
    )


def prompt_logprobs_of(output: ModelRunnerOutput) -> dict[str, ObservedLogprobs]:
    """Return copies of the prompts' logprobs that a step returned."""
    return {
        req_id: ObservedLogprobs(
            token_ids=ints(scores.logprob_token_ids),
            values=scores.logprobs.cpu().numpy().astype(np.float32, copy=True),
            ranks=ints(scores.selected_token_ranks),
        )
        for req_id, scores in output.prompt_logprobs_dict.items()
        if scores is not None
    }
