"""vLLM's own worker for this device, with V1's runner, and a desk beside it."""

import copy
import os
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from mrv2.errors import ConfigError, UnsupportedByRunner
from mrv2_compat.vllm_v1.requests.refusals import config_refusals, request_refusals
from mrv2_compat.vllm_v1.versions import copy_settled
from mrv2_diff.lockstep import device
from mrv2_diff.shadow.counters import Counters
from mrv2_diff.shadow.desk import Desk, child_command
from mrv2_diff.shadow.messages import Start
from mrv2_diff.shadow.settings import COUNTS_VAR, KV_BYTES_VAR, PREFIX, read_settings
from mrv2_diff.shadow.slices import Slice
from mrv2_diff.shadow.weights import SharedWeights, share

_COPIED_FROM_CACHE_CONFIG = ("block_size", "kv_cache_layout", "hash_block_size",
                             "cache_hit_alignment_tokens")  # fmt: skip
"""What the engine settles after a worker was built, and a copy of the config from before lacks."""

ROWS = 4
"""Times V1's: a request keeps its row until the shadow has ended it, which is after V1 has."""

logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's: no other has a handler


_Worker: Any = device.worker_class()


class ShadowWorker(_Worker):
    """vLLM's worker; mrv2 follows some of its requests in another process."""

    shadow_child = "mrv2_diff.shadow.child"
    """Module that the other process runs."""
    _desk: Desk | None = None

    def init_device(self) -> None:
        """Start the other process, which imports vLLM meanwhile, and build V1's runner."""
        refused = config_refusals(self.vllm_config)
        if refused:
            raise UnsupportedByRunner([str(refusal) for refusal in refused])
        self._shadow_config = copy.deepcopy(self.vllm_config)
        self._desk = self._open_desk()
        super().init_device()

    def determine_available_memory(self) -> int:
        """Leave the shadow its budget of device memory."""
        available = int(super().determine_available_memory())
        if device.kind() == "cpu":
            return available
        return available - self._shadow_settings.kv_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Keep the KV cache's layout for the shadow."""
        self._shadow_kv_cache_config = copy.deepcopy(kv_cache_config)
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """Hand the shadow its model once V1 is ready to serve."""
        times = super().compile_or_warm_up_model()
        if self._desk is not None:
            self._desk.start(self._start_message(), refusal)
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run V1's first half of a step, and tell the desk of it."""
        output = super().execute_model(scheduler_output)
        if self._desk is not None:
            self._desk.begin(scheduler_output)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Run V1's second half, and let the desk have its answers."""
        output = super().sample_tokens(grammar_output)
        if self._desk is None:
            return output
        found = self._desk.end(grammar_output)
        if found is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            try:
                return Overheard(output, self._desk, found)
            except TypeError as error:  # a class of outputs that this one does not know
                self._desk.abandon(f"V1's output cannot be overheard: {error}")
                return output
        self._desk.answer(found, output)
        return output

    def mrv2_shadow_report(self, wait_s: float = 0.0) -> dict[str, object]:
        """Return the counters and the fault, once the shadow is idle (an RPC).

        Args:
            wait_s: Longest time to wait for that. Steps wait meanwhile, too.
        """
        assert self._desk is not None
        is_idle = self._desk.wait_until_idle(wait_s)
        return {**self._desk.report(), "is_idle": is_idle}

    def shutdown(self) -> None:
        """End the shadow, then V1."""
        if self._desk is not None:
            self._desk.close()
        super().shutdown()

    def _open_desk(self) -> Desk:
        """Start the other process."""
        self._shadow_settings = read_settings(os.environ)
        folder = os.environ.get(COUNTS_VAR)
        return Desk(
            self._shadow_settings,
            Counters(Path(folder) if folder else None),
            child_command(self.shadow_child, self._shadow_settings.priority),
            child_environment(dict(os.environ)),
        )

    def _start_message(self) -> Start:
        config = self._shadow_config
        copy_settled(self.vllm_config.cache_config, config.cache_config, _COPIED_FROM_CACHE_CONFIG)
        kv_bytes = self._shadow_settings.kv_bytes
        max_num_reqs = ROWS * self.model_runner.max_num_reqs
        num_blocks = _num_blocks(
            self.model_runner, self._shadow_kv_cache_config, kv_bytes, max_num_reqs
        )
        return Start(
            vllm_config=config,
            kv_cache_config=self._shadow_kv_cache_config,
            num_blocks=num_blocks,
            max_num_reqs=min(max_num_reqs, num_blocks - 1),  # each has a block at least
            kv_bytes=kv_bytes,
            weights=_share(self.model_runner.get_model()),
            platform=device.kind(),
            local_rank=self.local_rank,
        )


def overheard_class(base: Any) -> Any:
    """Return a class of V1's outputs from which a desk learns the answers when vLLM asks for them.

    Its arguments are V1's output, the shadow's desk, and the slice of its step.

    Args:
        base: vLLM's `AsyncModelRunnerOutput`. Whatever else a version of vLLM has there or above,
            abstract or not, is read from V1's output.
    """

    def begin(self: Any, output: Any, desk: Desk, found: Slice) -> None:
        self._output, self._desk, self._found = output, desk, found

    def get_output(self: Any) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self._output.get_output()
        self._desk.answer(self._found, output)
        return output

    def passed_on(name: str) -> property:
        return property(lambda self: getattr(self._output, name))

    names = [name for name in dir(base) if not name.startswith(("__", "_abc_"))]
    own = {
        "__init__": begin,
        "get_output": get_output,
        "__getattr__": lambda self, name: getattr(self._output, name),
    }
    passed = {name: passed_on(name) for name in names}
    return type(base)("Overheard", (base,), {**passed, **own})


Overheard = overheard_class(AsyncModelRunnerOutput)


def refusal(params: Any) -> str | None:
    """Return why mrv2 does not take a request."""
    reasons = request_refusals(params)
    return "; ".join(map(str, reasons)) if reasons else None


def child_environment(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of the shadow's process, which has mrv2's worker alone."""
    threads = ("OMP_", "KMP_", "GOMP_")  # they name V1's cores
    dropped = (PREFIX, "MRV2_TRACE", "PROMETHEUS_MULTIPROC_DIR", *threads)
    kept = {name: value for name, value in environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "MRV2_RUNNER": "mrv2",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "OMP_NUM_THREADS": "1",
    }


def _num_blocks(runner: Any, kv_cache_config: Any, kv_bytes: int, max_num_reqs: int) -> int:
    """Return how many blocks fit the budget, but no more than can be used.

    Raises:
        ConfigError: None does, beside vLLM's null block.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in runner.kv_caches
    }
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    block_bytes = num_bytes // kv_cache_config.num_blocks
    longest = sum(
        -(-runner.max_model_len // group.kv_cache_spec.block_size)
        for group in kv_cache_config.kv_cache_groups
    )
    fitting = min(kv_bytes // block_bytes, 1 + max_num_reqs * longest)
    if fitting < 2:
        raise ConfigError(
            f"{KV_BYTES_VAR}={kv_bytes}: a KV block of this model takes {block_bytes} bytes and "
            f"the shadow needs two; set it to {2 * block_bytes} at least"
        )
    return int(fitting)


def _share(module: Any) -> SharedWeights:
    try:
        return share(module)
    except Exception as error:  # noqa: BLE001 - the shadow's faults are contained
        logger.warning("shadow: V1's weights cannot be shared (%s); it loads its own", error)
        return SharedWeights()
