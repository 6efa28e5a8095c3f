"""What a logits stage is, and what it is shown.

A stage is one sampling feature: it owns the feature's rows and its kernel, and rewrites logits in
place. The sampler knows stages only through this protocol, and stages know neither the batch nor
each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrv2.memory.transfers import Transfers
from mrv2.sampling.columns import DrawColumns
from mrv2.state.protocol import RowState


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsView:
    """Whose logits these are: all that sampling knows of a batch. A request may have any number."""

    logit_rows: Tensor
    """[num_logits] int32, device. Logit -> state row."""
    positions: Tensor
    """[num_logits] int64, device. Position of the token that each logit draws."""
    rows_np: npt.NDArray[np.int32]
    """[num_logits], host. The same rows as `logit_rows`."""


class LogitsStage(RowState, Protocol):
    """One step of the logits' processing.

    The lifecycle calls come first, from the sampler, which hands on its own; a stage wants nothing
    for a row that was evicted. After the step's `flush`, the sampler calls `apply` in the order of
    `STAGES`, on the current stream, if `wants` says so. Nothing here may wait for the device.
    """

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say from host values alone whether `apply` would change the logits of any of `rows`."""

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Rewrite the logits in place.

        Args:
            logits: [num_logits, vocab_size] float32.
            view: Whose logits these are.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResources:
    """What a stage may be built from."""

    max_num_reqs: int
    vocab_size: int
    transfers: Transfers
    columns: DrawColumns
    """Shared with the draw; the sampler admits and flushes them, a stage only reads them."""


StageFactory: TypeAlias = Callable[[StageResources], LogitsStage]
