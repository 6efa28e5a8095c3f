"""From the runner's output to vLLM's ModelRunnerOutput. Pure, host values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from mrv2 import PendingOutput, RunnerOutput


class BatchIndices:
    """Where each request of a batch is; a batch that goes on keeps its list, and its indices."""

    def __init__(self) -> None:
        self._last: tuple[list[str], dict[str, int]] = [], {}

    def of(self, req_ids: list[str]) -> dict[str, int]:
        """Return the index of each request; shared with later steps, so nobody may change it."""
        last, indices = self._last
        if last is not req_ids:
            indices = dict(zip(req_ids, range(len(req_ids)), strict=True))
            self._last = req_ids, indices  # at once: outputs are made on a thread of their own
        return indices


def model_runner_output(
    output: RunnerOutput, indices: BatchIndices | None = None
) -> ModelRunnerOutput:
    """Return vLLM's form of a step's output.

    Every scheduled request is in it, those that drew nothing with an empty list.

    Args:
        output: The runner's.
        indices: Those of earlier steps, used again where the batch is the same.
    """
    return ModelRunnerOutput(
        req_ids=output.req_ids,
        req_id_to_index=(indices or BatchIndices()).of(output.req_ids),
        sampled_token_ids=output.token_ids,
        logprobs=_logprobs(output),
        prompt_logprobs_dict={
            req_id: LogprobsTensors(
                torch.from_numpy(scores.token_ids),
                torch.from_numpy(scores.values),
                torch.from_numpy(scores.ranks),
            )
            for req_id, scores in output.prompt_logprobs.items()
        },
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


@dataclass
class OutputWithFailures(ModelRunnerOutput):
    """An output in which requests failed. Only schedulers of ours read it."""

    failures: dict[str, str] = field(default_factory=dict)
    """Why, for the id of each request that failed."""


def with_failures(output: ModelRunnerOutput, failures: Mapping[str, str]) -> ModelRunnerOutput:
    """Return an output without what failed requests drew; as it is where none failed."""
    if not failures:
        return output
    values = {entry.name: getattr(output, entry.name) for entry in fields(output)}
    values["sampled_token_ids"] = [
        [] if req_id in failures else drawn
        for req_id, drawn in zip(output.req_ids, output.sampled_token_ids, strict=True)
    ]
    values["prompt_logprobs_dict"] = {
        req_id: logprobs
        for req_id, logprobs in output.prompt_logprobs_dict.items()
        if req_id not in failures
    }
    return OutputWithFailures(**values, failures=dict(failures))


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output that vLLM asks for when it needs it, possibly on another thread.

    Args:
        pending: The runner's.
        failures: Why requests of the step failed, by id.
        indices: Those of earlier steps.
    """

    def __init__(
        self, pending: PendingOutput, failures: Mapping[str, str], indices: BatchIndices
    ) -> None:
        self._pending = pending
        self._failures = failures
        self._indices = indices

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        output = model_runner_output(self._pending.wait(), self._indices)
        return with_failures(output, self._failures)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return nothing: KV connectors are refused."""
        return None
