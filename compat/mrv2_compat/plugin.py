"""The functions behind the two entry points that vLLM loads.

vLLM calls `platform` when it first needs to know its platform, in every process, and swallows
whatever it raises. It calls `register` in every process before that process builds a configuration
or a worker, and lets its exceptions through. So `platform` gives way where something is wrong, and
`register` finds the same thing again and says it. `entry_points` speaks where vLLM calls neither.
"""

import os

from mrv2.errors import ConfigError, Mrv2Error
from mrv2_compat import platforms, selection
from mrv2_compat.entry_points import RUNNER_VAR


def platform() -> str | None:
    """Return the dotted name of our platform where MRV2_RUNNER asks for a runner, else None."""
    try:
        selected = selection.current_selection()
        selection.prepare_flag(selected, os.environ)
    except Mrv2Error:
        return None  # `register` raises it
    if selected is None:
        return None
    found = platforms.builtin_platform()
    return None if found is None else platforms.dotted_name(found[0])


def register() -> None:
    """Check, before any configuration is built, that what MRV2_RUNNER asks for can act.

    Raises:
        ConfigError: The value is unknown, contradicts another setting, or cannot act.
    """
    selected = selection.current_selection()
    if selected is None:
        return
    selection.prepare_flag(selected, os.environ)
    selection.require_entry_points(os.environ)
    from vllm.platforms import current_platform

    if not platforms.is_ours(current_platform):
        raise ConfigError(
            f"{RUNNER_VAR}={selected.name!r} cannot act, because vLLM runs on its platform "
            f"{type(current_platform).__name__}: {_why_inactive()}"
        )


def _why_inactive() -> str:
    """Return why vLLM did not take our platform, and the remedy."""
    import vllm.envs

    if vllm.envs.VLLM_TARGET_DEVICE == platforms.CPU:
        return "VLLM_TARGET_DEVICE=cpu makes vLLM skip every platform plugin: unset it"
    if platforms.builtin_platform() is None:
        return f"only CPU and CUDA are served: unset {RUNNER_VAR}"
    return (
        f"either {RUNNER_VAR} was set after vLLM had chosen a platform, so set it before vLLM is "
        "imported, or another platform plugin is active, so leave it out with VLLM_PLUGINS"
    )
