"""Which runner the user asked for: `MRV2_RUNNER` read, checked, and turned into a decision.

Pure functions over a mapping of environment variables; nothing here imports vLLM. Three variables
matter beside `MRV2_RUNNER` itself. `VLLM_USE_V2_MODEL_RUNNER` is vLLM's: `0` makes its scheduler
speak the V1 dialect, which V1's runner and ours both need. `MRV2_RUNNER_SET_FLAG` is a note to
ourselves, inherited by vLLM's child processes, that it was we who set that flag, so that we may
take it back; a flag that the user set is never touched. `MRV2_RUNNER_DECISION` carries the
decision to the place where requests are checked; all engines of a process have the same.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from mrv2.errors import ConfigError
from mrv2_compat.entry_points import RUNNER_VAR, hidden_entry_points

FLAG_VAR = "VLLM_USE_V2_MODEL_RUNNER"
FLAG_OWNER_VAR = "MRV2_RUNNER_SET_FLAG"
DECISION_VAR = "MRV2_RUNNER_DECISION"

V1 = "v1"
MRV2 = "mrv2"
AUTO = "auto"
VLLM = "vllm"
"""The decision, never a value of `MRV2_RUNNER`, that vLLM chooses by itself."""

BUILT_IN = (V1, MRV2, AUTO)
CHOICES_GROUP = "mrv2.runner_choices"


class RunnerChoice(Protocol):
    """A further value of `MRV2_RUNNER`, brought by another distribution.

    It is the object behind an entry point of the group `mrv2.runner_choices`; the entry point's
    name is the value. Its worker owns its limits: no configuration or request is refused for it.
    """

    def worker_class(self, platform: str) -> str:
        """Return the dotted name of the worker for `platform`, which is "cpu" or "cuda"."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A valid value of `MRV2_RUNNER`."""

    name: str
    """The value as the user wrote it."""

    load_choice: Callable[[], RunnerChoice] | None = None
    """Loads the choice of another distribution; None for the built-in values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The runner that a configuration gets, and why."""

    runner: str
    """`mrv2`, `v1`, `vllm` (vLLM's own choice), or the name of an added choice."""

    why: str
    """One clause for the log."""


def added_choices() -> dict[str, EntryPoint]:
    """Return the values of `MRV2_RUNNER` that installed distributions add, by name."""
    return {point.name: point for point in entry_points(group=CHOICES_GROUP)}


def read_selection(environ: Mapping[str, str], added: Mapping[str, EntryPoint]) -> Selection | None:
    """Return what `MRV2_RUNNER` asks for, or None where it is not set.

    Args:
        environ: The process's environment.
        added: Values that other distributions add, by name.

    Raises:
        ConfigError: The value is none of the known ones, or an added one has a built-in name.
    """
    taken = sorted(set(added) & {*BUILT_IN, VLLM})
    if taken:
        raise ConfigError(
            f"the entry points {taken} of group {CHOICES_GROUP!r} have names that this project "
            f"uses itself ({', '.join([*BUILT_IN, VLLM])}); rename them"
        )
    name = environ.get(RUNNER_VAR)
    if name is None:
        return None
    if name in BUILT_IN:
        return Selection(name=name)
    if name in added:
        return Selection(name=name, load_choice=added[name].load)
    values = ", ".join([*BUILT_IN, *sorted(added)])
    raise ConfigError(
        f"{RUNNER_VAR}={name!r} is not a runner; the values are: {values}; "
        "leave it unset to let vLLM decide"
    )


def current_selection() -> Selection | None:
    """Return what this process's environment asks for, or None where `MRV2_RUNNER` is not set."""
    return read_selection(os.environ, added_choices())


def require_no_conflict(selection: Selection, environ: Mapping[str, str]) -> None:
    """Refuse a `VLLM_USE_V2_MODEL_RUNNER` that contradicts the selection.

    Raises:
        ConfigError: The user asked vLLM for its own V2 runner as well.
    """
    flag = environ.get(FLAG_VAR)
    if flag is None or flag.strip() == "0":
        return
    raise ConfigError(
        f"{FLAG_VAR}={flag!r} asks for vLLM's own V2 runner, and {RUNNER_VAR}={selection.name!r} "
        f"needs V1-mode scheduling ({FLAG_VAR}=0, set for you): unset one of the two"
    )


def claim_flag(environ: MutableMapping[str, str]) -> None:
    """Set V1-mode scheduling, and note that it was set here, unless the user has set it."""
    if FLAG_VAR not in environ:
        environ[FLAG_VAR] = "0"
        environ[FLAG_OWNER_VAR] = "1"


def release_flag(environ: MutableMapping[str, str]) -> None:
    """Take back the flag if it was set by `claim_flag`, here or in a parent process."""
    if environ.pop(FLAG_OWNER_VAR, None) is not None:
        environ.pop(FLAG_VAR, None)


def prepare_flag(selection: Selection | None, environ: MutableMapping[str, str]) -> None:
    """Put the flag as the selection needs it before any configuration is built.

    `auto` starts without it, because vLLM refuses some configurations that only its V2 runner can
    run before a platform is asked; `platforms` sets it once the configuration can be seen. Only
    the default of async scheduling under pipeline parallelism, which our runner refuses, is read
    earlier.

    Raises:
        ConfigError: The user's own setting contradicts the selection.
    """
    if selection is None:
        release_flag(environ)
        return
    require_no_conflict(selection, environ)
    if selection.name != AUTO:
        claim_flag(environ)


def decide_auto(refusals: Sequence[str], v1_obstacles: Sequence[str]) -> Decision:
    """Choose for `auto`: ours where everything is supported, else V1, else vLLM's own choice.

    Args:
        refusals: What our runner does not support of the configuration.
        v1_obstacles: What vLLM's V1 runner cannot run of it.
    """
    if not refusals:
        return Decision(runner=MRV2, why="mrv2 supports everything that is asked for")
    reasons = "mrv2 does not support: " + "; ".join(refusals)
    if not v1_obstacles:
        return Decision(runner=V1, why=reasons)
    return Decision(runner=VLLM, why=f"{reasons}; V1 cannot run: {'; '.join(v1_obstacles)}")


def require_entry_points(environ: Mapping[str, str]) -> None:
    """Refuse to go on where vLLM loads only a part of this plugin.

    Raises:
        ConfigError: An entry point is missing or hidden.
    """
    hidden = hidden_entry_points(environ)
    if hidden:
        raise ConfigError(
            f"{RUNNER_VAR}={environ.get(RUNNER_VAR)!r} cannot act: " + "; ".join(hidden)
        )
