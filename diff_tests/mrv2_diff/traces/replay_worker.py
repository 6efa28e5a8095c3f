"""vLLM's worker with the runner of a replay in it; no step comes from vLLM's scheduler.

The class is made when it is first asked for: which one depends on runner and device. The head that
the KV cache must agree with is put into `EXPECTED` before the engine starts.
"""

import copy
import logging
from functools import cache
from typing import Any
from unittest import mock

from mrv2_diff.lockstep import device
from mrv2_diff.lockstep.subjects import Mrv2Subject, StepCopies, Subject, V1Subject
from mrv2_diff.traces.events import KVFacts, KVGroupFacts
from mrv2_diff.traces.facts import differences, group_facts, kv_facts

EXPECTED: list[KVFacts] = []
_logger = logging.getLogger(f"vllm.{__name__}")


class KVCacheDiffersError(ValueError):
    """The KV cache is not the recorded one."""


def worker_name(runner: str) -> str:
    """Return the dotted name of the worker of a replay in `v1` or `mrv2`."""
    return f"{__name__}.{_NAMES[runner]}"


_NAMES = {"v1": "V1ReplayWorker", "mrv2": "Mrv2ReplayWorker"}


def __getattr__(name: str) -> Any:
    """Make a worker's class when it is first asked for."""
    if name == _NAMES["v1"]:
        return _v1_worker()
    if name == _NAMES["mrv2"]:
        return _mrv2_worker()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_unloaded(vllm_config: Any) -> None:
    """Compare the KV groups of a model that has layers but no memory.

    Raises:
        KVCacheDiffersError: Says what differs.
    """
    try:
        groups = _unloaded_groups(vllm_config)
    except Exception as error:  # noqa: BLE001 - a model that cannot be made without memory
        _logger.warning("KV groups are compared once the weights are loaded: %s", error)
        return
    if found := differences(EXPECTED[0].groups, groups):
        listed = "; ".join(f"['groups']{line}" for line in found)
        raise KVCacheDiffersError(f"{listed}; no weights were loaded")


def _unloaded_groups(vllm_config: Any) -> list[KVGroupFacts]:
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mrv2_compat.vllm_v1.host.kv_cache import kv_cache_spec
    from mrv2_compat.vllm_v1.versions import kv_cache_groups

    config = copy.deepcopy(vllm_config)  # layers leave their names there
    with (
        # vLLM keeps rotary embeddings for later models, which must not find these.
        mock.patch.dict("vllm.model_executor.layers.rotary_embedding._ROPE_DICT"),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        initialize_model(config)
    return group_facts(kv_cache_groups(config, kv_cache_spec(config)))


def _check(kv_cache_config: Any) -> None:
    found = differences(EXPECTED[0], kv_facts(kv_cache_config))
    if found:
        raise KVCacheDiffersError("; ".join(found))


@cache
def _v1_worker() -> type:
    base: Any = device.worker_class()

    class V1ReplayWorker(base):
        """vLLM's worker with V1's runner, as a subject."""

        subject: Subject

        def init_device(self) -> None:
            super().init_device()
            self.subject = V1Subject(self.model_runner)

        def load_model(self, **options: Any) -> None:
            _check_unloaded(self.vllm_config)
            super().load_model(**options)

        def initialize_from_config(self, kv_cache_config: Any) -> None:
            _check(kv_cache_config)
            super().initialize_from_config(kv_cache_config)

    return V1ReplayWorker


@cache
def _mrv2_worker() -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from mrv2_compat.platforms import WORKERS

    base: Any = resolve_obj_by_qualname(WORKERS[device.kind()])

    class Mrv2ReplayWorker(base):
        """Our worker with its runner shown, as a subject."""

        subject: Subject

        def init_device(self) -> None:
            super().init_device()
            copies = StepCopies()
            self.model_runner._trace = copies  # the core is built later, with the KV cache
            self.subject = Mrv2Subject(self.model_runner, copies)

        def load_model(self, **options: Any) -> None:
            _check_unloaded(self.vllm_config)
            super().load_model(**options)

        def initialize_from_config(self, kv_cache_config: Any) -> None:
            _check(kv_cache_config)
            super().initialize_from_config(kv_cache_config)

    return Mrv2ReplayWorker
