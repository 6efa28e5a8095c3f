"""Whether vLLM loads the entry points by which it finds this project.

vLLM loads both of our entry points, or neither where `VLLM_PLUGINS` does not name them; then none
of our code would run inside vLLM, and `MRV2_RUNNER` would be ignored without a word. So there is a
third entry point, in a group that `VLLM_PLUGINS` does not filter: torch calls every function of the
group `torch.backends` while it is imported, in every process, and vLLM imports torch first of all.

Any program that imports torch passes here. So this module imports the standard library alone, and
does nothing but look at the environment unless `MRV2_RUNNER` and `VLLM_PLUGINS` are both set.
"""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points

RUNNER_VAR = "MRV2_RUNNER"
PLUGINS_VAR = "VLLM_PLUGINS"
OUR_ENTRY_POINTS = {
    "vllm.general_plugins": "mrv2_compat.plugin:register",
    "vllm.platform_plugins": "mrv2_compat.plugin:platform",
}


def on_torch_import() -> None:
    """Stop a process in which vLLM loads neither entry point and a set `MRV2_RUNNER` cannot act.

    Where it loads one of them, the function behind that one says more.

    Raises:
        RuntimeError: `VLLM_PLUGINS` hides both entry points. Torch shows it as the cause of its
            own error, which ends with the name of this entry point.
    """
    if RUNNER_VAR not in os.environ or PLUGINS_VAR not in os.environ:
        return
    hidden = hidden_entry_points(os.environ)
    if len(hidden) == len(OUR_ENTRY_POINTS):
        raise RuntimeError(
            f"{RUNNER_VAR}={os.environ[RUNNER_VAR]!r} cannot act: {'; '.join(hidden)}; "
            f"or unset {RUNNER_VAR}"
        )


def hidden_entry_points(environ: Mapping[str, str]) -> list[str]:
    """Return why an entry point of ours is not loaded by vLLM, one reason each; empty if all are.

    Both have the same name, so that `VLLM_PLUGINS` lets both through or neither.
    """
    listed = environ.get(PLUGINS_VAR)
    allowed = None if listed is None else listed.split(",")
    reasons = []
    for group, value in OUR_ENTRY_POINTS.items():
        names = [point.name for point in entry_points(group=group) if point.value == value]
        if not names:
            reasons.append(
                f"no distribution has the entry point {value} in group {group}: install mrv2 again"
            )
        elif allowed is not None and not set(names) & set(allowed):
            reasons.append(
                f"{PLUGINS_VAR}={listed!r} hides the entry point {names[0]!r} of group {group}: "
                f"add {names[0]!r} to {PLUGINS_VAR}, or unset it"
            )
    return reasons
