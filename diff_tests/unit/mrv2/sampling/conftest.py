"""One stage with rows of its own, for tests that know what a logit must become."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.config import ThinkingMarkers
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.stage import LogitsStage, LogitsView, StageFactory, StageResources
from mrv2.state.requests import RequestColumns


class StageRows:
    """A stage, and a token table that holds what the test puts there."""

    def __init__(
        self,
        factory: StageFactory,
        *,
        vocab_size: int = 11,
        max_num_reqs: int = 7,
        max_model_len: int = 64,
        thinking: ThinkingMarkers | None = None,
        device: str = "cpu",
    ) -> None:
        self.arena = arena = Arena(Transfers(torch.device(device)))
        self.requests = RequestColumns(max_num_reqs, max_model_len, arena)
        resources = StageResources(
            num_rows=max_num_reqs,
            vocab_size=vocab_size,
            arena=arena,
            columns=DrawColumns(max_num_reqs, arena),
            requests=self.requests,
            thinking=thinking,
        )
        self.stage = cast("LogitsStage", factory(resources))
        self.vocab_size = vocab_size

    def admit(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int] = (), **sampling: Any
    ) -> None:
        """Let a request take a row; with outputs, it resumes after a preemption."""
        arrival = Arrival(
            req_id=f"r{row}",
            token_ids=[*prompt, *outputs],
            prompt_len=len(prompt),
            num_computed_tokens=0,
            block_ids=([0],),
            sampling=Sampling(**sampling),
        )
        self.requests.admit(row, arrival)
        self.stage.admit(row, arrival)
        self._flush()

    def evict(self, row: int) -> None:
        """Let the request leave."""
        self.requests.evict(row)
        self.stage.evict(row)
        self._flush()

    def write(self, row: int, position: int, *token_ids: int) -> None:
        """Put drawn or drafted tokens into the table, as the device does."""
        table = self.requests.token_ids.tensor
        table[row, position : position + len(token_ids)] = torch.tensor(token_ids)

    def wants(self, *rows: int) -> bool:
        """Return what the stage wants of these rows."""
        return self.stage.wants(np.array(rows, dtype=np.int32))

    def apply(self, logits: Tensor, *where: tuple[int, int]) -> Tensor:
        """Return the processed logits; `where` are row and position of each."""
        rows = np.array([row for row, _ in where], dtype=np.int32)
        view = LogitsView(
            logit_rows=torch.from_numpy(rows),
            positions=torch.tensor([position for _, position in where]),
            rows_np=rows,
        )
        processed = logits.clone()
        self.stage.apply(processed, view)
        return processed

    def _flush(self) -> None:
        self.requests.flush()
        self.stage.flush()
        self.arena.flush()


@pytest.fixture
def stage_rows() -> Callable[..., StageRows]:
    """Return `StageRows`, which test modules cannot import from here."""
    return StageRows
