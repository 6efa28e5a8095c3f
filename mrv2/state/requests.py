"""Token ids and progress of each row.

`token_ids` holds every token that is known: the host writes the prompt (and earlier outputs, after
a preemption) when a request arrives, the device appends what it draws. `num_computed_tokens` is
advanced on the device as well, so that the next step can be queued before anybody has seen the last
one's tokens. The host only steps in where the scheduler says something else than what the device
can count (`mrv2.state.progress`): at an arrival, and when progress is taken back.
"""

import numpy as np
import numpy.typing as npt
import torch

from mrv2.memory.arena import Arena
from mrv2.memory.mirrored import MirroredTensor
from mrv2.memory.staged import StagedWriteTensor
from mrv2.plan import Arrival
from mrv2.state.progress import Progress

Int32 = npt.NDArray[np.int32]


class RequestColumns:
    """Tokens and counters, a row for each request.

    Args:
        num_rows: Rows; the last is the idle one.
        max_model_len: Tokens that a row can hold.
        arena: Memory of the tokens and counters.
        maps_tokens: Whether the tokens lie in memory of the host, which the device reaches.
        may_draft: Whether steps may run drafts, which lie behind a row's known tokens.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        arena: Arena,
        *,
        maps_tokens: bool = False,
        may_draft: bool = False,
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
        self.progress = Progress(num_rows, may_draft=may_draft)

    def admit(self, row: int, arrival: Arrival) -> None:
        """Stage the known tokens and the progress of a request that arrived."""
        self.token_ids.stage_write(row, 0, arrival.token_ids)
        self.prompt_len.set(row, arrival.prompt_len)
        self.stage_progress(row, arrival.num_computed_tokens)

    def evict(self, row: int) -> None:
        """Forget the progress.

        The tokens of a freed row are never read: its next owner writes its own before any is.
        """
        self.progress.set(row, 0)

    def flush(self) -> None:
        """Stage the prompt lengths that changed; all else is staged already."""
        self.prompt_len.flush()

    def agree(self, rows: Int32, num_computed_tokens: Int32) -> None:
        """Stage the scheduler's progress for each row where the device counts something else.

        Args:
            rows: [num_reqs] int32.
            num_computed_tokens: [num_reqs] int32, the scheduler's.
        """
        for index in self.progress.differing(rows, num_computed_tokens):
            self.stage_progress(int(rows[index]), int(num_computed_tokens[index]))

    def stage_progress(self, row: int, num_computed_tokens: int) -> None:
        """Let the device count so many tokens of a row."""
        self.num_computed_tokens.stage_write(row, 0, [num_computed_tokens])
        self.progress.set(row, num_computed_tokens)
