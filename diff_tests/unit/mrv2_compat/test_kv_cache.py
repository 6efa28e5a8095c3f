"""Block operations of a step: new blocks are zeroed before others are copied into them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrv2 import CapacityError

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 4


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_a_copy_into_a_new_block_is_not_wiped(kernel_blocks: int) -> None:
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    from mrv2_compat.vllm_v1.host.kv_cache import KVCaches

    caches: Any = KVCaches.__new__(KVCaches)
    caches._num_blocks, caches._zeroer = NUM_BLOCKS, None
    caches.tensors = [
        (torch.arange(NUM_BLOCKS * kernel_blocks) + 10 * layer + 1.0)[:, None].repeat(1, 3)
        for layer in range(2)
    ]
    before = [tensor.clone() for tensor in caches.tensors]
    step: Any = SimpleNamespace(
        new_block_ids_to_zero=[2, 3],
        kv_cache_block_copies=[KVCacheBlockCopy(src_block_id=1, dst_block_id=3)],
    )
    caches.apply(step)
    for tensor, old in zip(caches.tensors, before, strict=True):
        blocks, held = tensor.view(NUM_BLOCKS, -1), old.view(NUM_BLOCKS, -1)
        assert torch.equal(blocks[:2], held[:2])
        assert not blocks[2].any()
        assert torch.equal(blocks[3], held[1])


@pytest.mark.parametrize(
    ("zeroed", "copied", "message"),
    [
        ([2, NUM_BLOCKS], None, "block 4 is to be zeroed; the cache has 4 blocks"),
        ([-1], None, "block -1 is to be zeroed; the cache has 4 blocks"),
        ([2], (NUM_BLOCKS, 1), "block 4 is to be copied from; the cache has 4 blocks"),
        ([2], (1, -1), "block -1 is to be copied to; the cache has 4 blocks"),
    ],
)
def test_a_block_that_the_cache_does_not_have_is_refused_before_any_is_written(
    zeroed: list[int], copied: tuple[int, int] | None, message: str
) -> None:
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    from mrv2_compat.vllm_v1.host.kv_cache import KVCaches

    caches: Any = KVCaches.__new__(KVCaches)
    caches._num_blocks, caches._zeroer = NUM_BLOCKS, None
    caches.tensors = [torch.ones(NUM_BLOCKS, 3)]
    step: Any = SimpleNamespace(
        new_block_ids_to_zero=zeroed,
        kv_cache_block_copies=[] if copied is None else [KVCacheBlockCopy(*copied)],
    )
    with pytest.raises(CapacityError, match=message):
        caches.apply(step)
    assert (caches.tensors[0] == 1).all()


def test_a_minimal_cache_has_the_blocks_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from mrv2_compat.vllm_v1.host.graphs import minimal_kv_cache
    from mrv2_diff.schedules.actions import Setup
    from mrv2_diff.schedules.engine import HashEngine

    config = HashEngine(Setup()).runner.vllm_config
    # The engine's core settles it before memory is measured.
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", "LBNHC")
    asked = config.cache_config.num_gpu_blocks_override
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = minimal_kv_cache(config, {"layer.0": spec, "layer.1": spec}, 3)
    assert cache.num_blocks == 3
    assert [group.layer_names for group in cache.kv_cache_groups] == [["layer.0", "layer.1"]]
    assert config.cache_config.num_gpu_blocks_override == asked
