"""What a step's output becomes for vLLM."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from mrv2 import Logprobs, RunnerOutput

pytestmark = pytest.mark.vllm

IDS = np.array([[40, 1, 2], [41, 3, 4], [42, 5, 6]], dtype=np.int32)
VALUES = np.array([[-1, -2, -3], [-4, -5, -6], [-7, -8, -9]], dtype=np.float32)
RANKS = np.array([1, 2, 3], dtype=np.int32)


def translated(output: RunnerOutput) -> Any:
    from mrv2_compat.vllm_v1.step.translate_out import model_runner_output

    return model_runner_output(output)


def output(logprobs: Logprobs | None) -> RunnerOutput:
    """Three requests; the one in the middle of its prompt drew nothing, the last drew two."""
    return RunnerOutput(
        req_ids=["a", "b", "c"],
        token_ids=[[40], [], [41, 42]],
        logprobs=logprobs,
        cu_num_logits=np.array([0, 1, 1, 3], dtype=np.int32),
    )


def test_every_scheduled_request_is_in_the_output() -> None:
    result = translated(output(None))
    assert result.req_ids == ["a", "b", "c"]
    assert result.req_id_to_index == {"a": 0, "b": 1, "c": 2}
    assert result.sampled_token_ids == [[40], [], [41, 42]]
    assert result.logprobs is None


def test_a_requests_logprobs_are_found_behind_one_that_drew_nothing() -> None:
    result = translated(output(Logprobs(token_ids=IDS, values=VALUES, ranks=RANKS)))
    assert result.logprobs.cu_num_generated_tokens == [0, 1, 1, 3]
    for index, (first, end) in enumerate(((0, 1), (1, 1), (1, 3))):
        # vLLM's scheduler slices like this, for as many tokens as the request drew.
        sliced = result.logprobs.slice_request(index, len(result.sampled_token_ids[index]))
        assert sliced.logprob_token_ids.tolist() == IDS[first:end].tolist()
        assert sliced.logprobs.tolist() == VALUES[first:end].tolist()
        assert sliced.sampled_token_ranks.tolist() == RANKS[first:end].tolist()


def test_an_output_in_flight_waits_once_it_is_asked_for() -> None:
    from mrv2_compat.vllm_v1.step.translate_out import AsyncOutput, BatchIndices

    class Pending:
        waited = 0

        def wait(self) -> RunnerOutput:
            self.waited += 1
            return output(None)

    pending: Any = Pending()
    result = AsyncOutput(pending, {}, BatchIndices())
    assert pending.waited == 0
    assert result.get_output().sampled_token_ids == [[40], [], [41, 42]]
    assert pending.waited == 1
    assert result.get_kv_connector_output() is None


def test_a_request_that_failed_draws_nothing_and_the_others_what_they_drew() -> None:
    from mrv2_compat.vllm_v1.step.translate_out import (
        AsyncOutput,
        BatchIndices,
        OutputWithFailures,
        with_failures,
    )

    whole = translated(output(Logprobs(token_ids=IDS, values=VALUES, ranks=RANKS)))
    whole.prompt_logprobs_dict = {"a": None, "b": None}
    assert with_failures(whole, {}) is whole
    cut: Any = with_failures(whole, {"a": "it raised"})
    assert isinstance(cut, OutputWithFailures)
    assert cut.failures == {"a": "it raised"}
    assert cut.sampled_token_ids == [[], [], [41, 42]]
    assert (cut.req_ids, cut.req_id_to_index) == (whole.req_ids, whole.req_id_to_index)
    assert (cut.logprobs, cut.prompt_logprobs_dict) == (whole.logprobs, {"b": None})
    assert whole.sampled_token_ids == [[40], [], [41, 42]]

    class Pending:
        def wait(self) -> RunnerOutput:
            return output(None)

    pending: Any = Pending()
    late: Any = AsyncOutput(pending, {"c": "it raised"}, BatchIndices()).get_output()
    assert (late.sampled_token_ids, late.failures) == ([[40], [], []], {"c": "it raised"})


def test_prompt_logprobs_become_tensors_by_request() -> None:
    scores = Logprobs(token_ids=IDS, values=VALUES, ranks=RANKS)
    empty = Logprobs(token_ids=IDS[:0], values=VALUES[:0], ranks=RANKS[:0])
    given = dataclasses.replace(output(None), prompt_logprobs={"a": scores, "c": empty})
    result = translated(given).prompt_logprobs_dict
    assert list(result) == ["a", "c"]
    # vLLM's LogprobsProcessor unpacks and reads them like this.
    token_ids, values, ranks, *_ = result["a"]
    assert values.shape == (3, 3)
    assert token_ids.flatten().tolist() == IDS.flatten().tolist()
    assert (values.tolist(), ranks.tolist()) == (VALUES.tolist(), RANKS.tolist())
    assert tuple(result["c"].logprobs.shape) == (0, 3), "a prompt of one token has no entry"


def test_a_batch_that_goes_on_keeps_its_indices() -> None:
    from mrv2_compat.vllm_v1.step.translate_out import BatchIndices

    indices = BatchIndices()
    names = ["b", "a"]
    first = indices.of(names)
    assert first == {"b": 0, "a": 1}
    assert indices.of(names) is first
    assert indices.of(["a"]) == {"a": 0}
    assert indices.of(["b", "a"]) == first
