"""Attention planners: one that plans on the host before a replay, and others of each kind."""

from dataclasses import replace

import torch

from mrv2 import Captures, RunnerConfig
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout, Int32
from mrv2_diff.models.hashlm import HashAttention, HashLM


class HostPlanned(HashLM):
    """Reads lengths that the host wrote, as backends do that plan on the host.

    Args:
        config: Of the runner.
        num_blocks: Blocks in the cache of each group.
    """

    plans_replays = True
    needs_exact_lengths = True

    def __init__(self, config: RunnerConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks)
        self._planned = torch.zeros(config.max_num_reqs, dtype=torch.int32)

    def plan(self, batch: InputBatch) -> HashAttention:
        """Plan on the host, unless the step is captured: then its replays read what is planned."""
        if batch.layout.batch_id:  # what is captured over has no name
            self.write(batch.layout.seq_lens)
        return super().plan(replace(batch, seq_lens=self._planned[: len(batch.seq_lens)]))

    def plan_replay(self, layout: BatchLayout, num_reqs: int, num_tokens: int) -> None:
        """Plan the step that is about to be replayed."""
        self.write(layout.seq_lens)

    def write(self, lengths: Int32) -> None:
        """Write the lengths of a step's requests, and none for what pads it."""
        self._planned.zero_()
        self._planned[: len(lengths)] = torch.from_numpy(lengths)


class PlannedLate(HostPlanned):
    """A mutant: it plans behind each replay, so that a replay reads the plan of the one before."""

    def __init__(self, config: RunnerConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks)
        self._due: Int32 | None = None

    def plan_replay(self, layout: BatchLayout, num_reqs: int, num_tokens: int) -> None:
        """Write what was due, and remember this."""
        if self._due is not None:
            self.write(self._due)
        self._due = layout.seq_lens


class NeverCaptured(HashLM):
    """Its metadata cannot be in a graph."""

    captures = Captures.NONE


class DecodesFirst(HashLM):
    """Wants requests of one token before all others."""

    decode_threshold = 1
