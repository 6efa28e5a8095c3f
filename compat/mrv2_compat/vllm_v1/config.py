"""From vLLM's config to the runner's."""

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from mrv2 import GraphSizes, RunnerConfig, ThinkingMarkers
from mrv2_compat.vllm_v1.kv_cache import kv_groups


def runner_config(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    device: torch.device,
    graphs: GraphSizes | None = None,
) -> RunnerConfig:
    """Return the sizes of everything that the runner allocates, and captures."""
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
    )


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
