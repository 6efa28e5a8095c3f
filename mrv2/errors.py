"""Errors that the runner raises, one tree.

::

    Mrv2Error
      ConfigError (ValueError)        the caller asked for something impossible
        UnsupportedByRunner           a feature that this runner does not have; carries every reason
      CapacityError (RuntimeError)    rows, blocks or tokens exceed what was allocated
      CaptureError (RuntimeError)     a step cannot become a CUDA graph
      ExtensionError (RuntimeError)   an extension or a head broke its protocol
      ProtocolError (RuntimeError)    calls out of order, or a request that is not there

A message names the offending value, the bound, and what to change.
"""

from collections.abc import Sequence


class Mrv2Error(Exception):
    """Base of every error that the runner raises on purpose."""


class ConfigError(Mrv2Error, ValueError):
    """A value that cannot be honoured. The message names the field, the value and the remedy."""


class UnsupportedByRunner(ConfigError):
    """Features that this runner does not have, all of them at once.

    Args:
        reasons: One sentence for each unsupported feature: feature, value, remedy.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        listed = "\n".join(f"  - {reason}" for reason in self.reasons)
        super().__init__(f"not supported by the mrv2 runner:\n{listed}")


class CapacityError(Mrv2Error, RuntimeError):
    """More rows, blocks or tokens than were allocated. Names the limit and its field."""


class CaptureError(Mrv2Error, RuntimeError):
    """A step cannot become a CUDA graph, or did so only in part. No graph is left."""


class ExtensionError(Mrv2Error, RuntimeError):
    """An extension or a head broke its protocol, or raised midway. The message names it.

    The step's work was not done. The rows are as before it, but that requests which left are gone.
    """


class ProtocolError(Mrv2Error, RuntimeError):
    """Calls out of order, such as sampling a step twice or continuing an unknown request."""
