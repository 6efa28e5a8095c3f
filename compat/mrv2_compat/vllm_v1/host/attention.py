"""The AttentionPlanner port over vLLM's attention backends and metadata builders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import AttentionGroup, prepare_kernel_block_sizes

from mrv2.batch.inputs import InputBatch
from mrv2.ports import AttentionPlanner, Captures

READ_ANY_ORDER = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"})
"""Backends whose kernels take queries of all lengths side by side. What their builders say of an
order, if anything, is for speed; without it nothing moves a request inside the batch."""


@dataclass(frozen=True, slots=True)
class VllmAttention:
    """What vLLM's forward context needs of attention: metadata and slots by layer name.

    Both are None for a forward without a KV cache.
    """

    metadata: dict[str, Any] | None
    slots: dict[str, Tensor] | None


class VllmAttentionPlanner(AttentionPlanner):
    """Builds attention metadata for every layer, one builder call for each group of alike layers.

    What may be captured, and whether decodes come first, is what the builders say.

    Args:
        groups: Attention groups of each KV group, their builders made.
        kv_cache_config: Names the layers of each KV group.
        vllm_config: Decides with a builder how much of a step it can be captured in.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        vllm_config: VllmConfig,
    ) -> None:
        self.captures = captures_of(groups, vllm_config)
        self.decode_threshold = decode_threshold_of(groups)
        self._groups = groups
        self._layer_names = [group.layer_names for group in kv_cache_config.kv_cache_groups]

    def plan(self, batch: InputBatch) -> VllmAttention:
        """Return the metadata of one step."""
        layout = batch.layout
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        query_start_loc_cpu = torch.from_numpy(layout.query_start_loc)
        seq_lens_cpu = torch.from_numpy(layout.seq_lens)
        for index, (groups, layer_names) in enumerate(
            zip(self._groups, self._layer_names, strict=True)
        ):
            common = CommonAttentionMetadata(
                query_start_loc=batch.query_start_loc,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=batch.seq_lens,
                seq_lens_cpu_upper_bound=seq_lens_cpu,
                num_reqs=layout.num_reqs,
                num_actual_tokens=layout.num_tokens,
                max_query_len=layout.max_query_len,
                max_seq_len=layout.max_seq_len,
                block_table_tensor=batch.block_tables[index],
                slot_mapping=batch.slots[index],
                positions=batch.positions,
            )
            for group in groups:
                metadata.update(dict.fromkeys(group.layer_names, group.build_metadata(common)))
            slots.update(dict.fromkeys(layer_names, batch.slots[index]))
        return VllmAttention(metadata, slots)


def captures_of(groups: Sequence[Sequence[AttentionGroup]], vllm_config: VllmConfig) -> Captures:
    """Return how much of a step the backends can be captured in.

    Which steps that is, decodes alone or those with prompts, too, is decided with the sizes.
    """
    support = (
        group.backend.get_builder_cls().get_cudagraph_support(vllm_config, group.kv_cache_spec)
        for kv_group in groups
        for group in kv_group
    )
    never = any(level == AttentionCGSupport.NEVER for level in support)
    return Captures.FORWARD if never else Captures.WHOLE


def decode_threshold_of(groups: Sequence[Sequence[AttentionGroup]]) -> int | None:
    """Return the longest query that counts as a decode, where a backend wants decodes first.

    Of several the least, since each can do with less. None where no backend wants an order.
    """
    wanted = [
        group.get_metadata_builder().reorder_batch_threshold
        for kv_group in groups
        for group in kv_group
        if group.backend.get_name() not in READ_ANY_ORDER
    ]
    return min((threshold for threshold in wanted if threshold is not None), default=None)


def attention_groups(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> list[list[AttentionGroup]]:
    """Group the layers of each KV group that can share a metadata builder.

    Those have backend, KV spec and number of query heads in common.
    """
    return [
        _groups_of(index, group, vllm_config)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def create_builders(
    groups: list[list[AttentionGroup]],
    kv_cache_config: KVCacheConfig,
    vllm_config: VllmConfig,
    device: torch.device,
) -> list[int]:
    """Make each group's metadata builder; return the kernels' block size for each KV group."""
    kernel_block_sizes: list[int] = prepare_kernel_block_sizes(kv_cache_config, groups)
    for block_size, kv_group in zip(kernel_block_sizes, groups, strict=True):
        for group in kv_group:
            group.create_metadata_builders(vllm_config, device, block_size)
    return kernel_block_sizes


def backend_names(groups: Sequence[Sequence[AttentionGroup]]) -> list[str]:
    """Return the name of every attention backend in use, each once."""
    return sorted({group.backend.get_name() for kv_group in groups for group in kv_group})


def _groups_of(
    index: int, kv_group: KVCacheGroupSpec, vllm_config: VllmConfig
) -> list[AttentionGroup]:
    layers: dict[str, Any] = get_layers_from_vllm_config(
        vllm_config, AttentionLayerBase, kv_group.layer_names
    )
    groups: dict[tuple[object, ...], AttentionGroup] = {}
    for name in kv_group.layer_names:
        spec = kv_group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        backend = layers[name].get_attn_backend()
        key = (backend.full_cls_name(), spec, getattr(layers[name], "num_heads", 0))
        if key not in groups:
            groups[key] = AttentionGroup(backend, [], spec, index)
        groups[key].layer_names.append(name)
    return list(groups.values())
