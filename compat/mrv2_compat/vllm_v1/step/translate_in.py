"""From vLLM's SchedulerOutput, in the V1 dialect, to the runner's StepPlan.

Host values only: no model, no device, no rows. The order matters and is the reason for a function
of its own: ids that finished are forgotten before new ones of the same name are announced; a
preempted id departs but stays in the ledger; a resumed id departs, in case it was still live, and
arrives.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import add

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from mrv2 import Arrival, Continuation, ProtocolError, Sampling, Scheduled, StepPlan
from mrv2.errors import UnsupportedByRunner
from mrv2_compat.vllm_v1.features.active import NO_FEATURES, ActiveFeatures
from mrv2_compat.vllm_v1.requests.parameters import SHAPES_NOTHING, shaped, shaping
from mrv2_compat.vllm_v1.requests.refusals import asks_for_nothing_refused, request_refusals
from mrv2_compat.vllm_v1.step.ledger import KnownRequest, LastDecode, RequestLedger


def plan_step(
    scheduler_output: SchedulerOutput,
    ledger: RequestLedger,
    engine_seed: int,
    vocab_size: int,
    features: ActiveFeatures = NO_FEATURES,
) -> StepPlan:
    """Translate one step and keep the ledger.

    Args:
        scheduler_output: vLLM's; only read.
        ledger: Updated with the requests that are new or finished.
        engine_seed: Seed of the engine, from which requests without a seed of their own get theirs.
        vocab_size: Width of the logits.
        features: What extensions are told comes from them.

    Raises:
        ProtocolError: A request is scheduled that was never announced, or resumed without its
            tokens, or the lists contradict each other, or drafts are scheduled and no feature takes
            any.
        UnsupportedByRunner: A new request asks for what the runner does not have, and was not
            checked where it entered. After either the ledger is as it was; `take_back_step` makes
            it so where the plan is refused later.
    """
    ledger.begin_step()
    try:
        last = ledger.last_decode
        if last is not None and _goes_on(scheduler_output, last):
            return _plan_next_decode(scheduler_output, last, ledger, features)
        return _plan(scheduler_output, ledger, engine_seed, vocab_size, features)
    except Exception:
        ledger.take_back_step()
        raise


def _goes_on(scheduler_output: SchedulerOutput, last: LastDecode) -> bool:
    """Say whether a step is the plain decode after another: nothing came, went or was taken back.

    This is asked in every step, so each list is passed over once, in C. The sum tells every step of
    a scheduler that counts rightly: none can have computed more than it ran, so that no two
    differences make up for each other. The token that a request runs now is the one that it drew,
    since it has no other.
    """
    cached = scheduler_output.scheduled_cached_reqs
    num_scheduled, num_reqs = scheduler_output.num_scheduled_tokens, len(cached.req_ids)
    return (
        scheduler_output.total_num_scheduled_tokens
        == num_reqs
        == len(num_scheduled)
        == len(cached.new_block_ids)
        == len(cached.num_computed_tokens)
        == len(cached.num_output_tokens)
        and not scheduler_output.scheduled_new_reqs
        and not scheduler_output.finished_req_ids
        and not scheduler_output.preempted_req_ids
        and not scheduler_output.scheduled_spec_decode_tokens
        and not cached.resumed_req_ids
        and cached.req_ids == last.scheduled.req_ids
        and list(num_scheduled) == cached.req_ids
        and list(num_scheduled.values()).count(1) == num_reqs
        and sum(cached.num_computed_tokens) == last.total_computed + num_reqs
    )


def _plan_next_decode(
    scheduler_output: SchedulerOutput,
    last: LastDecode,
    ledger: RequestLedger,
    features: ActiveFeatures,
) -> StepPlan:
    cached = scheduler_output.scheduled_cached_reqs
    scheduled, num_reqs = last.scheduled.next_decode(), len(cached.req_ids)
    ledger.last_decode = LastDecode(
        scheduled=scheduled, total_computed=last.total_computed + num_reqs
    )
    return StepPlan(
        continuations=_continuations(cached),
        scheduled=scheduled,
        extras=features.plan_extras(scheduler_output),
    )


def _plan(
    scheduler_output: SchedulerOutput,
    ledger: RequestLedger,
    engine_seed: int,
    vocab_size: int,
    features: ActiveFeatures,
) -> StepPlan:
    cached = scheduler_output.scheduled_cached_reqs
    new = scheduler_output.scheduled_new_reqs
    _require_equal_lists(cached)
    for request in new:
        _require_support(request, features)
    for req_id in scheduler_output.finished_req_ids:
        ledger.forget(req_id)
    departed = (
        *scheduler_output.finished_req_ids,
        *(scheduler_output.preempted_req_ids or ()),
        *cached.resumed_req_ids,
        *(request.req_id for request in new if request.req_id in ledger),
    )
    arrivals = [_announce(request, ledger, engine_seed, vocab_size, features) for request in new]
    arrivals.extend(_resume(cached, ledger))
    scheduled = _scheduled(scheduler_output, ledger)
    _require_drafts(scheduled, scheduler_output.scheduled_spec_decode_tokens, features)
    ledger.last_decode = None if arrivals else _decode(scheduled)
    return StepPlan(
        departed=departed,
        arrivals=tuple(arrivals),
        continuations=_continuations(cached),
        scheduled=scheduled,
        extras=features.plan_extras(scheduler_output),
    )


def _decode(scheduled: Scheduled) -> LastDecode | None:
    """Return what the next step is compared with; None for a step that is no plain decode.

    The sums are exact: where each request runs one token, none runs one that is not known.
    """
    num_reqs = len(scheduled.req_ids)
    if not num_reqs or scheduled.num_tokens.count(1) != num_reqs:
        return None
    total_computed = sum(scheduled.num_computed_tokens)
    if sum(scheduled.num_known_tokens) != total_computed + num_reqs:
        return None
    return LastDecode(scheduled=scheduled, total_computed=total_computed)


def sampling_of(
    params: SamplingParams, engine_seed: int, arrival_number: int, vocab_size: int
) -> Sampling:
    """Translate sampling parameters; what the runner refuses is refused elsewhere.

    A request without a seed gets one from the engine's seed and the number of its arrival, so that
    every rank gives it the same. Parameters of a greedy request that only narrow a draw were reset
    by vLLM already.

    Raises:
        ConfigError: A value is outside its range.
    """
    seed = params.seed
    if seed is None:
        digest = hashlib.blake2b(b"%d/%d" % (engine_seed, arrival_number), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    if shaping(params) in SHAPES_NOTHING:
        return Sampling(temperature=params.temperature, seed=seed)
    return Sampling(temperature=params.temperature, seed=seed, **shaped(params, vocab_size))


def _require_equal_lists(cached: CachedRequestData) -> None:
    lengths = (len(cached.new_block_ids), len(cached.num_computed_tokens),
               len(cached.num_output_tokens))  # fmt: skip
    num_reqs = len(cached.req_ids)
    if lengths != (num_reqs, num_reqs, num_reqs):
        raise ProtocolError(f"{num_reqs} requests go on, with lists of {lengths} entries")


def _require_drafts(
    scheduled: Scheduled, drafts: Mapping[str, Sequence[int]], features: ActiveFeatures
) -> None:
    """Refuse drafts that nobody takes, and those that are not what their request runs.

    A request runs its drafts behind its known tokens, so the two must be as many.
    """
    if not features.max_drafts:
        if drafts:
            raise ProtocolError(
                f"vLLM schedules drafts of {sorted(drafts)}, and no feature of this engine takes "
                "drafts: leave speculative decoding out"
            )
        return
    for req_id, computed, num_tokens, known in zip(
        scheduled.req_ids,
        scheduled.num_computed_tokens,
        scheduled.num_tokens,
        scheduled.num_known_tokens,
        strict=True,
    ):
        num_behind, num_drafts = max(computed + num_tokens - known, 0), len(drafts.get(req_id, ()))
        if num_behind != num_drafts:
            raise ProtocolError(
                f"request {req_id!r} runs {num_behind} tokens behind its known ones, and vLLM "
                f"schedules {num_drafts} drafts of it"
            )


def _require_support(request: NewRequestData, features: ActiveFeatures) -> None:
    """Refuse what slipped past the check of requests: ignoring it would give wrong tokens."""
    params = request.sampling_params
    if params is None or asks_for_nothing_refused(params):  # `_announce` says what None is
        return
    reasons = request_refusals(params, lifted=features.lifted)
    if reasons:
        raise UnsupportedByRunner([f"request {request.req_id!r}: {reason}" for reason in reasons])


def _announce(
    request: NewRequestData,
    ledger: RequestLedger,
    engine_seed: int,
    vocab_size: int,
    features: ActiveFeatures,
) -> Arrival:
    if request.prompt_token_ids is None or request.sampling_params is None:
        raise ProtocolError(
            f"request {request.req_id!r} has no prompt token ids or no sampling parameters"
        )
    params = request.sampling_params
    sampling = features.sampling(
        sampling_of(params, engine_seed, ledger.num_announced, vocab_size),
        goes_on=request.req_id in ledger,
    )
    extras = features.arrival_extras(request)
    ledger.announce(
        request.req_id,
        KnownRequest(prompt_len=len(request.prompt_token_ids), sampling=sampling, extras=extras),
    )
    return Arrival(
        req_id=request.req_id,
        token_ids=request.prompt_token_ids,
        prompt_len=len(request.prompt_token_ids),
        num_computed_tokens=request.num_computed_tokens,
        block_ids=request.block_ids,
        sampling=sampling,
        extras=extras,
    )


def _resume(cached: CachedRequestData, ledger: RequestLedger) -> Iterator[Arrival]:
    if not cached.resumed_req_ids:
        return
    for req_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if req_id not in cached.resumed_req_ids:
            continue
        token_ids = cached.all_token_ids.get(req_id)
        if token_ids is None or block_ids is None:
            raise ProtocolError(
                f"request {req_id!r} is resumed without its tokens or without its blocks"
            )
        known = ledger.get(req_id)
        yield Arrival(
            req_id=req_id,
            token_ids=token_ids,
            prompt_len=known.prompt_len,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids,
            sampling=known.sampling,
            extras=known.extras,
        )


def _continuations(cached: CachedRequestData) -> tuple[Continuation, ...]:
    req_ids, new_block_ids, resumed = cached.req_ids, cached.new_block_ids, cached.resumed_req_ids
    if new_block_ids.count(None) == len(req_ids):
        return ()
    # Most requests are given nothing: they are passed over without a line of Python for each.
    given = zip(compress(req_ids, new_block_ids), filter(None, new_block_ids), strict=True)
    return tuple(
        Continuation(req_id=req_id, new_block_ids=block_ids)
        for req_id, block_ids in given
        if req_id not in resumed
    )


def _scheduled(scheduler_output: SchedulerOutput, ledger: RequestLedger) -> Scheduled:
    cached = scheduler_output.scheduled_cached_reqs
    new = scheduler_output.scheduled_new_reqs
    req_ids = [*cached.req_ids, *(request.req_id for request in new)]
    num_scheduled = scheduler_output.num_scheduled_tokens
    prompt_lens = ledger.prompt_lens(req_ids)
    num_outputs = [*cached.num_output_tokens, *(0 for _ in new)]
    if list(num_scheduled) == req_ids:  # as in a steady decode
        num_tokens = list(num_scheduled.values())
    elif len(num_scheduled) == len(req_ids) and num_scheduled.keys() == set(req_ids):
        num_tokens = [num_scheduled[req_id] for req_id in req_ids]
    else:
        differing = sorted(set(req_ids) ^ set(num_scheduled)) or req_ids
        raise ProtocolError(
            f"the requests of the step and those with a number of tokens differ in {differing}"
        )
    return Scheduled(
        req_ids=req_ids,
        num_tokens=num_tokens,
        num_computed_tokens=[
            *cached.num_computed_tokens,
            *(request.num_computed_tokens for request in new),
        ],
        num_known_tokens=list(map(add, prompt_lens, num_outputs)),
    )
