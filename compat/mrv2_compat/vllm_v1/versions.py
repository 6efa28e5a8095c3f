"""The range of vLLM versions that this adapter was written for.

The only file that knows vLLM's version numbers; the `cuda` extra in pyproject.toml repeats the
range.
"""

from importlib.metadata import version

from mrv2.errors import ConfigError
from mrv2_compat.vllm_v1.refusals import Refusal

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
