"""vLLM's schedulers, which can also be told that one request failed.

A runner of V1's interface has no way to say so: it raises, and the engine ends with every request
in it. Where somebody's logits processor may raise, these classes take the place of vLLM's own. They
schedule as those do, and finish the requests that an output names as failed, with an error, as
vLLM's schedulers do for a grammar that could not be compiled.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from mrv2_compat.vllm_v1.features.failures import OutputWithFailures


class FinishesFailures:
    """What is added to either of vLLM's schedulers."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take a step's output as vLLM does, then finish the requests that failed in it."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if isinstance(model_runner_output, OutputWithFailures):
            failures = model_runner_output.failures
            finished = self.finish_requests(  # type: ignore[attr-defined]
                failures, RequestStatus.FINISHED_ERROR
            )
            for request in finished:
                of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
                of_client.outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        finish_reason=request.get_finished_reason(),
                        stop_reason=failures[request.request_id],
                        events=request.take_events(),
                        trace_headers=request.trace_headers,
                    )
                )
        return outputs


class FailingScheduler(FinishesFailures, Scheduler):
    """vLLM's scheduler, with failures of single requests."""


class FailingAsyncScheduler(FinishesFailures, AsyncScheduler):
    """vLLM's scheduler that plans a step ahead, with failures of single requests."""
