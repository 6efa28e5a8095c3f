"""What is asked for is checked before an engine is started, and the engine can hold it."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.device_bench.channel import environ_of
from mrv2_diff.device_bench.options import BLOCK_SIZES, Options
from mrv2_diff.models.shapes import SHAPES, write_shape


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"runners": ("v3",)}, "no runner 'v3'; choose from v1, mrv2, vllm-v2"),
        ({"runners": ("v1", "v1")}, "named twice"),
        ({"parts": ("speed",)}, "no part 'speed'"),
        ({"parts": ()}, "nothing to do"),
        ({"batches": (0,)}, "batch is 0"),
        ({"churn": 0.7, "parts": ("churn",)}, "churn is 0.7"),
        ({"steps": 1}, "steps is 1"),
        ({"model": "/nowhere"}, "no folder with config.json"),
        ({"engine_of": {"v9": {}}}, "no runner of --engine-of 'v9'"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**wrong)


def test_three_engines_share_the_device() -> None:
    arguments = Options().engine_arguments("v1", "cuda", "model", alone=False)
    assert 3 * arguments["gpu_memory_utilization"] < 0.9
    assert arguments["num_gpu_blocks_override"] > 0
    alone = Options().engine_arguments("v1", "cuda", "model", alone=True)
    assert alone["gpu_memory_utilization"] == 0.9
    assert "num_gpu_blocks_override" not in alone


def test_an_engine_can_hold_every_point() -> None:
    options = Options(parts=("steady", "churn", "growth"))
    arguments = options.engine_arguments("mrv2", "cuda", "model", alone=False)
    for task in options.tasks():
        assert task.point is not None
        tokens = task.point.tokens_held(options.steps, arguments["max_num_batched_tokens"])
        assert tokens <= arguments["max_model_len"]
        assert task.point.most_running <= arguments["max_num_seqs"]
        blocks = task.point.most_running * math.ceil(tokens / BLOCK_SIZES["cuda"])
        assert blocks < arguments["num_gpu_blocks_override"]
    assert arguments["compilation_config"]["cudagraph_capture_sizes"][-1] == 1024


def test_three_kv_caches_fit_beside_each_other() -> None:
    options = Options(parts=("steady", "throughput", "growth"))
    blocks = options.engine_arguments("v1", "cuda", "m", alone=False)["num_gpu_blocks_override"]
    shape = SHAPES["qwen3-0.6b"]
    per_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 128
    assert 3 * blocks * BLOCK_SIZES["cuda"] * per_token < 120 * 2**30


def test_one_request_of_the_whole_length_fits() -> None:
    options = Options(parts=("steady",), batches=(1,))
    arguments = options.engine_arguments("v1", "cuda", "m", alone=False)
    tokens = arguments["num_gpu_blocks_override"] * arguments["block_size"]
    assert tokens > arguments["max_model_len"] == 2048


def test_a_user_has_the_last_word() -> None:
    options = Options(engine={"seed": 5}, engine_of={"mrv2": {"enforce_eager": True}})
    assert options.engine_arguments("v1", "cuda", "m", alone=False)["seed"] == 5
    assert "enforce_eager" not in options.engine_arguments("v1", "cuda", "m", alone=False)
    assert options.engine_arguments("mrv2", "cuda", "m", alone=False)["enforce_eager"] is True


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_transformers_reads_a_shape(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(write_shape(tmp_path / name, name))
    assert config.num_hidden_layers == SHAPES[name]["num_hidden_layers"]
    assert str(config.dtype) == "torch.bfloat16"


def test_another_installation_takes_part_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="no runner 'before'; choose from v1, mrv2, vllm-v2"):
        Options(runners=("mrv2", "before"))
    options = Options(runners=("mrv2", "before"), before="/older")
    monkeypatch.setenv("PYTHONPATH", "/newer")
    assert environ_of("before", options.before)["PYTHONPATH"] == f"/older{os.pathsep}/newer"
    assert environ_of("before", options.before)["MRV2_RUNNER"] == "mrv2"
    assert "PYTHONPATH" not in environ_of("mrv2", options.before)
