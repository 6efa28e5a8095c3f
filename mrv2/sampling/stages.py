"""The stages in the order in which they act. Order is semantics: V1's, which users tuned to."""

from mrv2.sampling.stage import StageFactory
from mrv2.sampling.temperature import Temperature

STAGES: tuple[StageFactory, ...] = (Temperature,)
"""Adding a feature is adding its factory here, at the place that its meaning requires."""
