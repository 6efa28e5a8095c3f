"""Every name that vLLM touches on a model runner, and what our facade does about it.

`SERVED` names do their work. `NO_OP` names exist, because vLLM touches them on its ordinary path,
and have nothing to do here: their entry is all that there is of them. `REFUSED` names belong to
features that the runner does not have, or to vLLM's V2 dialect; they are absent from the facade,
and touching one raises `RefusedName`, which is an AttributeError, so that vLLM's `hasattr` and
`getattr` with a default see a runner without it.

`guards/test_surface.py` reads the names again from the installed vLLM and fails on any that is not
here. One access cannot be named: `Worker.update_config` sets `load_config` or `model_config` by a
computed name (`<dynamic>` in the scan); both are plain attributes, which nothing reads after the
model is loaded.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mrv2.errors import UnsupportedByRunner

DYNAMIC = "<dynamic>"


class Status(Enum):
    """What the facade does about a name."""

    SERVED = "served"
    NO_OP = "no-op"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the surface."""

    status: Status
    reason: str
    """When vLLM touches it and, unless it is served, why it has nothing to do or is refused."""

    returns: Any = None
    """What the facade has under the name of a no-op: a function, or an attribute's value."""


class RefusedName(UnsupportedByRunner, AttributeError):
    """vLLM touched a name of a feature that the runner does not have."""


def _served(reason: str) -> Entry:
    return Entry(Status.SERVED, reason)


def _nothing(*_arguments: object, **_options: object) -> None:
    """Do nothing."""


def _no_timings(*_arguments: object, **_options: object) -> dict[str, dict[str, float | int]]:
    return {}


def _no_op(reason: str, *, returns: Any = _nothing) -> Entry:
    return Entry(Status.NO_OP, reason, returns)


def _refused(reason: str) -> Entry:
    return Entry(Status.REFUSED, reason)


_V2_DIALECT = "only vLLM's V2 dialect touches it, and V1-mode scheduling is set"
_LORA = "LoRA is not supported: leave --enable-lora out"
_EPLB = "expert load balancing and elastic expert parallelism are not supported"
_FAULT_TOLERANCE = "fault tolerance is not supported: leave --enable-fault-tolerance out"
_STATE_SPACE = "warm-up of models with state-space layers, which are refused"
_BENCH = "vllm bench forward, which runs vLLM's V2 runner only"

