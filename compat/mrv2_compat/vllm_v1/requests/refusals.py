"""What the runner does not support, as data: each entry names the feature, its value, the remedy.

Four questions, asked at four times: `config_refusals` and `environment_refusals` when a
configuration is built, `kv_cache_refusals` and `backend_refusals` once the model is loaded,
`request_refusals` for each request. Each answers with the complete list. `v1_obstacles` asks the
same about vLLM's own V1 runner, for `MRV2_RUNNER=auto`.

The tables are checked against the installed vLLM by `guards/test_surface.py`: every path must
exist, and every field of SamplingParams and section of VllmConfig must have its place.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2_compat.vllm_v1.features.feature import Feature

from mrv2_compat.vllm_v1.requests.parameters import SERVED

ATTENTION_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
KV_CACHE_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
OTHER_RUNNER = "or set MRV2_RUNNER=v1"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that was asked for and is not supported."""

    feature: str
    """What it is, in the user's words."""

    value: str
    """The value that was given, with its name."""

    remedy: str
    """What to change."""

    @property
    def what(self) -> str:
        """The feature and its value, for a log where nothing need be changed."""
        return f"{self.feature} ({self.value})"

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """One value of a configuration or a request that has bounds."""

    path: str
    """Attribute names joined by dots, from the object that is checked."""

    feature: str
    accepts: Callable[[Any], bool]
    remedy: str

    @cached_property
    def resolve(self) -> Callable[[Any], Any]:
        """Returns the value that an object has there."""
        return attrgetter(self.path)


def _equals(wanted: object) -> Callable[[Any], bool]:
    return lambda value: bool(value == wanted)


def _is_off(value: Any) -> bool:
    return not value


def _is_none(value: Any) -> bool:
    return value is None


def _backend_is_served(value: Any) -> bool:
    return value is None or value.name in ATTENTION_BACKENDS


def _backends_are_served(value: Any) -> bool:
    return all(_backend_is_served(backend) for backend in value.values())


def _is_plain_compilation(value: Any) -> bool:
    return value is None or value.name != "STOCK_TORCH_COMPILE"


_ONE_DEVICE = "set it to 1, " + OTHER_RUNNER
_LEAVE_OUT = "leave it out, " + OTHER_RUNNER
_V2_ONLY = "leave it out, or unset MRV2_RUNNER: only vLLM's V2 runner has it"
_TEXT_MODEL = "use a decoder-only text model, " + OTHER_RUNNER
_BACKENDS = f"use one of {', '.join(ATTENTION_BACKENDS)} (--attention-backend), {OTHER_RUNNER}"

