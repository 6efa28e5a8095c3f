"""Where a feature enters that is neither a sampling stage nor a head.

An extension takes part in a step at the points that it names: before anything changes, before the
forward, behind the commit, at the output. The runner knows extensions only as a tuple. The base
class is the one that does nothing, so an extension states what it does and no more, and what it
leaves out costs a step nothing.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from torch import Tensor

from mrv2.batch.commit import SampledTokens
from mrv2.batch.inputs import InputBatch
from mrv2.batch.layout import BatchLayout
from mrv2.config import RunnerConfig
from mrv2.errors import ExtensionError, Mrv2Error, ProtocolError
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.output import PendingOutput, Reader
from mrv2.plan import Arrival, StepPlan
from mrv2.ports import NO_TENSORS, Captures, Model
from mrv2.state.block_tables import BlockTables
from mrv2.state.requests import RequestColumns
from mrv2.step import Step

Variant: TypeAlias = tuple[Hashable, ...]
"""What each extension that has variants says of a step, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionResources:
    """What an extension may be built from."""

    config: RunnerConfig
    model: Model
    requests: RequestColumns
    """Tokens and progress of the rows."""
    block_tables: BlockTables
    arena: Arena
    """Memory of the rows, uploaded at once. An extension reserves its columns in it when it is
    made, and stages into it in `admit`, `flush` or `before_forward`."""

    @property
    def transfers(self) -> Transfers:
        """Carries what is not in the arena."""
        return self.arena.transfers


class StepExtension:
    """A feature's part in a step; this one does nothing.

    Per-row state goes through `admit`, `evict` and `flush`, as for every `RowState`. Nothing here
    may wait for the device.
    """

    name: str = "null"
    """Its key in `StepPlan.extras`, `Arrival.extras` and `RunnerOutput.extras`."""
    takes_extras: bool = False
    """Whether plans and arrivals may say something to it. To others they may not."""

    def admit(self, row: int, arrival: Arrival) -> None:
        """Fill `row` for a request that has just claimed it."""

    def evict(self, row: int) -> None:
        """Forget the request in `row`."""

    def flush(self) -> None:
        """Stage what the host changed in this step."""

    def check(self, plan: StepPlan) -> None:
        """Refuse a plan, before anything has changed, and change nothing.

        Raises:
            Mrv2Error: It cannot be served; the message names what and the remedy.
        """

    def captures(self, layout: BatchLayout) -> Captures:
        """Return how much of such a step may be captured."""
        return Captures.WHOLE

    def variants(self) -> Sequence[Hashable]:
        """Return all that `variant` may return: a graph is captured for each."""
        return (None,)

    def variant(self, layout: BatchLayout) -> Hashable:
        """Return which of its graphs a step needs; what was not captured runs eagerly."""
        return None

    def capturing(self, variant: Hashable) -> AbstractContextManager[object]:
        """Return what is entered while a step of a variant is captured."""
        return nullcontext()

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Queue what makes further inputs of the model, and return them by name.

        It is captured with the step. `input_ids`, `positions` and `inputs_embeds` take the place of
        the runner's own. Each tensor begins at the same address in every step.

        Args:
            layout: The step's; padded where it is captured whole.
            batch: Its inputs.
            num_tokens: Tokens of the forward, with those that pad it for the model's own graphs: as
                many as the runner's own inputs have.
        """
        return NO_TENSORS

    def before_forward(self, layout: BatchLayout) -> None:
        """Prepare a step on the host, whether it runs eagerly or is replayed.

        What it stages in the arena is on the device before the step's first kernel.
        """

    def after_commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Queue work behind a commit; captured with it.

        It comes once more for a step that was replayed and is committed anew, for instance under a
        grammar; the last call is the one that counts.

        Args:
            batch: The step's inputs.
            sampled: What was committed.
        """

    def outputs(self, step: Step) -> Reader | None:
        """Queue the copies of what the step gives to the host; its commit is queued.

        Returns:
            What reads it once the step has passed; None where there is nothing this time.
        """
        return None

    def after_sample(self, step: Step, pending: PendingOutput) -> None:
        """Take note, on the host, of a step whose output is on its way."""

    def give_up(self, layout: BatchLayout) -> None:
        """Forget, on the host, a step that an error ended; its requests run the same tokens again.

        It comes after whatever other hooks of the step came, and must not raise.
        """


ExtensionFactory: TypeAlias = Callable[[ExtensionResources], StepExtension]


