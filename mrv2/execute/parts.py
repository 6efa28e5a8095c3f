"""What a step is made of, and how its work is queued."""

from dataclasses import dataclass, replace

from mrv2.batch.commit import SampledTokens, commit_step
from mrv2.batch.inputs import InputBatch, InputBuffers
from mrv2.config import RunnerConfig
from mrv2.extension import Extensions
from mrv2.head.protocol import Head
from mrv2.memory.arena import Arena
from mrv2.ports import AttentionPlanner, ForwardInputs, Model
from mrv2.state.block_tables import BlockTables
from mrv2.state.lifecycle import Lifecycle
from mrv2.state.requests import RequestColumns
from mrv2.trace import StepTrace

_OWN = ("input_ids", "positions", "inputs_embeds")
"""Inputs that have a field of their own; an extension may give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What the executor puts steps together from."""

    config: RunnerConfig
    model: Model
    attention: AttentionPlanner
    head: Head
    extensions: Extensions
    requests: RequestColumns
    block_tables: BlockTables
    lifecycle: Lifecycle
    buffers: InputBuffers
    arena: Arena
    trace: StepTrace

    def inputs(
        self, batch: InputBatch, num_tokens: int, *, replays: bool = False, plans: bool = True
    ) -> ForwardInputs:
        """Queue what the model's inputs still lack, and return them.

        Args:
            batch: The step's.
            num_tokens: Padded.
            replays: As in `ForwardInputs`.
            plans: Whether there is attention; without, the forward is only captured.
        """
        input_ids, positions = self.buffers.padded(num_tokens)
        inputs = ForwardInputs(
            input_ids=input_ids,
            positions=positions,
            attention=self.attention.plan(batch) if plans else None,
            replays=replays,
        )
        further = self.extensions.extend(batch.layout, batch, num_tokens)
        if not further:
            return inputs
        own = {name: further[name] for name in _OWN if name in further}
        others = {name: tensor for name, tensor in further.items() if name not in own}
        return replace(inputs, **own, further=others)  # type: ignore[arg-type]  # tensors all

    def commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Queue the rows' advance by what was sampled, and what follows it."""
        commit_step(
            batch.rows,
            batch.seq_lens,
            batch.num_logits,
            sampled.token_ids,
            sampled.num_sampled,
            self.requests.token_ids.tensor,
            self.requests.num_computed_tokens.tensor,
        )
        self.extensions.after_commit(batch, sampled)
