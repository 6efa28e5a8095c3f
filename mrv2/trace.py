"""Observation of a step: every named value of the chain, as it comes into being.

The runner hands each value to a `StepTrace`. The default observer is null and costs one call a
value. An observer must not change what it is given, and must copy what it wants to keep: device
buffers are reused by later steps.
"""

from typing import Literal, Protocol, TypeAlias

Probe: TypeAlias = Literal[
    "plan",
    "layout",
    "graph_key",
    "batch",
    "forward_inputs",
    "hidden",
    "logits",
    "processed_logits",
    "sampled",
    "committed",
]
"""The points of the chain, in the order in which a step passes them."""


class StepTrace(Protocol):
    """Receives the values of each step."""

    def wants(self, probe: Probe) -> bool:
        """Say whether a value is worth making for this observer alone.

        Args:
            probe: A point of the chain whose value a step can do without: `processed_logits`, or
                `batch` of a replayed step, with its `forward_inputs` and `hidden`.
        """

    def record(self, probe: Probe, value: object) -> None:
        """Take one value.

        Args:
            probe: Which point of the chain this is.
            value: The value object itself; read it or copy it, never change it.
        """


class NullTrace:
    """Observes nothing."""

    def wants(self, probe: Probe) -> bool:
        """Return False."""
        return False

    def record(self, probe: Probe, value: object) -> None:
        """Ignore the value."""