SURFACE: dict[str, Entry] = {
    # The step.
    "execute_model": _served("every step, first half"),
    "sample_tokens": _served("every step, second half"),
    "take_draft_token_ids": _no_op("after a step; there are no drafts"),
    # Start and end of life.
    "load_model": _served("after the device is ready"),
    "get_model": _served("after loading, in warm-ups, and for apply_model"),
    "model": _served("the engine's clean-up and saving of weights"),
    "model_memory_usage": _served("memory profiling on CUDA"),
    "get_supported_tasks": _served("start of the engine"),
    "get_kv_cache_spec": _served("before the KV cache is sized"),
    "initialize_kv_cache": _served("once the KV cache is sized"),
    "_init_kv_zero_meta": _served("once the KV cache is sized, if its new blocks must be zeroed"),
    "kv_caches": _served("warm-up on CPU asks whether there are any"),
    "kv_cache_config": _served("kernel warm-up on CUDA"),
    "update_max_model_len": _served("max_model_len=-1, once the KV cache is sized"),
    "shutdown": _served("end of the worker"),
    "reload_weights": _served("on request: new weights, in place"),
    # Profiling and warm-up.
    "warming_up_model": _served("warm-up on CPU"),
    "profile_run": _served("memory profiling on CUDA"),
    "_dummy_run": _served("warm-up on CUDA, and steps without requests"),
    "_dummy_sampler_run": _served("end of warm-up on CUDA"),
    "capture_model": _served("warm-up on CUDA"),
    "profile_cudagraph_memory": _served("memory profiling on CUDA"),
    "maybe_remove_all_loras": _no_op("warm-up on CUDA; there are none"),
    "jit_warmup_registry": _served("kernel warm-up on CUDA"),
    "attn_groups": _served("kernel warm-up on CUDA asks for attention backends"),
    "uniform_decode_query_len": _served("steps without requests: tokens per request, 1"),
    # What vLLM reads of the configuration.
    "vllm_config": _served("warm-ups on CUDA"),
    "model_config": _served("warm-ups on CUDA; Worker.update_config sets it"),
    "parallel_config": _served("warm-ups on CUDA"),
    "scheduler_config": _served("warm-ups on CUDA"),
    "compilation_config": _served("warm-ups on CUDA"),
    "lora_config": _served("warm-up on CUDA; None"),
    "speculative_config": _served("warm-ups on CUDA (vLLM 0.33); None"),
    "device": _served("warm-ups on CUDA"),
    "dtype": _served("warm-ups on CUDA"),
    "max_model_len": _served("warm-ups on CUDA (vLLM 0.33)"),
    "max_num_reqs": _served("warm-ups on CUDA"),
    "max_num_tokens": _served("warm-ups on CUDA"),
    "is_pooling_model": _no_op("warm-ups on CUDA", returns=False),
    "supports_mm_inputs": _no_op("executors and connectors", returns=False),
    # State of features that are not there.
    "reset_mm_cache": _no_op("after profiling and on request; there are no multimodal inputs"),
    "reset_encoder_cache": _no_op("on request; there is no encoder"),
    "get_draft_model": _no_op("when weights move; there is no draft model"),
    "reset_lora_state": _no_op("after weights were transferred; there are no adapters"),
    "get_encoder_timing_stats": _no_op("on request; there is no encoder", returns=_no_timings),
    "eplb_state": _no_op("elastic expert parallelism, which is refused", returns=None),
    "eep_eplb_suppressed": _no_op("elastic expert parallelism, which is refused", returns=False),
    # Refused: features.
    "add_lora": _refused(_LORA),
    "remove_lora": _refused(_LORA),
    "pin_lora": _refused(_LORA),
    "list_loras": _refused(_LORA),
    "_dummy_pooler_run": _refused("pooling models are not supported"),
    "release_late_interaction_query_cache": _refused("pooling models are not supported"),
    "setup_eplb_from_mapping": _refused(_EPLB),
    "preserve_serving_state": _refused(_EPLB),
    "cudagraph_manager": _refused("elastic expert parallelism asks whether there is one"),
    "speculator": _refused("kernel warm-up asks whether there is one; no speculative decoding"),
    "sampler": _refused("watermark warm-up asks whether there is one; no watermarking"),
    "_kv_block_zeroer": _refused("kernel warm-up asks for V1's own object; ours has none to warm"),
    "input_batch": _refused(f"{_FAULT_TOLERANCE}; {_STATE_SPACE}"),
    "requests": _refused(_FAULT_TOLERANCE),
    "num_prompt_logprobs": _refused(_FAULT_TOLERANCE),
    "execute_model_state": _refused(_FAULT_TOLERANCE),
    "kv_connector_output": _refused(_FAULT_TOLERANCE),
    # Refused: vLLM's V2 dialect.
    "_remove_request": _refused(_V2_DIALECT),
    "req_states": _refused(_V2_DIALECT),
    "block_tables": _refused(_V2_DIALECT),
    "decode_query_len": _refused(_V2_DIALECT),
    "eplb": _refused(_V2_DIALECT),
    "needs_cudagraph_capture": _refused(_V2_DIALECT),
    "pool": _refused(_V2_DIALECT),
    "dp_rank": _refused(_BENCH),
    "num_speculative_steps": _refused(_BENCH),
}


def names(*statuses: Status) -> list[str]:
    """Return the names with one of the given statuses, sorted."""
    return sorted(name for name, entry in SURFACE.items() if entry.status in statuses)


def unknown_names(touched: Iterable[str]) -> list[str]:
    """Return the names that vLLM touches and SURFACE does not have, sorted: the to-do list."""
    return sorted(set(touched) - set(SURFACE) - {DYNAMIC})


def answer(owner: object, name: str) -> Any:
    """Return what a name is that `owner` does not have itself; its `__getattr__` calls this.

    Raises:
        RefusedName: vLLM's surface has the name, and it is refused; with the reason.
        AttributeError: The name is nothing that vLLM is known to touch, or `owner` should have it.
    """
    entry = SURFACE.get(name)
    if entry is not None and entry.status is Status.NO_OP:
        return entry.returns
    if entry is not None and entry.status is Status.REFUSED:
        raise RefusedName([f"{name}: {entry.reason}"])
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")


def faults_of(facade: object, has: Callable[[object, str], bool] = hasattr) -> list[str]:
    """Return where a facade and SURFACE disagree, one sentence each; empty if nowhere.

    Args:
        facade: The object, or its class where `has` can tell instance attributes.
        has: Tells whether the facade has a name.
    """
    served = names(Status.SERVED, Status.NO_OP)
    absent = [
        f"{name} is {SURFACE[name].status.value} and absent"
        for name in served
        if not has(facade, name)
    ]
    present = [
        f"{name} is refused and present" for name in names(Status.REFUSED) if has(facade, name)
    ]
    return absent + present
