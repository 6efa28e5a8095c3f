"""The shadow's runner: mrv2's worker, built as vLLM's executor builds one."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.worker_base import WorkerWrapperBase

from mrv2_compat.platforms import WORKERS
from mrv2_compat.vllm_v1 import versions
from mrv2_compat.vllm_v1.runner import VllmRunner
from mrv2_diff.shadow.follower import DrawTrace, Follower
from mrv2_diff.shadow.messages import Ready, Start
from mrv2_diff.shadow.slices import Room
from mrv2_diff.shadow.weights import adopt

_SETTLED = ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens")
"""What the engine settles for a KV cache, whatever its size."""


def build(start: Start, on_step: Callable[[], None]) -> tuple[Follower, Ready]:
    """Load the model, adopt V1's weights, and allocate a KV cache.

    Args:
        start: The desk's first message.
        on_step: As for `Follower`.

    Raises:
        UnsupportedByRunner: mrv2 does not serve the model's KV cache or attention backend.
    """
    config: VllmConfig = start.vllm_config
    _adapt(config, start)
    with set_current_vllm_config(config):
        wrapper = WorkerWrapperBase(rpc_rank=0)
        wrapper.init_worker(
            all_kwargs=[
                {
                    "vllm_config": config,
                    "local_rank": start.local_rank,
                    "rank": 0,
                    "distributed_init_method": get_file_store_init_method(),
                    "is_driver_worker": True,
                }
            ]
        )
        wrapper.init_device()
        worker: Any = wrapper.worker
        trace = DrawTrace()
        runner = VllmRunner(worker.vllm_config, worker.device, trace)
        worker.model_runner = runner
        wrapper.load_model()
        num_shared, num_own = adopt(runner.get_model(), start.weights)
        if worker.device.type == "cpu":
            runner.warming_up_model()
        cache = _kv_cache(config, runner, start)
        for name in _SETTLED:
            setattr(cache, name, getattr(start.kv_cache_config, name))
        worker.initialize_from_config(cache)
        worker.compile_or_warm_up_model()
    room = _room(config, cache)
    follower = Follower(
        runner,
        trace,
        room,
        config.scheduler_config.max_num_batched_tokens,
        precision(config.model_config.dtype, start.platform),
        returns_raw=config.model_config.logprobs_mode == "raw_logprobs",
        on_step=on_step,
    )
    return follower, Ready(room=room, num_shared=num_shared, num_own=num_own)


def precision(dtype: torch.dtype, platform: str) -> torch.dtype:
    """Return the dtype whose spacings say how far rounding moves a model's logits.

    Triton's attention multiplies float32 as TF32 on a CUDA device, which has float16's bits of
    fraction: V1 is up to 0.95 of its spacings from itself there, which are 7,745 of float32.
    """
    return torch.float16 if (dtype, platform) == (torch.float32, "cuda") else dtype


def _adapt(config: VllmConfig, start: Start) -> None:
    """Make a config that V1 has no part in any more the shadow's."""
    config.parallel_config.worker_cls = WORKERS[start.platform]
    config.scheduler_config.async_scheduling = False
    config.scheduler_config.max_num_seqs = start.max_num_reqs
    config.cache_config.gpu_memory_utilization = 1e-4  # vLLM refuses a device that it cannot have
    config.cache_config.kv_cache_memory_bytes = start.kv_bytes
    config.cache_config.num_gpu_blocks = start.num_blocks
    config.cache_config.num_gpu_blocks_override = start.num_blocks
    # Graphs take memory outside the budget, and the shadow need not be fast.
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def _kv_cache(config: VllmConfig, runner: VllmRunner, start: Start) -> KVCacheConfig:
    """Return the layout of a KV cache with V1's groups and the shadow's number of blocks."""
    runner.get_kv_cache_spec()  # for its refusals
    cache: KVCacheConfig = versions.kv_cache_config(
        config, start.kv_cache_config.kv_cache_groups, start.num_blocks
    )
    return cache


def _room(config: VllmConfig, cache: KVCacheConfig) -> Room:
    return Room(
        num_blocks=cache.num_blocks - 1,  # block 0 is vLLM's null block
        block_sizes=tuple(group.kv_cache_spec.block_size for group in cache.kv_cache_groups),
        max_num_reqs=config.scheduler_config.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
    )