CONFIG_RULES: tuple[Rule, ...] = (
    # One device. Each size is a group of processes that the runner would have to talk to.
    Rule("parallel_config.tensor_parallel_size", "tensor parallelism", _equals(1), _ONE_DEVICE),
    Rule("parallel_config.pipeline_parallel_size", "pipeline parallelism", _equals(1), _ONE_DEVICE),
    Rule("parallel_config.data_parallel_size", "data parallelism", _equals(1), _ONE_DEVICE),
    Rule(
        "parallel_config.prefill_context_parallel_size",
        "prefill context parallelism",
        _equals(1),
        _V2_ONLY,
    ),
    Rule(
        "parallel_config.decode_context_parallel_size",
        "decode context parallelism",
        _equals(1),
        _ONE_DEVICE,
    ),
    Rule("parallel_config.enable_expert_parallel", "expert parallelism", _is_off, _LEAVE_OUT),
    Rule("parallel_config.enable_eplb", "expert load balancing", _is_off, _LEAVE_OUT),
    Rule("parallel_config.enable_elastic_ep", "elastic expert parallelism", _is_off, _LEAVE_OUT),
    Rule("parallel_config.use_ubatching", "dual batch overlap", _is_off, _LEAVE_OUT),
    Rule(
        "parallel_config.enable_batch_sharded_sampling",
        "batch-sharded sampling",
        _is_off,
        _V2_ONLY,
    ),
    Rule("parallel_config.enable_fault_tolerance", "fault tolerance", _is_off, _LEAVE_OUT),
    # Whole features, each a section of its own.
    Rule("speculative_config", "speculative decoding", _is_none, _LEAVE_OUT),
    Rule("lora_config", "LoRA", _is_none, _LEAVE_OUT),
    Rule("watermark_config", "watermarking", _is_none, _V2_ONLY),
    Rule("diffusion_config", "diffusion models", _is_none, _V2_ONLY),
    Rule("engram_config", "engram memory", _is_none, _LEAVE_OUT),
    Rule("kv_transfer_config", "KV connectors and KV offloading", _is_none, _LEAVE_OUT),
    Rule("ec_transfer_config", "encoder cache connectors", _is_none, _LEAVE_OUT),
    Rule("weight_transfer_config", "weight transfer", _is_none, _LEAVE_OUT),
    Rule("aux_output_config.enabled", "auxiliary outputs", _is_off, _V2_ONLY),
    Rule("offload_config.uva.cpu_offload_gb", "weight offloading to the host", _is_off, _LEAVE_OUT),
    Rule(
        "offload_config.prefetch.offload_group_size",
        "weight offloading with prefetch",
        _is_off,
        _LEAVE_OUT,
    ),
    # The model.
    Rule("model_config.runner_type", "pooling models", _equals("generate"), _TEXT_MODEL),
    Rule("model_config.is_multimodal_model", "multimodal models", _is_off, _TEXT_MODEL),
    Rule("model_config.is_encoder_decoder", "encoder-decoder models", _is_off, _TEXT_MODEL),
    Rule("model_config.is_diffusion", "diffusion models", _is_off, _V2_ONLY),
    Rule("model_config.is_hybrid", "hybrid models with state-space layers", _is_off, _TEXT_MODEL),
    Rule("model_config.is_attention_free", "models without attention", _is_off, _TEXT_MODEL),
    Rule("model_config.use_mla", "multi-head latent attention", _is_off, _TEXT_MODEL),
    Rule("model_config.uses_mrope", "multimodal rotary positions", _is_off, _TEXT_MODEL),
    Rule("model_config.attention_chunk_size", "chunked local attention", _is_none, _TEXT_MODEL),
    Rule(
        "model_config.requires_raw_input_tokens",
        "models that read raw inputs",
        _is_off,
        _TEXT_MODEL,
    ),
    Rule("model_config.enable_prompt_embeds", "prompt embeddings", _is_off, _LEAVE_OUT),
    Rule("model_config.use_fp64_gumbel", "Gumbel noise in float64", _is_off, _LEAVE_OUT),
    Rule("model_config.return_sampling_mask", "returned sampling masks", _is_off, _V2_ONLY),
    Rule("model_config.enable_trace_replay", "trace replay", _is_off, _V2_ONLY),
    Rule("model_config.enable_sleep_mode", "sleep mode", _is_off, _LEAVE_OUT),
    Rule("model_config.enable_cumem_allocator", "the cumem allocator", _is_off, _LEAVE_OUT),
    # Attention and its cache.
    Rule(
        "cache_config.cache_dtype",
        "a quantized KV cache",
        lambda value: value in ("auto", "float16", "bfloat16"),
        "use --kv-cache-dtype auto, " + OTHER_RUNNER,
    ),
    Rule("cache_config.kv_sharing_fast_prefill", "fast prefill by KV sharing", _is_off, _LEAVE_OUT),
    Rule("cache_config.kv_offloading_size", "KV offloading", _is_none, _LEAVE_OUT),
    Rule("attention_config.backend", "this attention backend", _backend_is_served, _BACKENDS),
    Rule(
        "attention_config.backend_per_kind",
        "these attention backends",
        _backends_are_served,
        _BACKENDS,
    ),
    Rule("attention_config.use_non_causal", "non-causal attention", _is_off, _LEAVE_OUT),
    Rule("attention_config.hisparse_config", "HiSparse", _is_none, _V2_ONLY),
    # Compilation.
    Rule(
        "compilation_config.mode",
        "stock torch.compile",
        _is_plain_compilation,
        "use --enforce-eager or another -cc.mode, " + OTHER_RUNNER,
    ),
    Rule(
        "observability_config.enable_layerwise_nvtx_tracing",
        "layerwise NVTX tracing",
        _is_off,
        _LEAVE_OUT,
    ),
)

