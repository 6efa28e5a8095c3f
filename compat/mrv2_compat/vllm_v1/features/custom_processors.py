"""Logits processors of others, written for V1's protocol: named by the user, or installed.

What they do in a step is in `processors.py`. One that raises fails its requests and no others,
which takes one of our schedulers.
"""

from typing import TYPE_CHECKING, Any, cast

from mrv2_compat.vllm_v1.features.feature import (
    NO_PARTS,
    ActiveFeature,
    CoreParts,
    Feature,
    FeatureContext,
)
from mrv2_compat.vllm_v1.schedulers import has_custom_processors, require_scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.outputs import ModelRunnerOutput

    from mrv2_compat.vllm_v1.features.processors import CustomProcessors

NAME = "custom_processors"


class CustomProcessorsFeature(Feature):
    """Active where V1 would load processors besides its own."""

    name = NAME

    def load(self, context: FeatureContext) -> ActiveFeature | None:
        """Return the part in an engine that has processors."""
        if not has_custom_processors(context.vllm_config):
            return None
        return ActiveCustomProcessors(context)


class ActiveCustomProcessors(ActiveFeature):
    """The processors of one core runner.

    Args:
        context: The engine's.
    """

    name = NAME

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._processors: CustomProcessors | None = None

    def parts(self) -> CoreParts:
        """Load the processors, and return their stages and what follows their requests."""
        from mrv2_compat.vllm_v1.features.processors import load_custom_processors

        loaded = load_custom_processors(self._context.vllm_config, self._context.device)
        self._processors = loaded
        if loaded is None:
            return NO_PARTS
        return CoreParts(
            reshaping=loaded.reshaping,
            narrowing=loaded.narrowing,
            extensions=(lambda _resources: loaded,),
        )

    def arrival_extra(self, request: "NewRequestData") -> object | None:
        """Return the request's SamplingParams, which processors are shown."""
        return None if self._processors is None else request.sampling_params

    def after_sample(self) -> None:
        """Refuse to hide failures from a scheduler that cannot be told of them.

        Raises:
            ProcessorError: A request failed, and the scheduler is not one of ours.
        """
        if self._processors is not None:
            scheduler: Any = self._context.vllm_config.scheduler_config.scheduler_cls
            require_scheduler(self._processors.last_failures, scheduler)

    def add_to(self, output: "ModelRunnerOutput", given: object | None) -> "ModelRunnerOutput":
        """Leave out what failed requests drew, and say why they failed."""
        if not given:
            return output
        from mrv2_compat.vllm_v1.features.failures import with_failures

        return with_failures(output, cast("dict[str, str]", given))
