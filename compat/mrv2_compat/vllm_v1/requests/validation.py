"""What is wrong with a request's parameters, found where the request enters.

An error in the middle of a step would end the engine and every request in it, so whatever the core
would refuse is looked for here first. vLLM has checked its own bounds by then; what is left are
values that it lets through and nobody can honour.
"""

from collections.abc import Iterable
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from mrv2 import ConfigError, sampling_faults
from mrv2_compat.vllm_v1.step.translate_in import sampling_of


def request_faults(params: Any, vllm_configs: Iterable[Any]) -> list[str]:
    """Return what cannot be honoured, a sentence for each fault that names the parameter.

    Args:
        params: vLLM's SamplingParams, before the engine adds stop tokens and bad words' token ids.
        vllm_configs: The engines' that the request may be for. A request that one of them can
            serve has no fault, since it is not known here which one is meant.
    """
    found: list[str] = []
    for vllm_config in vllm_configs:
        faults = _faults(params, vllm_config)
        if not faults:
            return []
        found = found or faults
    return found


def _faults(params: Any, vllm_config: Any) -> list[str]:
    model = vllm_config.model_config
    vocab_size = model.get_vocab_size()
    completed = _completed(params, model)
    try:
        sampling = sampling_of(completed, 0, 0, vocab_size)
    except ConfigError as error:
        return [f"{error}: send another value, or leave it out"]
    # vLLM itself refuses a thinking budget where no marks are configured.
    faults = sampling_faults(sampling, vocab_size, has_markers=True)
    if (
        params.prompt_logprobs is not None
        and params.skip_reading_prefix_cache is False
        and vllm_config.cache_config.enable_prefix_caching
    ):
        faults.append(
            f"prompt_logprobs is {params.prompt_logprobs} and skip_reading_prefix_cache is False; "
            "a prompt read from the prefix cache has no logprobs: leave one of them out"
        )
    return faults


def _completed(params: Any, model_config: Any) -> Any:
    """Return the parameters with what the engine will add: stop tokens, and ids of bad words.

    They matter only where a request allows few tokens and forbids some, for a while or for good. A
    request that leaves itself no token must not get as far as a step.
    """
    if params.allowed_token_ids is None or not (params.min_tokens or params.bad_words):
        return params
    tokenizer = cached_tokenizer_from_config(model_config)
    completed = params.clone()
    completed._all_stop_token_ids = set(params.all_stop_token_ids)
    completed.update_from_generation_config(
        model_config.try_get_generation_config() or {},
        None if tokenizer is None else tokenizer.eos_token_id,
    )
    if tokenizer is not None:
        completed.update_from_tokenizer(tokenizer)
    return completed
