"""A step as vLLM's scheduler says it, for the measurement of what its translation costs."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from mrv2 import Arrival, Runner, StepPlan
from mrv2_compat.vllm_v1.step.ledger import RequestLedger
from mrv2_compat.vllm_v1.step.translate_in import plan_step
from mrv2_diff.host_cost import PROMPT, VOCAB_SIZE, Figures, Play


def played_from_vllm() -> Callable[[StepPlan], Play]:
    """Return what makes steps of one engine, each of which is translated before the core runs it.

    A step's bookkeeping is its translation, too. What the scheduler says is made just before, as in
    an engine, so that its numbers are objects of their own and at hand.
    """
    ledger = RequestLedger()

    def played(plan: StepPlan) -> Play:
        say = _saying(plan)

        def play(runner: Runner) -> Figures:
            said = say()
            started = time.thread_time()
            pending = runner.sample(runner.execute(plan_step(said, ledger, 0, VOCAB_SIZE)))
            queued = time.thread_time()
            pending.wait()
            return queued - started, time.thread_time() - queued

        return play

    return played


def _saying(plan: StepPlan) -> Callable[[], SchedulerOutput]:
    """Return what makes a step's `SchedulerOutput` anew, with as little work as can be."""
    work = plan.scheduled
    num_cached = len(work.req_ids) - len(plan.arrivals)  # those that arrive are last
    computed = np.array(work.num_computed_tokens[:num_cached])
    outputs = np.array(work.num_known_tokens[:num_cached]) - len(PROMPT)
    output = SchedulerOutput(
        scheduled_new_reqs=[_new_request(arrival) for arrival in plan.arrivals],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=sum(work.num_tokens),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(plan.departed),
        free_encoder_mm_hashes=[],
    )
    req_ids = work.req_ids

    def say() -> SchedulerOutput:
        return replace(
            output,
            num_scheduled_tokens=dict.fromkeys(req_ids, 1),
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids[:num_cached],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * num_cached,
                num_computed_tokens=computed.tolist(),
                num_output_tokens=outputs.tolist(),
            ),
        )

    return say


def _new_request(arrival: Arrival) -> NewRequestData:
    return NewRequestData(
        req_id=arrival.req_id,
        prompt_token_ids=arrival.token_ids,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, seed=0),
        pooling_params=None,
        block_ids=arrival.block_ids,
        num_computed_tokens=arrival.num_computed_tokens,
        lora_request=None,
    )
