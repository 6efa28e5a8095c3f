"""Token ids and progress of each row.

`token_ids` holds every token that is known: the host writes the prompt (and earlier outputs, after
a preemption) when a request arrives, the device appends what it draws. `num_computed_tokens` is
advanced on the device as well, so that the next step can be queued before anybody has seen the last
one's tokens. The host only steps in where the scheduler says something else than what the device
counts: at an arrival, and when progress is taken back.
"""

import numpy as np
import numpy.typing as npt
import torch

from mrv2.memory.arena import Arena
from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.staged import StagedWriteTensor
from mrv2.plan import Arrival

Int32 = npt.NDArray[np.int32]


class RequestColumns:
    """Tokens and counters, a row for each request.

    Args:
        num_rows: Rows; the last is the idle one.
        max_model_len: Tokens that a row can hold.
        arena: Memory of the tokens and counters.
        maps_tokens: Whether the tokens lie in memory of the host, which the device reaches.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, arena: Arena, *, maps_tokens: bool = False
    ) -> None:
        device = arena.transfers.device
        self.idle_row = num_rows - 1
        """The row of no request: it has no tokens."""
        self.token_ids = StagedWriteTensor(
            (num_rows, max_model_len + 1), torch.int32, device, arena, is_mapped=maps_tokens
        )
        self.num_computed_tokens = StagedWriteTensor((num_rows,), torch.int32, device, arena)
        self.prompt_len = MirroredTensor(num_rows, torch.int32, arena)
        """How many of a row's tokens are its prompt; those behind it are output."""
        self._settled = np.zeros(num_rows, dtype=np.int32)
        self._advance: tuple[Int32, Int32] | None = None
        self._num_advances = 0
        """How often the last advance is to be added to `_settled`: a batch that only decodes on
        advances by the same arrays in each step, and nobody asks in between."""

    def admit(self, row: int, arrival: Arrival) -> None:
        """Stage the known tokens and the progress of a request that arrived."""
        self.token_ids.stage_write(row, 0, arrival.token_ids)
        self.prompt_len.set(row, arrival.prompt_len)
        self._stage_progress(row, arrival.num_computed_tokens)

    def evict(self, row: int) -> None:
        """Forget the progress.

        The tokens of a freed row are never read: its next owner writes its own before any is.
        """
        self._counted[row] = 0

    def flush(self) -> None:
        """Stage the prompt lengths that changed; all else is staged already."""
        self.prompt_len.flush()

    def agree(self, rows: Int32, num_computed_tokens: Int32) -> None:
        """Stage the scheduler's progress for each row where the device counts something else.

        Args:
            rows: [num_reqs] int32.
            num_computed_tokens: [num_reqs] int32, the scheduler's.
        """
        differs = self._counted[rows] != num_computed_tokens
        if differs.any():
            for index in np.flatnonzero(differs):
                self._stage_progress(int(rows[index]), int(num_computed_tokens[index]))

    def advance(self, rows: Int32, num_tokens: Int32) -> None:
        """Note that a queued step will run `num_tokens` [num_reqs] int32 more of each row.

        The arrays are kept: they must not change.
        """
        last = self._advance
        if last is None or last[0] is not rows or last[1] is not num_tokens:
            self._settle()
            self._advance = rows, num_tokens
        self._num_advances += 1

    @property
    def _counted(self) -> Int32:
        """[num_rows]. What the device will count once everything queued has run.

        It tells when the scheduler disagrees.
        """
        self._settle()
        return self._settled

    def _settle(self) -> None:
        if self._advance is not None:
            rows, num_tokens = self._advance
            self._settled[rows] += self._num_advances * num_tokens
            self._advance = None
            self._num_advances = 0

    def _stage_progress(self, row: int, num_computed_tokens: int) -> None:
        self.num_computed_tokens.stage_write(row, 0, [num_computed_tokens])
        self._counted[row] = num_computed_tokens
