"""A SchedulerOutput as an event of a trace, and the event as a SchedulerOutput again."""

from typing import Any

import msgspec

from mrv2_diff.traces.events import Executed, Known, Mask, NewRequest, Output, Params, Sampled

UNRECORDED_OF_A_STEP = (
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "free_encoder_mm_hashes",
    "num_invalid_spec_tokens",
    "kv_connector_metadata",
    "has_sync_kv_loads",
    "aux_output_connector_metadata",
    "ec_connector_metadata",
    "ec_manager_metadata",
    "num_spec_tokens_to_schedule",
)
"""Of a SchedulerOutput: what a trace has no place for. Each is empty unless a feature is on."""
UNRECORDED_OF_A_REQUEST = (
    "mm_features",
    "pooling_params",
    "lora_request",
    "prompt_embeds",
    "prompt_is_token_ids",
    "replay_start",
)
UNRECORDED_OF_PARAMETERS = ("extra_args", "prompt_logprob_token_ids", "watermarking")

_HIDDEN = {
    "eos_token_id": "_eos_token_id",
    "all_stop_token_ids": "_all_stop_token_ids",
    "bad_words_token_ids": "_bad_words_token_ids",
}
"""Parameters that vLLM derives from a request, by our name and its."""
_ASKED = tuple(name for name in Params.__struct_fields__ if name not in _HIDDEN)


class UnrecordableError(ValueError):
    """A step has something that a trace has no place for."""


def executed_event(output: Any) -> Executed:
    """Return the event of a SchedulerOutput; it holds the very lists, so encode it at once.

    Raises:
        UnrecordableError: There is no place for some of it.
    """
    _refuse_present("a step", output, UNRECORDED_OF_A_STEP)
    cached = output.scheduled_cached_reqs
    if cached.new_token_ids:
        raise UnrecordableError("new_token_ids, which pipeline parallelism sends, have no place")
    preempted, copies = output.preempted_req_ids, output.kv_cache_block_copies
    return Executed(
        [_new_request(new) for new in output.scheduled_new_reqs],
        Known(
            cached.req_ids,
            list(cached.resumed_req_ids),
            cached.all_token_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
        ),
        output.num_scheduled_tokens,
        list(output.finished_req_ids),
        None if preempted is None else list(preempted),
        output.new_block_ids_to_zero,
        None if copies is None else [(copy[0], copy[1]) for copy in copies],
        bool(output.has_structured_output_requests),
        bool(output.pending_structured_output_tokens),
    )


def sampled_event(step: int, grammar: Any) -> Sampled:
    """Return the event of a step's GrammarOutput."""
    return Sampled(
        step, list(grammar.structured_output_request_ids), Mask.of(grammar.grammar_bitmask)
    )


def output_event(step: int, output: Any) -> Output:
    """Return the event of a ModelRunnerOutput; it holds the very lists."""
    return Output(step, output.req_ids, output.sampled_token_ids)


def scheduler_output(event: Executed) -> Any:
    """Return a SchedulerOutput of an event, its lists its own."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    known, copies = event.known, event.kv_cache_block_copies
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=new.req_id,
                prompt_token_ids=list(new.prompt),
                mm_features=[],
                sampling_params=sampling_params(new.params),
                pooling_params=None,
                block_ids=tuple(list(ids) for ids in new.block_ids),
                num_computed_tokens=new.num_computed_tokens,
                lora_request=None,
            )
            for new in event.new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(known.req_ids),
            resumed_req_ids=set(known.resumed_req_ids),
            new_token_ids=[],
            all_token_ids={name: list(ids) for name, ids in known.all_token_ids.items()},
            new_block_ids=[
                None if groups is None else tuple(list(ids) for ids in groups)
                for groups in known.new_block_ids
            ],
            num_computed_tokens=list(known.num_computed_tokens),
            num_output_tokens=list(known.num_output_tokens),
        ),
        num_scheduled_tokens=dict(event.num_scheduled_tokens),
        total_num_scheduled_tokens=sum(event.num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(event.finished_req_ids),
        free_encoder_mm_hashes=[],
        preempted_req_ids=(
            None if event.preempted_req_ids is None else set(event.preempted_req_ids)
        ),
        has_structured_output_requests=event.has_structured_output_requests,
        pending_structured_output_tokens=event.pending_structured_output_tokens,
        new_block_ids_to_zero=(
            None if event.new_block_ids_to_zero is None else list(event.new_block_ids_to_zero)
        ),
        kv_cache_block_copies=(
            None if copies is None else [KVCacheBlockCopy(*copy) for copy in copies]
        ),
    )


def grammar_output(event: Sampled | None) -> Any:
    """Return a GrammarOutput of an event, or None."""
    from vllm.v1.core.sched.output import GrammarOutput

    if event is None:
        return None
    return GrammarOutput(list(event.req_ids), event.mask.array())


def sampling_params(params: Params) -> Any:
    """Return vLLM's SamplingParams; text that only its front end reads is not there."""
    from vllm import SamplingParams

    built = SamplingParams(
        **{name: getattr(params, name) for name in _ASKED}, detokenize=False, skip_clone=True
    )
    for ours, theirs in _HIDDEN.items():
        value = getattr(params, ours)
        setattr(built, theirs, set(value) if ours == "all_stop_token_ids" else value)
    return built


def _new_request(new: Any) -> NewRequest:
    _refuse_present(f"request {new.req_id!r}", new, UNRECORDED_OF_A_REQUEST)
    if new.prompt_token_ids is None or new.sampling_params is None:
        raise UnrecordableError(f"request {new.req_id!r} has no prompt of token ids")
    return NewRequest(
        new.req_id,
        new.prompt_token_ids,
        _params(new.sampling_params),
        list(new.block_ids),
        new.num_computed_tokens,
    )


def _params(asked: Any) -> Params:
    _refuse_present("a request's parameters", asked, UNRECORDED_OF_PARAMETERS)
    values = {name: getattr(asked, name) for name in _ASKED}
    values |= {ours: getattr(asked, theirs) for ours, theirs in _HIDDEN.items()}
    values["all_stop_token_ids"] = sorted(values["all_stop_token_ids"])
    # vLLM's front end has checked them; here numbers of other libraries become Python's.
    return msgspec.convert(values, Params, strict=False)


def _refuse_present(what: str, holder: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(holder, name, None):
            raise UnrecordableError(f"{what} has {name}, for which a trace has no place")
