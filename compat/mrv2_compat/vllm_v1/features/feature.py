"""What a whole feature is to the adapter: which rules it lifts, and where it takes part.

A feature has two halves. `Feature` is its entry in `registry.FEATURES`: it is asked in every
process that builds a configuration, so its module imports nothing of vLLM before it is loaded.
`ActiveFeature` is what a runner has of it, made for each core runner. Both base classes do nothing,
so that a feature states what it does and no more.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mrv2 import ExtensionFactory, HeadFactory, Sampling, StageFactory
from mrv2.ports import Model

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

HeadOverStages: TypeAlias = Callable[[tuple[StageFactory, ...]], HeadFactory]
"""Makes a head's factory from the stages of the sampler, in order."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureContext:
    """What a feature is loaded from."""

    vllm_config: Any
    """The engine's VllmConfig, final."""
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """What a feature brings to a core runner."""

    reshaping: tuple[StageFactory, ...] = ()
    """Stages that may change the likeliest token."""
    narrowing: tuple[StageFactory, ...] = ()
    """Stages that never do."""
    extensions: tuple[ExtensionFactory, ...] = ()
    head: HeadOverStages | None = None
    """In the place of the sampler; at most one feature of an engine may have one."""


NO_PARTS = CoreParts()


class ActiveFeature:
    """A feature as one engine uses it; this one does nothing.

    One is made for each core runner, so whatever it holds begins anew with the rows.
    """

    name: str = "null"
    """Its key in the extras of plans, arrivals and outputs: its extension's, if it has one."""
    max_drafts: int = 0
    """Tokens that a request may run in one step behind those that are known."""
    serves: Mapping[str, Any] = NOTHING
    """Names of vLLM's surface that are no-ops or refused without it: a function, or an attribute's
    value, for each."""

    def parts(self) -> CoreParts:
        """Return what goes into the core runner; called once, when that is built."""
        return NO_PARTS

    def profile(self, hidden: Tensor, model: Model) -> None:
        """Do, beside any request, what takes the most memory, for vLLM to measure.

        Args:
            hidden: [num_tokens, hidden_size]. Hidden states of the largest step.
            model: Turns rows of them into logits.
        """

    def arrival_extra(self, request: "NewRequestData") -> object | None:
        """Return what its extension is told of a request that arrives; None where it is nothing.

        It is told the same again when the request is resumed.
        """
        return None

    def sampling(self, sampling: Sampling, *, goes_on: bool) -> Sampling:
        """Return what the core is to sample a request by.

        Args:
            sampling: What the request asks for.
            goes_on: Whether the request is the next turn of one that is known.
        """
        return sampling

    def plan_extra(self, scheduler_output: "SchedulerOutput") -> object | None:
        """Return what its extension is told of a step; None where it is nothing."""
        return None

    def after_sample(self) -> None:
        """Look at a step whose sampling was queued, before its output is handed out.

        Raises:
            Exception: The engine must end.
        """

    def add_to(self, output: "ModelRunnerOutput", given: object | None) -> "ModelRunnerOutput":
        """Return an output with what the feature has to say; it may be changed in place.

        Args:
            output: vLLM's form of a step's output.
            given: What its extension gave, None where that was nothing.
        """
        return output


class Feature:
    """An entry of `registry.FEATURES`; this one lifts nothing and is never active."""

    name: str = "null"
    """As users call it, in errors."""

    def lifts(self, vllm_config: Any) -> Collection[str]:
        """Return the rules that the feature makes unnecessary in an engine.

        Args:
            vllm_config: The engine's, before it was checked; the feature may look at any of it.

        Returns:
            Paths of `CONFIG_RULES` and `REQUEST_RULES`, and `engine_input.` before a type of input.
        """
        return ()

    def load(self, context: FeatureContext) -> ActiveFeature | None:
        """Return the feature's part in an engine; None where the engine does not use it."""
        return None
