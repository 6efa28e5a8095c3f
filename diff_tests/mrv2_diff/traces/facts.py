"""What a trace says of its engine, read from vLLM's configuration, and what differs from another.

The fields of `Head.engine` have the names of vLLM's `LLM`, so that a replay can ask for the same.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from mrv2.errors import UnsupportedByRunner
from mrv2_diff import environment
from mrv2_diff.models.checkpoint import MARKER
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.traces.events import (
    EngineFacts,
    Head,
    HowItRan,
    KVFacts,
    KVGroupFacts,
    ModelFacts,
    Tiny,
)

_ENDS = 1 << 20
"""Bytes at either end of a weight file that its hash covers: a whole model would take minutes."""
_OUR_RUNNER = "mrv2_compat.vllm_v1.runner.VllmRunner"


def unrecordable(vllm_config: Any) -> list[str]:
    """Return what of a configuration a trace has no place for."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    found = {
        "vLLM's own V2 runner, which is scheduled in another dialect: set MRV2_RUNNER=v1 or mrv2": (
            vllm_config.use_v2_model_runner
        ),
        "more than one device or engine": parallel.world_size > 1
        or parallel.data_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config,
        "LoRA": vllm_config.lora_config,
        "KV transfer": vllm_config.kv_transfer_config,
        "pooling": model.runner_type == "pooling",
        "quantization": model.quantization,
        "custom logits processors": model.logits_processors,
        "config overrides (hf_overrides)": model.hf_overrides,
        "a reasoning parser": vllm_config.reasoning_config
        and vllm_config.reasoning_config.reasoning_parser,
    }
    return [name for name, is_there in found.items() if is_there]


def head_of(vllm_config: Any, kv_cache_config: Any, runner: Any, *, is_private: bool) -> Head:
    """Return the head of a trace of an engine.

    Raises:
        UnsupportedByRunner: The engine has something that a trace has no place for.
    """
    if found := unrecordable(vllm_config):
        raise UnsupportedByRunner([f"a trace (MRV2_TRACE) has no place for {it}" for it in found])
    kind = type(runner)
    runner_class = f"{kind.__module__}.{kind.__qualname__}"
    device = str(vllm_config.device_config.device_type)
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    return _checked(
        Head(
            runner="mrv2" if runner_class == _OUR_RUNNER else "v1",
            runner_class=runner_class,
            is_private=is_private,
            device=device,  # type: ignore[arg-type]  # checked below
            environment=environment.collect(device),
            vllm=vllm_version(),
            model=model_facts(Path(model.model), model.get_vocab_size()),
            engine=engine_facts(vllm_config),
            how=HowItRan(
                async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
                enforce_eager=bool(model.enforce_eager),
                cudagraph_mode=compilation.cudagraph_mode.name,
            ),
            kv=kv_facts(kv_cache_config),
        )
    )


def _checked(head: Head) -> Head:
    """Return a head as a reader would see it, or fail as it would."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(head), type=Head)


def vllm_version() -> str:
    """Return the version of the installed vLLM, without importing it."""
    return environment.version("vllm")


def engine_facts(vllm_config: Any) -> EngineFacts:
    """Return what a replay must have the same."""
    model, cache, scheduler = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.scheduler_config,
    )
    reasoning = vllm_config.reasoning_config
    return EngineFacts(
        dtype=str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        seed=model.seed,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        kv_cache_dtype=str(cache.cache_dtype),
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        logprobs_mode=str(model.logprobs_mode),
        max_logprobs=model.max_logprobs,
        reasoning_start_str=reasoning.reasoning_start_str if reasoning else None,
        reasoning_end_str=reasoning.reasoning_end_str if reasoning else None,
    )


def kv_facts(kv_cache_config: Any) -> KVFacts:
    """Return what a replay's KV cache must be like."""
    return KVFacts(
        num_blocks=kv_cache_config.num_blocks,
        num_bytes=sum(
            {
                (tensor.size, tensor.offset, tuple(tensor.layers)): tensor.size
                for tensor in kv_cache_config.kv_cache_tensors
            }.values()
        ),
        groups=group_facts(kv_cache_config.kv_cache_groups),
    )


def group_facts(kv_cache_groups: list[Any]) -> list[KVGroupFacts]:
    """Return what the KV groups of a replay must be."""
    return [
        KVGroupFacts(
            spec=type(group.kv_cache_spec).__name__,
            values={name: str(value)[:512] for name, value in _fields(group.kv_cache_spec).items()},
            layers=list(group.layer_names),
        )
        for group in kv_cache_groups
    ]


def _fields(spec: Any) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def model_facts(folder: Path, vocab_size: int) -> ModelFacts:
    """Return which model lies in a folder; a name that is no folder has no hashes."""
    config = folder / "config.json"
    is_folder = config.is_file()
    return ModelFacts(
        name=folder.name[:512],
        config_sha256=hashlib.sha256(config.read_bytes()).hexdigest() if is_folder else None,
        weights_sha256=_weights_hash(folder) if is_folder else None,
        vocab_size=vocab_size,
        tiny=_tiny(folder) if is_folder else None,
    )


def _weights_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def _tiny(folder: Path) -> Tiny | None:
    """Return the spec of a checkpoint that the harness made, or None."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        config = json.loads((folder / "config.json").read_text())
        types = config["layer_types"]
        tiny = Tiny(
            seed=marker["seed"],
            layers=config["num_hidden_layers"],
            sliding_window=config["sliding_window"] if "sliding_attention" in types else None,
            sliding_layers="alternate" if len(set(types)) > 1 else "all",
        )
        return tiny if spec_of(tiny).key == marker["key"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def spec_of(tiny: Tiny) -> ModelSpec:
    """Return the spec of a recorded checkpoint.

    Raises:
        ValueError: No checkpoint can be made of it.
    """
    return ModelSpec(**msgspec.structs.asdict(tiny))


def differences(recorded: object, now: object) -> list[str]:
    """Return what differs, a line for each value."""
    from deepdiff import DeepDiff  # half a second, and only where two are compared

    found = DeepDiff(
        msgspec.to_builtins(recorded), msgspec.to_builtins(now), verbose_level=2
    ).to_dict()
    lines = []
    for kind, changes in found.items():
        for place, change in dict(changes).items():
            name = str(place).removeprefix("root")
            if isinstance(change, dict) and "old_value" in change:
                lines.append(f"{name}: recorded {change['old_value']!r}, "
                             f"here {change['new_value']!r}")  # fmt: skip
            else:
                lines.append(f"{name}: {kind.replace('_', ' ')}: {change!r}")
    return lines
