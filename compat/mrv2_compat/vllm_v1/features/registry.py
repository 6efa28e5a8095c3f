"""The features that engines may use, in the order in which they add to an output."""

from mrv2_compat.vllm_v1.features.custom_processors import CustomProcessorsFeature
from mrv2_compat.vllm_v1.features.feature import Feature
from mrv2_compat.vllm_v1.features.prompt_logprobs import PromptLogprobsFeature

FEATURES: tuple[Feature, ...] = (
    PromptLogprobsFeature(),
    CustomProcessorsFeature(),  # leaves out what failed requests were given
)
