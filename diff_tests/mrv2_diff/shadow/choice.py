"""The value `shadow` of `MRV2_RUNNER`: what stands behind the entry point of that name.

vLLM's configuration is settled in the process that answers `/metrics`, so the settings are checked
here, and the counters are shown from here.
"""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from mrv2.errors import ConfigError
from mrv2_compat.entry_points import RUNNER_VAR
from mrv2_diff.shadow.counters import Collector
from mrv2_diff.shadow.settings import COUNTS_VAR, check_file, read_settings

WORKER = "mrv2_diff.shadow.worker.ShadowWorker"
PLATFORMS = ("cpu", "cuda")
NAME = "shadow"
"""The value of MRV2_RUNNER."""


class ShadowChoice:
    """V1 serves while MRV2 follows a sample."""

    def worker_class(self, platform: str) -> str:
        """Return the dotted name of the worker; check the settings, and show the counters.

        Raises:
            ConfigError: A setting cannot be, or there is no shadow on this platform.
        """
        if platform not in PLATFORMS:
            raise ConfigError(f"there is no shadow on {platform!r}; the platforms are cpu and cuda")
        check_file(read_settings(os.environ))
        if COUNTS_VAR not in os.environ:
            _show_counters()
        return WORKER


@cache
def _show_counters() -> None:
    """Make the folder of the counters, for this process and its children, and show it."""
    from prometheus_client import REGISTRY

    folder = Path(tempfile.mkdtemp(prefix="mrv2-shadow-"))
    _remove_at_exit(folder)
    os.environ[COUNTS_VAR] = str(folder)
    collector: Any = Collector(folder)
    REGISTRY.register(collector)


def _remove_at_exit(folder: Path) -> None:
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child runs this, too
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def register() -> None:
    """Check the settings, if the shadow is asked for, before vLLM builds anything.

    vLLM calls this in every process, and lets what it raises through as it is; an error while a
    configuration is built would reach a user inside one of pydantic.

    Raises:
        ConfigError: A setting cannot be.
    """
    if os.environ.get(RUNNER_VAR) == NAME:
        check_file(read_settings(os.environ))


choice = ShadowChoice()
"""What the entry point names."""
