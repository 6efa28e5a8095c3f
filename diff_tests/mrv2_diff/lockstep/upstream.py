"""vLLM's own V2 runner under observation, driven from outside.

It speaks another dialect of the scheduler, so each step is translated. Its draws come through a
sampler that wraps its own. It forgets preempted requests; what it was told of those is the
dialect's.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from mrv2.errors import UnsupportedByRunner
from mrv2_diff import interpreter
from mrv2_diff.lockstep.dialect import V2Dialect
from mrv2_diff.lockstep.values import (
    Forced,
    block_sizes_of,
    ints,
    poison,
    prompt_logprobs_of,
    rows_of_logprobs,
    used_blocks,
)
from mrv2_diff.observation import Ints, Observation


class VllmV2Subject:
    """vLLM's V2 runner, on a CPU.

    Args:
        vllm_config: A private copy of the engine's config.
        on: The device.

    Raises:
        UnsupportedByRunner: This process does not interpret Triton.
    """

    def __init__(self, vllm_config: VllmConfig, on: torch.device) -> None:
        if not interpreter.is_prepared():
            raise UnsupportedByRunner(["vllm-v2 needs a process that interprets Triton"])
        # Its kernels want a Triton, so it is imported where there is one.
        from vllm.v1.worker.cpu.model_runner import CPUModelRunner

        self.runner: Any = CPUModelRunner(vllm_config, on)
        self._dialect = V2Dialect()
        self._sampler: _WrappedSampler | None = None
        self._observing = False
        self._inputs: dict[str, Any] = {}
        self._output: ModelRunnerOutput | None = None

    def observe(self, on: bool) -> None:
        """Start or stop copying values."""
        self._observing = on
        if self._sampler is None and self.runner.sampler is not None:
            self._sampler = self.runner.sampler = _WrappedSampler(self.runner.sampler)
        if self._sampler is not None:
            self._sampler.observing = on

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step up to its hidden states."""
        output: ModelRunnerOutput | None = self.runner.execute_model(self._dialect.translate(step))
        if output is None and self._observing:
            self._inputs = self._copied_inputs()
        return output

    def sample(self, forced: Forced | None, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step."""
        assert self._sampler is not None
        self._sampler.forced = forced
        output = self.runner.sample_tokens(grammar)
        get_output = getattr(output, "get_output", None)
        self._output = output if get_output is None else get_output()
        return self._output

    def observation(self) -> Observation:
        """Return what the last step did, in V2's order."""
        output, sampler = self._output, self._sampler
        assert output is not None
        assert sampler is not None
        assert sampler.raw is not None
        assert sampler.processed is not None
        assert sampler.own_choice is not None
        drawn = [index for index, tokens in enumerate(output.sampled_token_ids) if tokens]
        own = ints(sampler.own_choice)[drawn]
        return Observation(
            **self._inputs,
            draw_ids=[output.req_ids[index] for index in drawn],
            logits=sampler.raw[drawn],
            processed_logits=sampler.processed[drawn],
            tokens=own,
            drawn=own,
            logprobs=rows_of_logprobs(output, drawn),
            prompt_logprobs=prompt_logprobs_of(output),
        )

    def ledger(self) -> dict[str, dict[str, object]]:
        """Return what the runner holds of each request; of preempted ones, what it was told."""
        rows = self.runner.req_states.req_id_to_index
        facts: dict[str, dict[str, object]] = {}
        for req_id, request in self._dialect.known.items():
            params: Any = request.sampling_params
            told = {
                "prompt_len": len(request.prompt_token_ids or ()),
                "temperature": params.temperature,
                "num_logprobs": params.logprobs,
            }
            facts[req_id] = told | self._held(rows[req_id], told) if req_id in rows else told
        unknown = set(rows) - set(facts)
        return facts | {req_id: {"known": False} for req_id in unknown}

    def reset(self) -> None:
        """Poison the KV cache; V2 forgets a request when it is told that it has ended.

        Raises:
            RuntimeError: It still holds requests.
        """
        if self.runner.req_states.req_id_to_index:
            held = sorted(self.runner.req_states.req_id_to_index)
            raise RuntimeError(f"vllm-v2 still holds {held}; drain the engine first")
        self._dialect.forget()
        poison(self.kv_tensors())

    def kv_tensors(self) -> list[Tensor]:
        """Return the KV cache of each layer."""
        return list(self.runner.kv_caches)

    def steps_by_mode(self) -> dict[str, int]:
        """Return nothing: it does not say."""
        return {}

    def _held(self, row: int, told: dict[str, object]) -> dict[str, object]:
        """Return a request's columns in the types of what was told, where they mean the same."""
        states, sampling = self.runner.req_states, self.runner.sampler.sampling_states
        temperature = float(sampling.temperature.np[row])
        same = np.float32(told["temperature"]) == np.float32(temperature)  # type: ignore[arg-type]
        count = int(sampling.num_logprobs[row])
        whole = told["num_logprobs"] == -1 and count == self.runner.vocab_size
        return {
            "prompt_len": int(states.prompt_len.np[row]),
            "temperature": told["temperature"] if same else temperature,
            "num_logprobs": -1 if whole else None if count == -1 else count,
        }

    def _copied_inputs(self) -> dict[str, Any]:
        state = self.runner.execute_model_state
        batch, slots = state.input_batch, state.slot_mappings_by_layer
        num_tokens, num_reqs = batch.num_tokens, batch.num_reqs
        groups = self.runner.kv_cache_config.kv_cache_groups
        return {
            "req_ids": list(batch.req_ids),
            "query_lens": np.diff(batch.query_start_loc_np[: num_reqs + 1]).astype(np.int64),
            "input_ids": ints(batch.input_ids[:num_tokens]),
            "positions": ints(batch.positions[:num_tokens]),
            "seq_lens": ints(batch.seq_lens[:num_reqs]),
            "slots": tuple(_group_slots(slots, group, num_tokens) for group in groups),
            "blocks": used_blocks(
                self.runner.block_tables.input_block_tables,
                block_sizes_of(self.runner),
                batch.req_ids,
                ints(batch.seq_lens[:num_reqs]),
            ),
        }


def _group_slots(slots: dict[str, Tensor], group: Any, num_tokens: int) -> Ints:
    """Return the slots of a KV group, which all its layers share."""
    return ints(slots[group.layer_names[0]][:num_tokens])


class _WrappedSampler:
    """V2's sampler, with the tokens that it returns replaced when asked.

    All that the runner asks of it besides is the sampler's own.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._sample: Callable[..., Any] = sampler.sample
        sampler.sample = self._keeping
        self.observing = False
        self.forced: Forced | None = None
        self.raw: Tensor | None = None
        self.processed: Tensor | None = None
        self.own_choice: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        if self.observing:
            self.raw = logits.float().clone()
        output = self._sampler(logits, input_batch)
        self.own_choice = output.sampled_token_ids[:, 0].clone()
        for index, req_id in enumerate(input_batch.req_ids):
            if self.forced is not None and req_id in self.forced:
                output.sampled_token_ids[index, 0] = self.forced[req_id]
        return output

    def _keeping(self, *args: Any, **kwargs: Any) -> Any:
        """Draw, and keep what was drawn from."""
        sampled, processed = self._sample(*args, **kwargs)
        if self.observing:
            self.processed = processed.float().clone()
        return sampled, processed
