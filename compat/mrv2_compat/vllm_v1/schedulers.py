"""Which scheduler an engine needs, and what becomes of a failure without it.

vLLM's own schedulers know of no failure of a single request. Where somebody's logits processor may
raise, `scheduler.py`'s take their place; without such processors vLLM's own stay.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

PROCESSORS_GROUP = "vllm.logits_processors"
"""Entry points by which vLLM finds installed logits processors."""

FAILING = "mrv2_compat.vllm_v1.scheduler.FailingScheduler"
FAILING_ASYNC = "mrv2_compat.vllm_v1.scheduler.FailingAsyncScheduler"


class ProcessorError(RuntimeError):
    """A custom logits processor raised, and the engine's scheduler cannot fail one request."""


def has_custom_processors(vllm_config: Any) -> bool:
    """Return whether V1 would load logits processors besides its own."""
    named = vllm_config.model_config.logits_processors
    return bool(named) or bool(entry_points(group=PROCESSORS_GROUP))


def choose_scheduler(vllm_config: Any) -> None:
    """Put a scheduler in place that can fail one request, where one may have to.

    A scheduler that the user named stays.
    """
    config = vllm_config.scheduler_config
    if config.scheduler_cls is None and has_custom_processors(vllm_config):
        config.scheduler_cls = FAILING_ASYNC if config.async_scheduling else FAILING


def require_scheduler(failures: Mapping[str, str], scheduler: object) -> None:
    """Refuse to hide failures from a scheduler that cannot be told of them.

    Args:
        failures: Why requests failed, by id.
        scheduler: `scheduler_cls` of the configuration.

    Raises:
        ProcessorError: There are failures, and the scheduler is not one of ours.
    """
    if failures and scheduler not in (FAILING, FAILING_ASYNC):
        listed = "; ".join(f"request {req_id!r}: {why}" for req_id, why in failures.items())
        raise ProcessorError(
            f"{listed}. The scheduler {scheduler} cannot fail one request: leave --scheduler-cls "
            "out, mend the processor, or send the request without what it acts on"
        )
