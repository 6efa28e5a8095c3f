"""From vLLM's config to the runner's."""

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from mrv2 import RunnerConfig
from mrv2_compat.vllm_v1.kv_cache import kv_groups


def runner_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, device: torch.device
) -> RunnerConfig:
    """Return the sizes of everything that the runner allocates."""
    scheduler = vllm_config.scheduler_config
    return RunnerConfig(
        device=device,
        max_num_reqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        kv_groups=kv_groups(kv_cache_config, vllm_config),
    )
