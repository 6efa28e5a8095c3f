"""From vLLM's config to the runner's."""

import torch
from vllm.config import VllmConfig
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.kv_cache_interface import KVCacheConfig

from mrv2 import GraphSizes, RunnerConfig, ThinkingMarkers
from mrv2_compat.vllm_v1.host.kv_cache import kv_groups

LARGEST_TABLE = 32 << 20
"""Bytes of the table of all tokens that may lie on the device. Reading a whole history over the
bus, as penalties do, costs time; a table of 256 requests of 131,072 tokens would cost 128 MiB
instead, which are worth more as KV blocks."""


def runner_config(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    device: torch.device,
    graphs: GraphSizes | None = None,
    max_drafts: int = 0,
) -> RunnerConfig:
    """Return the sizes of everything that the runner allocates, and captures.

    Args:
        vllm_config: The engine's.
        kv_cache_config: The KV cache that there is.
        device: Where the model runs.
        graphs: What is captured; nothing by default.
        max_drafts: Tokens that a request may run in one step behind its known ones.
    """
    scheduler = vllm_config.scheduler_config
    return RunnerConfig(
        device=device,
        max_num_reqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        kv_groups=kv_groups(kv_cache_config, vllm_config),
        logprobs_mode=vllm_config.model_config.logprobs_mode,
        thinking=thinking_markers(vllm_config),
        graphs=graphs or GraphSizes(),
        max_drafts=max_drafts,
        maps_tokens=_maps_tokens(vllm_config, device),
    )


def _maps_tokens(vllm_config: VllmConfig, device: torch.device) -> bool:
    rows, columns = (
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.model_config.max_model_len,
    )
    is_large = 4 * rows * columns > LARGEST_TABLE
    return device.type == "cuda" and is_large and bool(is_uva_available())


def thinking_markers(vllm_config: VllmConfig) -> ThinkingMarkers | None:
    """Return the token sequences around the model's thinking; None where none are configured."""
    reasoning = vllm_config.reasoning_config
    if reasoning is None or not reasoning.enabled:
        return None
    start, end = reasoning.reasoning_start_token_ids, reasoning.reasoning_end_token_ids
    if not start or not end:
        return None
    natural_end = reasoning.natural_reasoning_end_token_ids or end
    return ThinkingMarkers(start=tuple(start), end=tuple(end), natural_end=tuple(natural_end))
