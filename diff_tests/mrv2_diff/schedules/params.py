"""What vLLM is asked for when a request arrives."""

from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from mrv2_diff.schedules.actions import Arrive


def sampling_params(action: Arrive) -> SamplingParams:
    """Return the sampling parameters of a request."""
    return SamplingParams(
        max_tokens=action.max_tokens,
        temperature=action.temperature,
        seed=action.seed,
        stop_token_ids=None if action.stop is None else [action.stop],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=(
            None if action.grammar is None else StructuredOutputsParams(regex="made up")
        ),
        **action.options,
    )
