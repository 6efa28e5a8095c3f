"""Noise floors that were measured before, kept with all that they depend on.

A floor is a figure of one environment: device, dtype, versions, model, engine and workload. It is
kept under the checksum of these, so in any other environment nothing is found, and it is measured
anew. So it is where the file is damaged or was altered, and then this is said.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the file's layout; another one is measured anew."""

_LOG = logging.getLogger(__name__)

_MEASURING = ("noise.py", "judge.py", "compare", "lockstep")
"""What measures a floor, in the folder of this module: a change of it makes another floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """How far the reference differs from itself."""

    spacings: dict[str, float]
    """Largest difference by kind of value."""
    measured: str
    """Day on which it was, UTC."""
    is_kept: bool
    """Whether it was found, rather than measured now."""

    @property
    def origin(self) -> str:
        """What a record says of it."""
        return f"kept, measured {self.measured}" if self.is_kept else "measured in this run"


def floors_folder() -> Path:
    """Return the folder of kept floors: `mrv2/floors` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mrv2" / "floors"


def floor_of(
    environment: Mapping[str, str], measure: Callable[[], dict[str, float]], folder: Path
) -> Floor:
    """Return the floor of an environment, kept or measured now and kept for the next run.

    A folder that cannot be written keeps nothing, which is said and is no failure.

    Args:
        environment: All that the floor depends on, by name.
        measure: Measures it.
        folder: Of kept floors.
    """
    file = folder / f"{key_of(environment)}.json"
    kept = _read(file, environment)
    if kept is not None:
        return kept
    floor = Floor(spacings=measure(), measured=datetime.now(UTC).date().isoformat(), is_kept=False)
    if all(math.isfinite(value) for value in floor.spacings.values()):
        try:
            _write(file, environment, floor)
        except OSError as error:
            _LOG.warning("the noise floor is not kept: %s: %s", file, error.strerror or error)
    return floor


def key_of(environment: Mapping[str, str]) -> str:
    """Return the checksum of an environment, whatever the order of its entries."""
    return _checksum(dict(environment))[:32]


def model_hash(folder: Path) -> str:
    """Return a checksum of a model's config and weights."""
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".json", ".safetensors", ".bin"):
            continue
        with file.open("rb") as opened:
            total.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()[:16]


def measuring_hash(package: Path | None = None) -> str:
    """Return a checksum of the code that measures a floor."""
    package = package if package is not None else Path(__file__).parent
    total = hashlib.sha256()
    for name in _MEASURING:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()[:16]


def _read(file: Path, environment: Mapping[str, str]) -> Floor | None:
    """Return a kept floor; None where there is none, or none to be trusted, which is said."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _LOG.warning("%s: %s; the noise floor is measured anew", file, error.strerror or error)
        return None
    try:
        return _decoded(text, environment)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _LOG.warning("%s is damaged (%s); the noise floor is measured anew", file, error)
        return None


def _decoded(text: bytes, environment: Mapping[str, str]) -> Floor:
    raw: Any = json.loads(text)
    kept = raw["floor"]
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']}, this reader knows {FORMAT}")
    if raw["checksum"] != _checksum(kept):
        raise ValueError("its checksum is another one")
    if kept["environment"] != dict(environment):
        raise ValueError("it is of another environment")
    spacings = {str(value): float(floor) for value, floor in kept["spacings"].items()}
    if not spacings or not all(0.0 <= floor < math.inf for floor in spacings.values()):
        raise ValueError(f"{spacings} is no floor")
    return Floor(spacings=spacings, measured=str(kept["measured"]), is_kept=True)


def _write(file: Path, environment: Mapping[str, str], floor: Floor) -> None:
    """Write a file at once, so that a reader beside it never sees a part."""
    kept = {
        "environment": dict(environment),
        "spacings": floor.spacings,
        "measured": floor.measured,
    }
    raw = {"format": FORMAT, "checksum": _checksum(kept), "floor": kept}
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=".floor-", dir=file.parent)
    try:
        with os.fdopen(handle, "w") as opened:
            opened.write(json.dumps(raw, indent=1, sort_keys=True) + "\n")
        Path(made).replace(file)
    except OSError:
        Path(made).unlink(missing_ok=True)
        raise


def _checksum(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
