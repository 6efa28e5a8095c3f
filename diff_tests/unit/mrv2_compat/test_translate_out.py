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
        cu_num_sampled=np.array([0, 1, 1, 3], dtype=np.int32),
        batch_id=0,
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
    result = AsyncOutput(pending, BatchIndices())
    assert pending.waited == 0
    assert result.get_output().sampled_token_ids == [[40], [], [41, 42]]
    assert pending.waited == 1
    assert result.get_kv_connector_output() is None


def test_a_request_that_failed_draws_nothing_and_the_others_what_they_drew() -> None:
    from mrv2_compat.vllm_v1.features.failures import OutputWithFailures, with_failures

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


def test_what_features_have_to_say_is_added_to_an_output_now_or_later() -> None:
    from mrv2_compat.vllm_v1.features.active import ActiveFeatures
    from mrv2_compat.vllm_v1.features.feature import ActiveFeature
    from mrv2_compat.vllm_v1.step.translate_out import (
        AsyncOutput,
        BatchIndices,
        model_runner_output,
    )

    class Counts(ActiveFeature):
        name = "counts"

        def add_to(self, output: Any, given: object | None) -> Any:
            output.num_nans_in_logits = given
            return output

    features = ActiveFeatures([Counts()])
    said = dataclasses.replace(output(None), extras={"counts": {"a": 3}, "another": 1})
    assert model_runner_output(said, None, features).num_nans_in_logits == {"a": 3}
    assert model_runner_output(output(None), None, features).num_nans_in_logits is None

    class Pending:
        def wait(self) -> RunnerOutput:
            return said

    pending: Any = Pending()
    late = AsyncOutput(pending, BatchIndices(), features).get_output()
    assert late.num_nans_in_logits == {"a": 3}


def test_prompt_logprobs_become_tensors_by_request() -> None:
    scores = Logprobs(token_ids=IDS, values=VALUES, ranks=RANKS)
    empty = Logprobs(token_ids=IDS[:0], values=VALUES[:0], ranks=RANKS[:0])
    from mrv2_compat.vllm_v1.features.active import ActiveFeatures
    from mrv2_compat.vllm_v1.features.prompt_logprobs import ActivePromptLogprobs
    from mrv2_compat.vllm_v1.step.translate_out import model_runner_output

    features = ActiveFeatures([ActivePromptLogprobs(vocab_size=50)])
    extras = {"prompt_logprobs": {"a": scores, "c": empty}}
    given = dataclasses.replace(output(None), extras=extras)
    result = model_runner_output(given, None, features).prompt_logprobs_dict
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
    first = indices.of(7, ["b", "a"])
    assert first == {"b": 0, "a": 1}
    assert indices.of(7, ["b", "a"]) is first
    assert indices.of(8, ["a"]) == {"a": 0}
    assert indices.of(7, ["b", "a"]) == first


def test_a_batch_without_an_id_is_the_same_as_no_other() -> None:
    from mrv2_compat.vllm_v1.step.translate_out import BatchIndices

    indices = BatchIndices()
    assert indices.of(0, ["b", "a"]) == {"b": 0, "a": 1}
    assert indices.of(0, ["a"]) == {"a": 0}