SECTIONS_WITHOUT_RULES: dict[str, str] = {
    "scheduler_config": "the scheduler's, whose output the runner follows",
    "device_config": "the platform decides it",
    "load_config": "vLLM's model loaders read it",
    "mamba_config": "state-space models are refused by their model_config",
    "kernel_config": "the model's layers and vLLM's warm-up read it",
    "structured_outputs_config": "the scheduler's grammars read it",
    "logging_config": "vLLM's logging reads it",
    "quant_config": "the model's layers read it",
    "profiler_config": "the worker reads it",
    "kv_events_config": "the scheduler publishes these events",
    "ec_manager_config": "acts with encoder inputs, which are refused",
    "reasoning_config": "says where thinking begins and ends, for requests with a budget of it",
    "additional_config": "read by other platforms",
    "instance_id": "a name",
    "optimization_level": "has set other fields by the time we look",
    "performance_mode": "has set other fields by the time we look",
    "shutdown_timeout": "the engine reads it",
    "watchdog_config": "the engine reads it (vLLM 0.33)",
}
"""Sections of VllmConfig that no rule looks into, and why none is needed."""

ENVIRONMENT_FLAGS: dict[str, str] = {
    "VLLM_COMPUTE_NANS_IN_LOGITS": "counting NaNs in logits",
    "VLLM_RAISE_ON_LOGIT_NANS": "failing on NaNs in logits",
    "VLLM_BATCH_INVARIANT": "batch invariance",
}
"""Variables of vLLM's that ask its runner for something; each is off where unset or 0."""

_V2_ONLY_PATHS = (
    "watermark_config",
    "attention_config.hisparse_config",
    "model_config.return_sampling_mask",
    "model_config.enable_trace_replay",
    "aux_output_config.enabled",
)

SERVED_BY_RUNNER = SERVED
"""Fields of SamplingParams that the runner acts on."""

SCHEDULER_OR_FRONTEND = frozenset(
    {
        "n",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "_eos_token_id",
        "_all_stop_token_ids",
        "_watermarking_skipped",
        "skip_reading_prefix_cache",
        "repetition_detection",
    }
)
"""Fields of SamplingParams that never reach the runner."""

_ASK_LESS = "leave it out of the request, or start the server with MRV2_RUNNER=v1"

REQUEST_RULES: tuple[Rule, ...] = (
    Rule("prompt_logprob_token_ids", "logprobs of given prompt tokens", _is_none, _ASK_LESS),
    Rule("prompt_logprob_start", "logprobs of given prompt tokens", _is_none, _ASK_LESS),
    Rule("watermarking", "watermarking", lambda value: value is not True, _ASK_LESS),
    Rule("routed_experts_prompt_start", "routed experts", _is_off, _ASK_LESS),
    Rule("trace_decode_token_ids", "trace replay", _is_none, _ASK_LESS),
)
REFUSED = frozenset(rule.path for rule in REQUEST_RULES)
"""Fields of SamplingParams that are refused unless they ask for nothing."""
_refusable = attrgetter(*(rule.path for rule in REQUEST_RULES))
_NOTHING_REFUSED = tuple((None, None, watermarking, 0, None) for watermarking in (None, False))
"""Their values in almost every request."""

_INPUT_PATH = "engine_input."
"""What the path of an input's type begins with, where a feature lifts its refusal."""
_INPUT_REFUSALS: dict[str, str] = {
    "embeds": "prompt embeddings",
    "multimodal": "multimodal inputs",
    "enc_dec": "encoder-decoder inputs",
}


def lifted_rules(vllm_config: Any, features: "Iterable[Feature] | None" = None) -> frozenset[str]:
    """Return the paths of the rules that features lift in an engine.

    Args:
        vllm_config: The engine's configuration.
        features: Those of `features.registry.FEATURES` by default.
    """
    if features is None:
        from mrv2_compat.vllm_v1.features.registry import FEATURES

        features = FEATURES
    return frozenset(path for feature in features for path in feature.lifts(vllm_config))


