"""Logprobs of prompts: the core scores them, and this hands them to vLLM.

As in V1, those of a session are those of its first turn.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mrv2 import PROMPT_LOGPROBS, Logprobs, Sampling, score_unattached
from mrv2.ports import Model
from mrv2_compat.vllm_v1.features.feature import ActiveFeature, Feature, FeatureContext

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


class PromptLogprobsFeature(Feature):
    """Any engine may be asked for them."""

    name = PROMPT_LOGPROBS

    def load(self, context: FeatureContext) -> ActiveFeature:
        """Return the part that every engine has."""
        return ActivePromptLogprobs(context.vllm_config.model_config.get_vocab_size())


class ActivePromptLogprobs(ActiveFeature):
    """The adapter's part.

    Args:
        vocab_size: Width of the logits.
    """

    name = PROMPT_LOGPROBS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def profile(self, hidden: Tensor, model: Model) -> None:
        """Score the largest chunk of a prompt."""
        score_unattached(hidden, self._vocab_size, model.compute_logits)

    def sampling(self, sampling: Sampling, *, goes_on: bool) -> Sampling:
        """Ask for none where a session goes on."""
        return replace(sampling, num_prompt_logprobs=None) if goes_on else sampling

    def add_to(self, output: "ModelRunnerOutput", given: object | None) -> "ModelRunnerOutput":
        """Add the scores of each request, as [prompt_len - 1, 1 + n] tensors."""
        if given is None:
            return output
        from vllm.v1.outputs import LogprobsTensors

        output.prompt_logprobs_dict = {
            req_id: LogprobsTensors(
                torch.from_numpy(scores.token_ids),
                torch.from_numpy(scores.values),
                torch.from_numpy(scores.ranks),
            )
            for req_id, scores in cast("Mapping[str, Logprobs]", given).items()
        }
        return output
