"""From the runner's output to vLLM's ModelRunnerOutput. Pure, host values only."""

from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
)

from mrv2 import PendingOutput, RunnerOutput


def model_runner_output(output: RunnerOutput) -> ModelRunnerOutput:
    """Return vLLM's form of a step's output.

    Every scheduled request is in it, those that drew nothing with an empty list.
    """
    return ModelRunnerOutput(
        req_ids=output.req_ids,
        req_id_to_index=dict(zip(output.req_ids, range(len(output.req_ids)), strict=True)),
        sampled_token_ids=output.token_ids,
        logprobs=_logprobs(output),
    )


def _logprobs(output: RunnerOutput) -> LogprobsLists | None:
    if output.logprobs is None:
        return None
    return LogprobsLists(
        output.logprobs.token_ids,
        output.logprobs.values,
        output.logprobs.ranks,
        output.cu_num_logits.tolist(),
    )


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output that vLLM asks for when it needs it, possibly on another thread.

    Args:
        pending: The runner's.
    """

    def __init__(self, pending: PendingOutput) -> None:
        self._pending = pending

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        return model_runner_output(self._pending.wait())

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return nothing: KV connectors are refused."""
        return None
