"""Temperature: logits divided by the row's own, as the draw reads them."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrv2.plan import Arrival
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.stage import LogitsView, NarrowingStage, StageResources


class Temperature(NarrowingStage):
    """The stage. Its only column is shared with the draw; the sampler admits and flushes it."""

    is_in_plain_draw = True

    def __init__(self, resources: StageResources) -> None:
        self._temperature = resources.columns.temperature

    def admit(self, row: int, arrival: Arrival) -> None:
        """Nothing: the column is shared."""

    def evict(self, row: int) -> None:
        """Nothing: the column is shared."""

    def flush(self) -> None:
        """Nothing: the column is shared."""

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether a row is neither greedy nor at temperature 1."""
        temperature = self._temperature.host[rows]
        return bool(((temperature != 0.0) & (temperature != 1.0)).any())

    def narrow(self, narrowing: Narrowing, logits: Tensor, view: LogitsView) -> None:
        """Leave the division to the draw."""
        narrowing.divide_by(self._temperature.device_tensor)
