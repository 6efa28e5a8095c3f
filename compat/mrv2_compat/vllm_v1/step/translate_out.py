"""From the runner's output to vLLM's ModelRunnerOutput. Pure, host values only."""

from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
)

from mrv2 import PendingOutput, RunnerOutput
from mrv2_compat.vllm_v1.features.active import NO_FEATURES, ActiveFeatures


class BatchIndices:
    """Where each request of a batch is; a batch that goes on keeps its id, and its indices."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[str, int]] = 0, {}

    def of(self, batch_id: int, req_ids: list[str]) -> dict[str, int]:
        """Return the index of each request; shared with later steps, so nobody may change it.

        Args:
            batch_id: The same for the same requests in the same order; 0 is the same as nothing.
            req_ids: The requests.
        """
        last, indices = self._last
        if last != batch_id or not batch_id:
            indices = dict(zip(req_ids, range(len(req_ids)), strict=True))
            self._last = batch_id, indices  # at once: outputs are made on a thread of their own
        return indices


def model_runner_output(
    output: RunnerOutput,
    indices: BatchIndices | None = None,
    features: ActiveFeatures = NO_FEATURES,
) -> ModelRunnerOutput:
    """Return vLLM's form of a step's output.

    Every scheduled request is in it, those that drew nothing with an empty list, and those that had
    drafts with as many tokens as they were given.

    Args:
        output: The runner's.
        indices: Those of earlier steps, used again where the batch is the same.
        features: What they have to say is added.
    """
    indices = indices or BatchIndices()
    translated = ModelRunnerOutput(
        req_ids=output.req_ids,
        req_id_to_index=indices.of(output.batch_id, output.req_ids),
        sampled_token_ids=output.token_ids,
        logprobs=_logprobs(output),
    )
    return features.add_to(translated, output.extras)


def _logprobs(output: RunnerOutput) -> LogprobsLists | None:
    if output.logprobs is None:
        return None
    return LogprobsLists(
        output.logprobs.token_ids,
        output.logprobs.values,
        output.logprobs.ranks,
        output.cu_num_sampled.tolist(),
    )


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output that vLLM asks for when it needs it, possibly on another thread.

    Args:
        pending: The runner's.
        indices: Those of earlier steps.
        features: What they have to say is added.
    """

    def __init__(
        self,
        pending: PendingOutput,
        indices: BatchIndices,
        features: ActiveFeatures = NO_FEATURES,
    ) -> None:
        self._pending = pending
        self._indices = indices
        self._features = features

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        return model_runner_output(self._pending.wait(), self._indices, self._features)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return nothing: KV connectors are refused."""
        return None
