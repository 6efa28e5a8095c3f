"""vLLM's door to recording: an entry point of the group `vllm.general_plugins`.

vLLM calls it in every process. Where `MRV2_TRACE` names a file, the step at which vLLM hands a
worker its KV cache is wrapped: by then model and configuration are final, no step was run yet, and
it is the same call for every executor. A method of one class of vLLM is replaced, which is looked
up at each call, so the order of imports does not matter; if it is not there, that is an error.

Without the variable nothing is imported and nothing replaced.
"""

import os
from pathlib import Path
from typing import Any

TRACE_VAR = "MRV2_TRACE"
PRIVATE_VAR = "MRV2_TRACE_PRIVATE"
ENTRY_POINT = "mrv2_trace"
"""Its name, for a `VLLM_PLUGINS` that lists plugins."""

_DONE = "_mrv2_trace"


def register() -> None:
    """Have workers of this process recorded, if `MRV2_TRACE` asks for it.

    Raises:
        ConfigError: A variable has a value that cannot act, or vLLM has no such worker.
    """
    if TRACE_VAR not in os.environ:
        return
    from mrv2.errors import ConfigError

    wanted(os.environ)
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapped = getattr(WorkerWrapperBase, "initialize_from_config", None)
    if wrapped is None:
        raise ConfigError(
            f"{TRACE_VAR} cannot act: this vLLM's WorkerWrapperBase has no initialize_from_config; "
            "install a supported version"
        )
    if getattr(wrapped, _DONE, False):
        return  # vLLM may call a plugin more than once in a process

    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> None:
        wrapped(self, kv_cache_configs)
        _record(self, kv_cache_configs[self.global_rank])

    setattr(initialize_from_config, _DONE, True)
    WorkerWrapperBase.initialize_from_config = initialize_from_config


def wanted(environ: "os._Environ[str] | dict[str, str]") -> tuple[Path, bool]:
    """Return the file to write, and whether contents become noise.

    Raises:
        ConfigError: A value cannot act.
    """
    from mrv2.errors import ConfigError

    name, private = environ[TRACE_VAR], environ.get(PRIVATE_VAR, "0")
    if not name:
        raise ConfigError(f"{TRACE_VAR} is empty: name a file, or unset it")
    if private not in ("0", "1"):
        raise ConfigError(f"{PRIVATE_VAR}={private!r} is neither 0 nor 1")
    return Path(name), private == "1"


def _record(wrapper: Any, kv_cache_config: Any) -> None:
    from vllm.logger import init_logger

    from mrv2_diff.traces.facts import head_of
    from mrv2_diff.traces.recorder import Recorder

    path, is_private = wanted(os.environ)
    worker = wrapper.worker
    head = head_of(wrapper.vllm_config, kv_cache_config, worker.model_runner, is_private=is_private)
    logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's logger: no other has a handler
    recorder = Recorder(path, head, lambda text: logger.warning("%s: %s", path, text))
    recorder.attach(worker)
    logger.info("recording %s into %s", head.runner_class, path)
