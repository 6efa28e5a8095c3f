"""What a head, or a host that forces tokens, may give for a step; found before it is committed."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from mrv2.batch.commit import SampledTokens
from mrv2.batch.layout import BatchLayout
from mrv2.errors import ConfigError, ExtensionError, ProtocolError
from mrv2.head.protocol import Head
from mrv2.memory.transfers import Transfers
from mrv2.step import Step

Forced: TypeAlias = Sequence[Sequence[int]]
"""For each request of a step, in batch order, the tokens that are committed in place of the sampled
ones: none where it has no logit, else 1 to as many as it has."""


def check_forced(forced: Forced, layout: BatchLayout, vocab_size: int) -> None:
    """Refuse tokens that cannot be committed in place of the sampled ones.

    Raises:
        ProtocolError: Their numbers do not fit the step's logits.
        ConfigError: One is outside the vocabulary.
    """
    counts = [len(tokens) for tokens in forced]
    wanted = layout.num_logits_of.tolist()
    fits = len(counts) == len(wanted) and all(
        min(most, 1) <= given <= most for given, most in zip(counts, wanted, strict=True)
    )
    if not fits:
        raise ProtocolError(
            f"{counts} tokens are forced on the requests of a step, which have {wanted} "
            "logits: force none where there is none, else 1 to as many"
        )
    outside = sorted({i for tokens in forced for i in tokens if not 0 <= i < vocab_size})
    if outside:
        raise ConfigError(f"forced tokens {outside} are outside the vocabulary of {vocab_size}")


def forced_tokens(forced: Forced, layout: BatchLayout, transfers: Transfers) -> SampledTokens:
    """Queue the upload of tokens that `check_forced` passed."""
    token_ids = np.zeros((layout.num_reqs, max(layout.max_num_logits, 1)), dtype=np.int64)
    for index, tokens in enumerate(forced):
        token_ids[index, : len(tokens)] = tokens
    counts = np.array([len(tokens) for tokens in forced], dtype=np.int32)
    return SampledTokens(
        token_ids=transfers.upload(token_ids), num_sampled=transfers.upload(counts)
    )


def check_sampled(sampled: SampledTokens, step: Step, head: Head) -> None:
    """Refuse what a head may not give, as far as the host can see it without waiting.

    Raises:
        ExtensionError: The tokens are not of the step's shape. On a CPU also where a request is
            given more than it has logits, or none though it has some; elsewhere that is found when
            somebody waits for the output.
    """
    layout, num_logits = step.layout, step.batch.num_logits
    counts = sampled.num_sampled
    check_form(sampled, layout.num_reqs, layout.max_num_logits or 1, head)
    if counts is num_logits or num_logits.device.type != "cpu":
        return
    if len(counts) != len(num_logits) or bool(
        ((counts > num_logits) | (counts < num_logits.clamp(max=1))).any()
    ):
        raise ExtensionError(
            f"the head {head.name!r} samples {counts.tolist()} tokens for requests of "
            f"{num_logits.tolist()} logits: sample 1 to as many as there are, and none where none "
            "is"
        )


def check_form(sampled: SampledTokens, num_reqs: int, width: int, head: Head) -> None:
    """Refuse tensors that kernels would misread: they take what lies where they expect it.

    Raises:
        ExtensionError: A shape, a dtype or the order in memory is another one.
    """
    token_ids, counts = sampled.token_ids, sampled.num_sampled
    if token_ids.shape != (num_reqs, width) or counts.shape != (num_reqs,):
        raise ExtensionError(
            f"the head {head.name!r} gives tokens of shape {list(token_ids.shape)} and counts of "
            f"shape {list(counts.shape)} for {num_reqs} requests with up to {width} logits: give "
            f"[{num_reqs}, {width}] and [{num_reqs}]"
        )
    fits = token_ids.dtype is torch.int64 and counts.dtype is torch.int32
    if not fits or not (token_ids.is_contiguous() and counts.is_contiguous()):
        raise ExtensionError(
            f"the head {head.name!r} gives tokens as {token_ids.dtype} of strides "
            f"{token_ids.stride()} and counts as {counts.dtype} of strides {counts.stride()}: give "
            "contiguous int64 tokens and int32 counts"
        )