class Extensions:
    """All extensions of a runner as one; each hook reaches those that define it.

    Args:
        members: In the order in which they are called.

    Raises:
        ExtensionError: Two have one name.
    """

    def __init__(self, members: Sequence[StepExtension]) -> None:
        self.members = tuple(members)
        names = [member.name for member in members]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ExtensionError(f"several extensions are named {twice}; give each its own name")
        self._takers = frozenset(member.name for member in members if member.takes_extras)
        self._checking = self._defining("check")
        self._capturing = self._defining("captures")
        self._varying = self._defining("variant")
        self._extending = self._defining("extend")
        self._preparing = self._defining("before_forward")
        self._following = self._defining("after_commit")
        self._giving = self._defining("outputs")
        self._noting = self._defining("after_sample")
        self._forgetting = self._defining("give_up")
        self._addresses: dict[str, int] = {}
        self.leave_the_key = not self._capturing and not self._varying
        """Whether the key of a step follows from its layout alone."""

    def check(self, plan: StepPlan) -> None:
        """Refuse what no extension takes, or what one of them refuses.

        Raises:
            ProtocolError: Extras are for nobody.
            Mrv2Error: An extension's own.
        """
        if plan.extras or (plan.arrivals and any(arrival.extras for arrival in plan.arrivals)):
            given = {*plan.extras, *(name for each in plan.arrivals for name in each.extras)}
            unknown = sorted(given - self._takers)
            if unknown:
                raise ProtocolError(
                    f"extras are given for {unknown}; those who take any are "
                    f"{sorted(self._takers)}: leave them out, or add the extension"
                )
        for member in self._checking:
            try:
                member.check(plan)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "check", fault) from fault

    def captures(self, layout: BatchLayout) -> Captures:
        """Return the least that any extension allows."""
        least = Captures.WHOLE
        for member in self._capturing:
            try:
                least = min(least, member.captures(layout))
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "captures", fault) from fault
        return least

    def variants(self) -> list[Variant]:
        """Return every combination of variants that a step may need."""
        return list(product(*(member.variants() for member in self._varying)))

    def variant(self, layout: BatchLayout) -> Variant:
        """Return which combination a step needs."""
        if not self._varying:
            return ()
        return tuple(_own_variant(member, layout) for member in self._varying)

    @contextmanager
    def capturing(self, variant: Variant) -> Iterator[None]:
        """Let each extension take its own variant while a step is captured."""
        with ExitStack() as stack:
            for member, own in zip(self._varying, variant, strict=True):
                stack.enter_context(member.capturing(own))
            yield

    def extend(
        self, layout: BatchLayout, batch: InputBatch, num_tokens: int
    ) -> Mapping[str, Tensor]:
        """Return the further inputs of all.

        Raises:
            ExtensionError: Two give one name, or a tensor is at another address than before.
        """
        if not self._extending:
            return NO_TENSORS
        further: dict[str, Tensor] = {}
        for member in self._extending:
            try:
                given = member.extend(layout, batch, num_tokens)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "extend", fault) from fault
            for name, tensor in given.items():
                if name in further:
                    raise ExtensionError(
                        f"extension {member.name!r} gives the input {name!r}, which another one "
                        "has given: one of them must leave it out"
                    )
                self._check_address(member, name, tensor)
                further[name] = tensor
        return further

    def before_forward(self, layout: BatchLayout) -> None:
        """Let each prepare the step on the host."""
        for member in self._preparing:
            try:
                member.before_forward(layout)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "before_forward", fault) from fault

    def after_commit(self, batch: InputBatch, sampled: SampledTokens) -> None:
        """Let each queue its work behind the commit."""
        for member in self._following:
            try:
                member.after_commit(batch, sampled)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "after_commit", fault) from fault

    def outputs(self, step: Step) -> Mapping[str, Reader]:
        """Return what reads each one's output, by name."""
        readers: dict[str, Reader] = {}
        for member in self._giving:
            try:
                reader = member.outputs(step)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "outputs", fault) from fault
            if reader is not None:
                readers[member.name] = reader
        return readers

    def after_sample(self, step: Step, pending: PendingOutput) -> None:
        """Let each take note of the output."""
        for member in self._noting:
            try:
                member.after_sample(step, pending)
            except Mrv2Error:
                raise
            except Exception as fault:
                raise fault_of(member, "after_sample", fault) from fault

    def give_up(self, layout: BatchLayout) -> None:
        """Let each forget a step that an error ended."""
        for member in self._forgetting:
            member.give_up(layout)

    def _defining(self, hook: str) -> tuple[StepExtension, ...]:
        """Return the members that do something at a hook."""
        null = getattr(StepExtension, hook)
        return tuple(m for m in self.members if getattr(type(m), hook, None) is not null)

    def _check_address(self, member: StepExtension, name: str, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        if self._addresses.setdefault(name, address) != address:
            raise ExtensionError(
                f"extension {member.name!r} gives {name!r} at another address than before; a graph "
                "reads where it was first: keep one buffer, and give views that begin where it does"
            )


def _own_variant(member: StepExtension, layout: BatchLayout) -> Hashable:
    try:
        return member.variant(layout)
    except Mrv2Error:
        raise
    except Exception as fault:
        raise fault_of(member, "variant", fault) from fault


def fault_of(member: Any, hook: str, fault: Exception) -> ExtensionError:
    """Return the error that names whose call raised.

    Args:
        member: An extension or a head; it has a name.
        hook: What was called.
        fault: What it raised, not on purpose.
    """
    kind = type(fault).__name__
    return ExtensionError(f"{member.name!r} raised {kind} in {hook}: {fault}")