def config_refusals(vllm_config: Any, features: "Iterable[Feature] | None" = None) -> list[Refusal]:
    """Return everything in a VllmConfig that the runner does not support.

    Args:
        vllm_config: vLLM's configuration, final: after the platform has changed it.
        features: Those of `features.registry.FEATURES` by default.
    """
    refusals = _apply(CONFIG_RULES, vllm_config, lifted_rules(vllm_config, features))
    shared = getattr(vllm_config.model_config.hf_text_config, "num_kv_shared_layers", None)
    if shared:
        refusals.append(
            Refusal("KV shared across layers", f"num_kv_shared_layers={shared}", _TEXT_MODEL)
        )
    return refusals


def environment_refusals(environ: Mapping[str, str]) -> list[Refusal]:
    """Return the environment variables that ask the runner for something it does not support."""
    return [
        Refusal(feature, f"{name}={environ[name]}", f"unset it, {OTHER_RUNNER}")
        for name, feature in ENVIRONMENT_FLAGS.items()
        if environ.get(name, "0").strip().lower() not in ("", "0", "false")
    ]


def v1_obstacles(vllm_config: Any) -> list[str]:
    """Return what vLLM's own V1 runner cannot run of a VllmConfig."""
    obstacles = list(vllm_config._get_v1_model_runner_unsupported_features())
    obstacles += [path for path in _V2_ONLY_PATHS if not _is_off(attrgetter(path)(vllm_config))]
    return obstacles


def backend_refusals(backend_names: Iterable[str]) -> list[Refusal]:
    """Return the attention backends that the runner has no port for.

    Args:
        backend_names: Names as the backend classes state them, one for each group of layers.
    """
    return [
        Refusal("this attention backend", name, _BACKENDS)
        for name in sorted(set(backend_names) - set(ATTENTION_BACKENDS))
    ]


def kv_cache_refusals(specs: Mapping[str, Any]) -> list[Refusal]:
    """Return the layers whose KV cache the runner does not know, one refusal for each kind.

    Args:
        specs: vLLM's KVCacheSpec of each layer, by layer name.
    """
    by_kind: dict[str, list[str]] = {}
    for layer, spec in specs.items():
        kind = type(spec).__name__
        if kind not in KV_CACHE_SPECS or getattr(spec, "attention_chunk_size", None) is not None:
            by_kind.setdefault(kind, []).append(layer)
    return [
        Refusal(
            "this kind of KV cache",
            f"{kind} in {len(layers)} layers, first {layers[0]}",
            f"use a model with full or sliding-window attention only, {OTHER_RUNNER}",
        )
        for kind, layers in by_kind.items()
    ]


def asks_for_nothing_refused(params: Any) -> bool:
    """Say of SamplingParams, in the time that every step has, that `request_refusals` is empty.

    False says nothing.
    """
    return _refusable(params) in _NOTHING_REFUSED


def request_refusals(
    params: Any,
    engine_input: Mapping[str, Any] | None = None,
    lifted: Collection[str] = (),
) -> list[Refusal]:
    """Return everything in a request that the runner does not support.

    Args:
        params: vLLM's SamplingParams or PoolingParams.
        engine_input: The prompt as vLLM's renderer made it, where it is at hand.
        lifted: Paths of rules that do not apply, as `lifted_rules` gives them.
    """
    refusals = []
    if not hasattr(params, "temperature"):
        refusals.append(Refusal("pooling", type(params).__name__, _ASK_LESS))
    else:
        refusals += _apply(REQUEST_RULES, params, lifted)
    kind = "token" if engine_input is None else engine_input["type"]
    if kind in _INPUT_REFUSALS and _INPUT_PATH + kind not in lifted:
        refusals.append(Refusal(_INPUT_REFUSALS[kind], f"type={kind!r}", "send text or token ids"))
    return refusals


def _apply(rules: Iterable[Rule], subject: Any, lifted: Collection[str]) -> list[Refusal]:
    refusals = []
    for rule in rules:
        if rule.path in lifted:
            continue
        value = rule.resolve(subject)
        if not rule.accepts(value):
            name = rule.path.rpartition(".")[2]
            refusals.append(Refusal(rule.feature, f"{name}={_short(value)}", rule.remedy))
    return refusals


def _short(value: Any) -> str:
    """Return a value's text, cut where it would hide the rest of the list."""
    text = value.name if isinstance(value, Enum) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
