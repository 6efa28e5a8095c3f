"""An output in which single requests failed, for schedulers that can be told so."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from vllm.v1.outputs import ModelRunnerOutput


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
