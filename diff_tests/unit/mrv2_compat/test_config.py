"""Sizes that the runner is built for, as vLLM's config tells them."""

from types import SimpleNamespace

import pytest
import torch

from mrv2_compat.vllm_v1.host import config
from mrv2_compat.vllm_v1.host.config import LARGEST_TABLE, _maps_tokens

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("device", "has_uva", "num_reqs", "maps"),
    [
        ("cuda", True, LARGEST_TABLE // 4 // 1024, False),
        ("cuda", True, LARGEST_TABLE // 4 // 1024 + 1, True),
        ("cuda", False, LARGEST_TABLE, False),
        ("cpu", True, LARGEST_TABLE, False),
    ],
)
def test_a_large_table_of_tokens_lies_on_the_host_where_a_gpu_can_reach_it(
    monkeypatch: pytest.MonkeyPatch, device: str, has_uva: bool, num_reqs: int, maps: bool
) -> None:
    monkeypatch.setattr(config, "is_uva_available", lambda: has_uva)
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=num_reqs),
        model_config=SimpleNamespace(max_model_len=1024),
    )
    assert _maps_tokens(vllm_config, torch.device(device)) is maps
