"""The variables that steer the shadow, read and checked once where the engine is configured."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mrv2.errors import ConfigError

SHARE_VAR = "MRV2_SHADOW_SHARE"
KV_BYTES_VAR = "MRV2_SHADOW_KV_BYTES"
FILE_VAR = "MRV2_SHADOW_FILE"
LIMIT_VAR = "MRV2_SHADOW_LIMIT_S"
BEHIND_VAR = "MRV2_SHADOW_MAX_BEHIND"
GATHER_VAR = "MRV2_SHADOW_GATHER_S"
PRIORITY_VAR = "MRV2_SHADOW_PRIORITY"
COUNTS_VAR = "MRV2_SHADOW_COUNTS"
"""Folder of the counters, set by the process that shows them and inherited by the workers."""
PREFIX = "MRV2_SHADOW_"
KNOWN = (
    SHARE_VAR,
    KV_BYTES_VAR,
    FILE_VAR,
    LIMIT_VAR,
    BEHIND_VAR,
    GATHER_VAR,
    PRIORITY_VAR,
    COUNTS_VAR,
)
IDLE = "idle"
PRIORITIES = (IDLE, "normal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much the shadow follows, with how much memory, and where it says what it found."""

    share: float = 0.01
    """Of the requests, 0 to 1."""
    kv_bytes: int = 256 << 20
    """Upper bound of the shadow's KV cache."""
    file: Path = Path("mrv2_shadow.jsonl")
    """Where findings are appended, one line of JSON each."""
    limit_s: float = 60.0
    """Longest time that one step of the shadow may take before it counts as hung; time in which it
    waits for a core is left out."""
    max_behind: int = 1024
    """Steps that may wait for the shadow before it takes no further request."""
    gather_s: float = 5.0
    """Time in which steps are gathered, to be run together where they have no request in common; it
    is over before when half of `max_behind` wait."""
    priority: str = IDLE
    """`idle`: it has the time of the cores that no other process wants. `normal`: as the server."""


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return what an environment asks for.

    Raises:
        ConfigError: A value cannot be, or a variable with our prefix is none of the known ones.
    """
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in KNOWN)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no such setting of the shadow; there are "
            f"{', '.join(KNOWN[:-1])}"
        )
    default = Settings()
    share = _number(environ, SHARE_VAR, default.share)
    if not 0 <= share <= 1:
        raise ConfigError(f"{SHARE_VAR}={share:g}: must be in [0, 1]; 0.01 is one request in 100")
    kv_bytes = _number(environ, KV_BYTES_VAR, float(default.kv_bytes))
    if kv_bytes < 1 or not kv_bytes.is_integer():
        raise ConfigError(f"{KV_BYTES_VAR}={kv_bytes:g}: must be a whole number of bytes above 0")
    limit_s = _number(environ, LIMIT_VAR, default.limit_s)
    if not 0 < limit_s < 1e6:
        raise ConfigError(f"{LIMIT_VAR}={limit_s:g}: must be a number of seconds above 0")
    max_behind = _number(environ, BEHIND_VAR, float(default.max_behind))
    if max_behind < 1 or not max_behind.is_integer():
        raise ConfigError(f"{BEHIND_VAR}={max_behind:g}: must be a whole number of steps above 0")
    gather_s = _number(environ, GATHER_VAR, default.gather_s)
    if not 0 <= gather_s < 1e6:
        raise ConfigError(f"{GATHER_VAR}={gather_s:g}: must be a number of seconds, 0 or more")
    priority = environ.get(PRIORITY_VAR, default.priority)
    if priority not in PRIORITIES:
        raise ConfigError(f"{PRIORITY_VAR}={priority!r}: must be one of {', '.join(PRIORITIES)}")
    return Settings(
        share=share,
        kv_bytes=int(kv_bytes),
        file=Path(environ.get(FILE_VAR) or default.file).absolute(),
        limit_s=limit_s,
        max_behind=int(max_behind),
        gather_s=gather_s,
        priority=priority,
    )


def check_file(settings: Settings) -> None:
    """Refuse a file that cannot be written, before an engine is started for it.

    Raises:
        ConfigError: With the reason.
    """
    try:
        os.close(os.open(settings.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
    except OSError as error:
        raise ConfigError(
            f"{FILE_VAR}={settings.file}: cannot be written ({error.strerror}); name another file"
        ) from error


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no number") from None
