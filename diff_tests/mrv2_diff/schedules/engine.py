"""vLLM's scheduler and our runner of HashLM, without a worker, an engine or a checkpoint."""

import copy
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from mrv2_diff import process

process.prepare()

# E402: vLLM reads the environment when it is imported.
import torch  # noqa: E402
from vllm.config import ReasoningConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm.v1.structured_output.backend_types import StructuredOutputBackend  # noqa: E402

from mrv2 import Runner  # noqa: E402
from mrv2_compat.vllm_v1.features.feature import Feature  # noqa: E402
from mrv2_compat.vllm_v1.features.registry import FEATURES  # noqa: E402
from mrv2_compat.vllm_v1.host.config import runner_config  # noqa: E402
from mrv2_compat.vllm_v1.host.kv_cache import KVCaches  # noqa: E402
from mrv2_compat.vllm_v1.runner import VllmRunner  # noqa: E402
from mrv2_diff.models.hashlm import HashLM  # noqa: E402
from mrv2_diff.schedules.actions import Setup  # noqa: E402
from mrv2_diff.schedules.grammars import MadeUpBackend  # noqa: E402

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A configuration that vLLM accepts. Nothing of the model but its vocabulary is used."""
OPENS_THINKING, CLOSES_THINKING = 29, (30, 31)
"""Tokens that begin and end a thinking section, where a setup has any."""
_NOISE = 0x5DEECE66D


class HashRunner(VllmRunner):
    """The runner that vLLM's worker would drive, with HashLM in the place of a checkpoint.

    Args:
        vllm_config: The engine's.
        windows: Attention windows, as for `HashLM`.
        features: Those that the engine may use.
    """

    lm: HashLM

    def __init__(
        self,
        vllm_config: Any,
        windows: tuple[int | None, ...],
        features: Sequence[Feature] = FEATURES,
    ) -> None:
        super().__init__(vllm_config, torch.device("cpu"), features=features)
        self._windows = windows

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *_: Any, **__: Any) -> None:
        """Build HashLM's caches and the core runner."""
        self.kv_cache_config = kv_cache_config
        self._kv = cast("KVCaches", _HashCaches())
        self._start_core(kv_cache_config)

    @property
    def core(self) -> Runner:
        """The runner behind the adapter."""
        return self._require_core()

    def _build_core(self, kv_cache_config: KVCacheConfig) -> Runner:
        config = runner_config(self.vllm_config, kv_cache_config, self.device)
        self.lm = HashLM(config, kv_cache_config.num_blocks, self._windows)
        return self._core_over(self.lm, self.lm, kv_cache_config)


class _HashCaches:
    """Block operations of HashLM's caches: none is ever asked for of attention without state."""

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Refuse what would be lost."""
        assert not scheduler_output.new_block_ids_to_zero
        assert not scheduler_output.kv_cache_block_copies


class ScheduledEngine(ABC):
    """A scheduler with a runner.

    Args:
        setup: Sizes of the scheduler.
        config: vLLM's, of the scheduler and the runner.
        kv_cache_config: The blocks that the scheduler gives out.
        runner: Has at least so many blocks, and no request.
    """

    eos_token_id: int | None = None
    """Token that vLLM's front end adds to those that `min_tokens` holds back."""

    def __init__(
        self, setup: Setup, config: Any, kv_cache_config: KVCacheConfig, runner: VllmRunner
    ) -> None:
        scheduler_class = AsyncScheduler if setup.is_async else Scheduler
        self.scheduler: Any = scheduler_class(
            config,
            kv_cache_config,
            _grammars(config, setup.vocab_size),
            block_size=setup.block_size,
            hash_block_size=setup.block_size,
        )
        assert not self.scheduler.use_v2_model_runner, "V1-mode scheduling is what is translated"
        self.runner: Any = runner
        init_none_hash(sha256)
        self.block_hasher: Any = None
        if setup.prefix_caching:
            self.block_hasher = get_request_block_hasher(setup.block_size, sha256)

    @property
    def core(self) -> Runner:
        """The runner behind the adapter."""
        core: Runner = self.runner._require_core()
        return core

    @abstractmethod
    def spoil(self, block: int, offset: int) -> None:
        """Overwrite what a slot of the first KV group holds: what failed to load is not there."""


class HashEngine(ScheduledEngine):
    """A scheduler and a runner of HashLM.

    Args:
        setup: Sizes of both.
        runner_class: Built in place of HashRunner by tests that plant a fault.
    """

    def __init__(self, setup: Setup, runner_class: Callable[..., HashRunner] = HashRunner) -> None:
        torch.set_num_threads(1)  # a tiny model's operations are too small to share
        config = _config(setup)
        kv_cache_config = _kv_cache_config(setup)
        runner = runner_class(config, setup.windows)
        runner.initialize_kv_cache(kv_cache_config)
        super().__init__(setup, config, kv_cache_config, runner)
        self._block_size = setup.block_size

    def spoil(self, block: int, offset: int) -> None:
        """Overwrite a slot with noise."""
        self.runner.lm.caches[0][block * self._block_size + offset] = _NOISE


def _grammars(config: Any, vocab_size: int) -> StructuredOutputManager:
    manager = StructuredOutputManager(config)
    manager.backend = cast("StructuredOutputBackend", MadeUpBackend(vocab_size))
    return manager


def _config(setup: Setup) -> Any:
    config = copy.deepcopy(_accepted_config(setup.vocab_size))
    settle(config, setup)
    return config


def settle(config: Any, setup: Setup) -> None:
    """Give vLLM's configuration the sizes of a setup."""
    scheduler = config.scheduler_config
    scheduler.max_num_seqs = setup.max_num_reqs
    scheduler.max_num_batched_tokens = setup.max_num_tokens
    # vLLM turns it off on a CPU, where it gains nothing; what it schedules is what we are after.
    scheduler.async_scheduling = setup.is_async
    scheduler.policy = "priority" if setup.by_priority else "fcfs"
    config.model_config.max_model_len = setup.max_model_len
    config.cache_config.block_size = setup.block_size
    config.cache_config.num_gpu_blocks = setup.num_blocks
    config.cache_config.enable_prefix_caching = setup.prefix_caching
    if setup.thinking:
        config.reasoning_config = _marked()


def _marked() -> ReasoningConfig:
    """Return vLLM's configuration of thinking, without the tokenizer that it would ask."""
    marked = ReasoningConfig()
    marked._reasoning_start_token_ids = [OPENS_THINKING]
    marked._reasoning_end_token_ids = list(CLOSES_THINKING)
    marked._natural_reasoning_end_token_ids = list(CLOSES_THINKING)
    marked._enabled = True
    return marked


@cache
def _accepted_config(vocab_size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_MODEL, "vocab_size": vocab_size}))
        args = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True, seed=0)
        return args.create_engine_config()


def _kv_cache_config(setup: Setup) -> KVCacheConfig:
    sizes = {
        "block_size": setup.block_size,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    groups = [
        KVCacheGroupSpec(
            [f"layer {index}"],
            FullAttentionSpec(**sizes)
            if window is None
            else SlidingWindowSpec(**sizes, sliding_window=window),
        )
        for index, window in enumerate(setup.windows)
    ]
    return KVCacheConfig(num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
