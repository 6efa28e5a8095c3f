"""The range of vLLM versions that this adapter was written for, and where they differ.

The only file that knows vLLM's version numbers, and the only one that asks which version there is:
what a version has at another place, or not at all, is a function here. The `cuda` extra in
pyproject.toml repeats the range.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from mrv2.errors import ConfigError
from mrv2_compat.vllm_v1.requests.refusals import Refusal

OLDEST = (0, 32)
BELOW = (0, 34)
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"


def installed_vllm() -> str:
    """Return the version of the vLLM that this process imports."""
    from vllm import __version__

    return str(__version__)


def runner_version() -> str:
    """Return the version of the installed distribution that this adapter belongs to."""
    return version("mrv2")


def is_supported(vllm_version: str) -> bool:
    """Return whether a version, such as "0.32.0+cpu" or "0.33.1.dev2", lies in the range.

    Raises:
        ConfigError: The text does not start with two numbers.
    """
    major, _, rest = vllm_version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ConfigError(
            f"vLLM says that its version is {vllm_version!r}, not two numbers and more; "
            f"the supported range is {RANGE}: install such a version"
        )
    return OLDEST <= (int(major), int(minor)) < BELOW


def version_refusals(vllm_version: str) -> list[Refusal]:
    """Return the reason why our runner does not run under a vLLM version; empty where it does."""
    if is_supported(vllm_version):
        return []
    remedy = f"install a version in the range {RANGE}, or set MRV2_RUNNER=v1"
    return [Refusal("this version of vLLM", vllm_version, remedy)]


def kv_cache_groups(vllm_config: Any, specs: dict[str, Any]) -> list[Any]:
    """Return the KV groups that vLLM makes of what its layers store, as KVCacheGroupSpecs.

    Args:
        vllm_config: The engine's.
        specs: vLLM's KVCacheSpec of each layer, by name.
    """
    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder
    except ImportError:  # vLLM 0.32 has no builder
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

        return list(get_kv_cache_groups(vllm_config, specs))
    builder = get_kv_cache_config_builder(vllm_config)
    return list(get_kv_cache_groups_from_builder(builder, vllm_config, specs))


def kv_cache_config(vllm_config: Any, groups: Sequence[Any], num_blocks: int) -> Any:
    """Return vLLM's KVCacheConfig of a KV cache of so many blocks, whatever memory there is.

    Args:
        vllm_config: The engine's.
        groups: vLLM's KV groups.
        num_blocks: Blocks of each group.
    """
    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    except ImportError:  # vLLM 0.32 has no builder
        return _kv_cache_config_of_utils(vllm_config, groups, num_blocks)
    builder = get_kv_cache_config_builder(vllm_config)
    return builder.get_kv_cache_config_from_groups(vllm_config, list(groups), num_blocks=num_blocks)


def _kv_cache_config_of_utils(vllm_config: Any, groups: Sequence[Any], num_blocks: int) -> Any:
    """Return the same in vLLM 0.32, which takes the number of blocks from its own config only."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    cache = vllm_config.cache_config
    asked = cache.num_gpu_blocks_override
    cache.num_gpu_blocks_override = num_blocks
    try:
        return get_kv_cache_config_from_groups(vllm_config, list(groups), available_memory=0)
    finally:
        cache.num_gpu_blocks_override = asked


def copy_settled(source: Any, target: Any, names: Iterable[str]) -> None:
    """Copy what an engine settled in its CacheConfig, as far as this vLLM has such fields.

    Args:
        source: The CacheConfig in which the fields are settled.
        target: Another one, which is changed.
        names: The fields.
    """
    for name in names:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
