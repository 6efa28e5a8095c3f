"""What a step is made of, and how its work is queued."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mrv2.batch.commit import SampledTokens, commit_step
from mrv2.batch.inputs import InputBatch, InputBuffers
from mrv2.config import RunnerConfig
from mrv2.extension import ExtensionFactory, ExtensionResources, Extensions
from mrv2.head.protocol import Head, HeadFactory, HeadResources
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.ports import AttentionPlanner, ForwardInputs, Model
from mrv2.state.block_tables import BlockTables
from mrv2.state.lifecycle import Lifecycle
from mrv2.state.protocol import RowState
from mrv2.state.requests import RequestColumns
from mrv2.trace import StepTrace

_OWN = ("input_ids", "positions", "inputs_embeds")
"""Inputs that have a field of their own; an extension may give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """What the host gives a runner."""

    config: RunnerConfig
    model: Model
    attention: AttentionPlanner
    trace: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts(HostParts):
    """What the executor puts steps together from."""

    head: Head
    extensions: Extensions
    requests: RequestColumns
    block_tables: BlockTables
    lifecycle: Lifecycle
    buffers: InputBuffers
    arena: Arena

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


def build_parts(
    host: HostParts,
    transfers: Transfers,
    make_head: HeadFactory,
    make_extensions: Sequence[ExtensionFactory],
) -> StepParts:
    """Return the parts of a runner, in one arena."""
    config, arena = host.config, Arena(transfers)
    requests = RequestColumns(
        config.num_rows,
        config.max_model_len,
        arena,
        maps_tokens=config.maps_tokens,
        may_draft=config.max_drafts > 0,
    )
    block_tables = BlockTables(config.kv_groups, config.num_rows, arena)
    head = make_head(
        HeadResources(
            config=config, model=host.model, requests=requests, arena=arena, trace=host.trace
        )
    )
    resources = ExtensionResources(
        config=config,
        model=host.model,
        requests=requests,
        block_tables=block_tables,
        arena=arena,
    )
    extensions = Extensions([make(resources) for make in make_extensions])
    buffers = InputBuffers(config, arena)
    arena.allocate()
    states: tuple[RowState, ...] = (requests, block_tables, head, *extensions.members)
    return StepParts(
        config=config,
        model=host.model,
        attention=host.attention,
        trace=host.trace,
        head=head,
        extensions=extensions,
        requests=requests,
        block_tables=block_tables,
        lifecycle=Lifecycle(config.max_num_reqs, block_tables, states),
        buffers=buffers,
        arena=arena,
    )
