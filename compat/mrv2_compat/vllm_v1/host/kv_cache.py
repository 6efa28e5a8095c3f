"""KV caches: what each layer needs, their memory, and the scheduler's block operations."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
)
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.utils import (
    AttentionGroup,
    KVBlockZeroer,
    allocate_kv_cache,
    bind_kv_cache,
    copy_kv_cache_blocks_inplace,
    customize_attention_spec,
    map_kv_caches_to_kernel_blocks,
)

from mrv2 import CapacityError, KVGroup


def kv_cache_spec(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return what each attention layer of the loaded model stores for a block, by layer name."""
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs: dict[str, KVCacheSpec] = {}
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(vllm_config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        if spec is not None:
            specs[name] = spec
    return specs


def kv_groups(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[KVGroup, ...]:
    """Return the KV groups as the runner sees them: sizes of a block, a request and the cache."""
    max_model_len = vllm_config.model_config.max_model_len
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        max_blocks = get_block_table_width(
            spec.max_num_blocks_per_req(vllm_config, max_model_len), spec.block_size
        )
        groups.append(
            KVGroup(
                block_size=spec.block_size,
                max_blocks=max_blocks,
                num_blocks=kv_cache_config.num_blocks,
            )
        )
    return tuple(groups)


class KVCaches:
    """The KV memory of every layer, bound to the layers' forward context.

    Args:
        kv_cache_config: vLLM's; says which layers share which memory.
        vllm_config: The config that the model was built with.
        groups: Attention groups, with builders.
        kernel_block_sizes: Block size of the kernels, for each KV group.
        device: Where the memory is.
        allocation_context: Entered around the allocation, for example a memory pool.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        vllm_config: VllmConfig,
        groups: list[list[AttentionGroup]],
        kernel_block_sizes: list[int],
        device: torch.device,
        allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self._num_blocks = kv_cache_config.num_blocks
        self._groups = [group for kv_group in groups for group in kv_group]
        self._kernel_block_sizes = kernel_block_sizes
        self._layers = vllm_config.compilation_config.static_forward_context
        self._device = device
        self._zeroer: KVBlockZeroer | None = None
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        with allocation_context or nullcontext():
            by_layer = allocate_kv_cache(kv_cache_config, device, layout, kernel_block_sizes)
        bind_kv_cache(
            by_layer,
            self._layers,
            self.tensors,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
            layer_kv_caches=map_kv_caches_to_kernel_blocks(by_layer, self._groups),
        )

    def prepare_zeroing(self) -> None:
        """Compute the addresses that `apply` zeroes blocks at.

        vLLM asks for it if a layer needs its new blocks zeroed.
        """
        if self._device.type == "cuda":
            self._zeroer = KVBlockZeroer(
                self._device, self._groups, self._kernel_block_sizes, self._layers, self._num_blocks
            )

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Queue the step's block operations.

        Zero first, then copy, so that a copy into a new block is not wiped.

        Raises:
            CapacityError: One names a block that the cache does not have. None was queued: a kernel
                would write beside the cache.
        """
        self._check(scheduler_output)
        if scheduler_output.new_block_ids_to_zero:
            self._zero(scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(
                self.tensors, self._num_blocks, scheduler_output.kv_cache_block_copies
            )

    def _check(self, scheduler_output: SchedulerOutput) -> None:
        copies = scheduler_output.kv_cache_block_copies or ()
        for what, block_ids in (
            ("to be zeroed", scheduler_output.new_block_ids_to_zero or ()),
            ("to be copied from", [copy.src_block_id for copy in copies]),
            ("to be copied to", [copy.dst_block_id for copy in copies]),
        ):
            for block_id in block_ids:
                if not 0 <= block_id < self._num_blocks:
                    raise CapacityError(
                        f"block {block_id} is {what}; the cache has {self._num_blocks} blocks"
                    )

    def _zero(self, block_ids: Sequence[int]) -> None:
        if self._zeroer is not None:
            self._zeroer.zero_block_ids(list(block_ids))
            return
        for cache in self.tensors:
            ratio = cache.shape[0] // self._num_blocks
            for block_id in block_ids:
                cache[block_id * ratio : (block_id + 1) * ratio].zero_()
