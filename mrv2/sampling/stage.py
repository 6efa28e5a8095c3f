"""What a stage is, and what it is shown.

A stage is one sampling feature: it owns the feature's rows and its kernel. A `LogitsStage` rewrites
logits in place; a `NarrowingStage` leaves them alone and says what the draw is to divide by and
leave out. The sampler knows stages only through these protocols, and stages know neither the batch
nor each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrv2.config import ThinkingMarkers
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.narrowing import Narrowing
from mrv2.state.protocol import RowState
from mrv2.state.requests import RequestColumns


@dataclass(slots=True, kw_only=True)
class LogitsView:
    """Whose logits these are: all that sampling knows of a batch. A request may have any number.

    Not frozen, since one is made at every step.
    """

    logit_rows: Tensor
    """[num_logits] int32, device. Logit -> state row."""
    positions: Tensor
    """[num_logits] int64, device. Position of the token that each logit draws."""
    rows_np: npt.NDArray[np.int32]
    """[num_logits], host. The same rows as `logit_rows`."""
    batch_id: int = 0
    """The same in two views of the same rows; 0 is the same as nothing."""


class Stage(RowState, Protocol):
    """One step of the logits' processing.

    The lifecycle calls come first, from the sampler, which hands on its own; a stage wants nothing
    for a row that was evicted, nor, unless it `takes_plain`, for a request that is plain. `admit`
    raises ConfigError for a request that the stage cannot serve, before it changes anything.
    Nothing here may wait for the device.
    """

    takes_plain: ClassVar[bool] = False
    """Whether it is told of every request. Any other is told of no plain one: its row is to it as
    evicted, and `flush` comes only in steps in which another request came or went."""

    is_in_plain_draw: ClassVar[bool] = False
    """Whether the plain draw does all of this stage's work itself."""

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say whether the stage has work for any of `rows`.

        The answer depends on nothing but which requests are in the rows: it is kept until one comes
        or goes.
        """


@runtime_checkable
class LogitsStage(Stage, Protocol):
    """A stage that rewrites logits.

    After the step's `flush`, the sampler calls `apply` in the order of `STAGES`, on the current
    stream, if `wants` says so.
    """

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Rewrite the logits in place.

        Args:
            logits: [num_logits, vocab_size] float32.
            view: Whose logits these are.
        """


class NarrowingStage(Stage, Protocol):
    """A stage that divides rows or cuts them off, and changes no order of the logits.

    The sampler calls `narrow` where it would call `apply`.
    """

    def narrow(self, narrowing: Narrowing, logits: Tensor, view: LogitsView) -> None:
        """Set the divisor or raise the cutoffs.

        Args:
            narrowing: What earlier stages left; what this stage sees are the logits divided by it,
                without those below its cutoffs.
            logits: [num_logits, vocab_size], any float dtype, only read. Not divided yet.
            view: Whose logits these are.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResources:
    """What a stage may be built from."""

    num_rows: int
    """Rows of all per-request state, the idle one among them."""
    vocab_size: int
    arena: Arena
    """Memory of the rows. A stage reserves its columns in it when it is made, and reads them on the
    device no earlier than in `apply` or `narrow`."""
    columns: DrawColumns
    """Shared with the draw; the sampler admits and flushes them, a stage only reads them."""
    requests: RequestColumns
    """Tokens and prompt lengths of the rows; the runner keeps them, a stage only reads them. When a
    stage acts, a row's tokens before the position that a logit draws are all on the device."""
    thinking: ThinkingMarkers | None

    @property
    def transfers(self) -> Transfers:
        """Carries what is not in the arena, such as lists of any length."""
        return self.arena.transfers


StageFactory: TypeAlias = Callable[[StageResources], LogitsStage | NarrowingStage]
