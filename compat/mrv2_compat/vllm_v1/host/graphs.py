"""CUDA graphs as vLLM configures them: which sizes are captured, and how much memory that takes.

The core captures whole decode steps. Where vLLM compiles a model in pieces, the pieces capture and
replay themselves, and the core only pads their inputs.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import graph_capture
from vllm.logger import init_logger
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.utils import AttentionGroup

from mrv2 import ConfigError, GraphSizes
from mrv2_compat.vllm_v1 import versions

# A child of vLLM's logger: no other has a handler.
_logger = init_logger(f"vllm.{__name__}")


def graph_sizes(
    vllm_config: VllmConfig,
    groups: Sequence[Sequence[AttentionGroup]],
    kv_cache_config: KVCacheConfig,
    *,
    is_profiling: bool,
    max_drafts: int = 0,
) -> GraphSizes:
    """Resolve vLLM's CUDA graph mode for the attention backends, and return what it captures.

    vLLM's own rules say which mode the backends allow; a mode that it changes, it warns of.

    Args:
        vllm_config: The engine's; the resolved mode is written into it, as V1 does.
        groups: Attention groups of each KV group.
        kv_cache_config: The KV cache that there is now.
        is_profiling: Whether this is the small cache that memory is profiled with.
        max_drafts: Tokens that a request may run in one step behind its known ones.

    Raises:
        ConfigError: The backends cannot do what was asked for.
    """
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    support = {
        group.backend.get_builder_cls().get_cudagraph_support(
            vllm_config, group.kv_cache_spec
        ): group.backend.__name__
        for kv_group in groups
        for group in kv_group
    }
    least = min(support, key=lambda level: level.value)
    try:
        mode = compilation.resolve_cudagraph_mode_and_sizes(
            least,
            support[least],
            uniform_decode_query_len=1 + max_drafts,
            use_v2_model_runner=False,
            kv_cache_config=kv_cache_config,
            max_num_reqs=scheduler.max_num_seqs,
            is_profiling=is_profiling,
        )
    except ValueError as fault:
        raise ConfigError(
            f"CUDA graphs: {fault}; set --enforce-eager or another -cc.cudagraph_mode"
        ) from fault
    sizes = compilation.cudagraph_capture_sizes
    if mode == CUDAGraphMode.NONE or not sizes:
        return GraphSizes()
    decodes: tuple[int, ...] = ()
    if mode.decode_mode() == CUDAGraphMode.FULL:
        decodes = _decode_sizes(sizes, scheduler.max_num_seqs)
    mixed: tuple[int, ...] = ()
    if mode.mixed_mode() == CUDAGraphMode.FULL:
        mixed = tuple(size for size in sizes if size <= scheduler.max_num_batched_tokens)
    forwards: tuple[int, ...] = ()
    if mode.mixed_mode() == CUDAGraphMode.PIECEWISE:
        forwards = tuple(size for size in sizes if size <= scheduler.max_num_batched_tokens)
    return GraphSizes(decodes=decodes, mixed=mixed, forwards=forwards)


def _decode_sizes(sizes: Sequence[int], max_num_seqs: int) -> tuple[int, ...]:
    """Return the capture sizes that a batch of requests can have.

    The largest batch is among them where a larger size is listed, so that it is captured, too.
    """
    fitting = [size for size in sizes if size <= max_num_seqs]
    if max(sizes) > max_num_seqs and max_num_seqs not in fitting:
        fitting.append(max_num_seqs)
    return tuple(fitting)


def capture(work: Callable[[], None], device: torch.device) -> int:
    """Capture CUDA graphs under the conditions that vLLM's parts want.

    Args:
        work: Captures them.
        device: A CUDA device.

    Returns:
        Bytes of device memory that it took.
    """
    with freeze_gc_for_cudagraph_capture(), graph_capture(device=device), _capturing():
        before = _free_bytes(device)
        work()
        taken = before - _free_bytes(device)
    return max(taken, 0)


def release_pieces() -> None:
    """Let go of the graphs that the pieces of compiled models captured."""
    CUDAGraphWrapper.clear_all_graphs()


def minimal_kv_cache(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int
) -> KVCacheConfig:
    """Return the layout of a KV cache of a few blocks, to capture graphs over before there is room.

    Args:
        vllm_config: The engine's.
        specs: What each layer stores, by name.
        num_blocks: Blocks of each group.
    """
    config: KVCacheConfig = versions.kv_cache_config(
        vllm_config, versions.kv_cache_groups(vllm_config, specs), num_blocks
    )
    return config


@contextmanager
def _capturing() -> Iterator[None]:
    set_cudagraph_capturing_enabled(True)
    try:
        yield
    finally:
        set_cudagraph_capturing_enabled(False)


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of the device, what torch only keeps in reserve given back."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free
