"""A runner under observation: V1's or ours, driven step by step, each value copied out.

Nothing is patched. V1's values are read from its buffers; its processed logits come from a forward
pre-hook on its sampling module, and teacher forcing replaces its sampler by one that wraps it, in a
runner that this harness built itself. Ours reports through its trace.
"""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from mrv2.batch.inputs import InputBatch
from mrv2.errors import UnsupportedByRunner
from mrv2.sampling.sampler import SamplerOutput
from mrv2.trace import Probe
from mrv2_compat.vllm_v1.requests.refusals import config_refusals
from mrv2_compat.vllm_v1.runner import VllmRunner
from mrv2_diff.lockstep import device
from mrv2_diff.lockstep.upstream import VllmV2Subject
from mrv2_diff.lockstep.values import (
    Forced,
    block_sizes_of,
    ints,
    poison,
    prompt_logprobs_of,
    rows_of_logprobs,
    used_blocks,
)
from mrv2_diff.observation import Observation, ObservedLogprobs


class Subject(Protocol):
    """A runner that can be driven and looked at."""

    runner: Any

    def observe(self, on: bool) -> None:
        """Start or stop copying values out. Off costs nothing, for passes that measure."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step up to its logits or, without tokens, to its end."""

    def sample(self, forced: Forced | None, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step under what grammars allow, committing `forced` tokens where given."""

    def observation(self) -> Observation:
        """Return what the last step did."""

    def ledger(self) -> dict[str, dict[str, object]]:
        """Return what the runner knows of each request, in the form that both runners share."""

    def reset(self) -> None:
        """Forget every request, and overwrite the KV cache with `POISON`."""

    def kv_tensors(self) -> list[Tensor]:
        """Return the KV cache of each layer."""

    def steps_by_mode(self) -> dict[str, int]:
        """Return how many steps since `reset` reached the device in each way.

        By the names of `GraphMode`. Empty where the runner does not say.
        """


_V1_MODES = {"NONE": "eager", "PIECEWISE": "forward", "FULL": "decode"}
"""What V1 calls them. A full graph holds its forward alone."""


class V1Subject:
    """vLLM's V1 runner.

    Args:
        runner: Built by the worker or by `build`.
    """

    def __init__(self, runner: Any) -> None:
        self.runner: Any = runner
        self._observing = False
        self._forcing = _ForcingSampler(runner.sampler)
        self._processed: Tensor | None = None
        self._output: ModelRunnerOutput | None = None
        self._num_steps: Counter[str] = Counter()
        runner.sampler.sample = self._keeping_unscaled(runner.sampler.sample)
        runner.sampler.topk_topp_sampler.register_forward_pre_hook(self._keep_processed)
        runner.sampler = self._forcing

    @classmethod
    def build(cls, vllm_config: VllmConfig, on: torch.device) -> "V1Subject":
        """Build a runner of its own on a device."""
        return cls(device.v1_runner_class()(vllm_config, on))

    def observe(self, on: bool) -> None:
        """Start or stop copying logits."""
        self._observing = self._forcing.observing = on

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step up to its logits."""
        self._processed = None
        output: ModelRunnerOutput | None = self.runner.execute_model(step)
        return output

    def sample(self, forced: Forced | None, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step."""
        self._forcing.force(forced, self.runner.input_batch.req_ids)
        output: ModelRunnerOutput = self.runner.sample_tokens(grammar)
        self._output = output
        if output.cudagraph_stats is not None:
            self._num_steps[_V1_MODES[output.cudagraph_stats.runtime_mode]] += 1
        return output

    def observation(self) -> Observation:
        """Return what the last step did, in V1's order."""
        runner, output, raw = self.runner, self._output, self._forcing.raw
        assert output is not None
        assert raw is not None
        num_reqs = len(output.req_ids)
        query_start_loc = runner.query_start_loc.np[: num_reqs + 1].astype(np.int64)
        num_tokens = int(query_start_loc[-1])
        drawn = [index for index, tokens in enumerate(output.sampled_token_ids) if tokens]
        processed = raw if self._processed is None else self._processed
        own = self._forcing.own_choice
        assert own is not None
        seq_lens = ints(runner.seq_lens[:num_reqs])
        tables = runner.input_batch.block_table.block_tables
        on_cpu = all(table.block_table.gpu.device.type == "cpu" for table in tables)
        return Observation(
            req_ids=list(output.req_ids),
            query_lens=np.diff(query_start_loc),
            input_ids=ints(runner.input_ids.gpu[:num_tokens]),
            positions=ints(runner.positions[:num_tokens]),
            seq_lens=seq_lens,
            slots=tuple(ints(table.slot_mapping.gpu[:num_tokens]) for table in tables),
            blocks=used_blocks(
                [table.block_table.gpu for table in tables],
                block_sizes_of(runner),
                output.req_ids,
                seq_lens,
            )
            if on_cpu
            else {},
            draw_ids=[output.req_ids[index] for index in drawn],
            logits=raw.cpu()[drawn],
            processed_logits=processed.cpu()[drawn],
            tokens=ints(own)[drawn],
            drawn=ints(own)[drawn],
            logprobs=rows_of_logprobs(output, drawn),
            prompt_logprobs=prompt_logprobs_of(output),
        )

    def ledger(self) -> dict[str, dict[str, object]]:
        """Return V1's own records of its requests."""
        return {
            req_id: {
                "prompt_len": request.num_prompt_tokens,
                "temperature": request.sampling_params.temperature,
                "num_logprobs": request.sampling_params.logprobs,
            }
            for req_id, request in self.runner.requests.items()
        }

    def reset(self) -> None:
        """Poison the KV cache.

        V1 forgets a request when the scheduler names it as finished, which every run waits for.
        """
        if self.runner.requests:
            raise RuntimeError(
                f"V1 still holds {sorted(self.runner.requests)}; drain the engine first"
            )
        self._num_steps.clear()
        poison(self.kv_tensors())

    def kv_tensors(self) -> list[Tensor]:
        """Return the KV cache of each layer."""
        return list(self.runner.kv_caches)

    def logprobs_of(self, logits: Tensor) -> Tensor:
        """Return V1's own logprobs of rows of logits, [num_rows, vocab_size]."""
        logprobs: Tensor = self._forcing.compute_logprobs(logits)
        return logprobs

    def attention(self) -> list[str]:
        """Return the names of the attention backends."""
        groups = [group for row in self.runner.attn_groups for group in row]
        return sorted({group.backend.get_name() for group in groups})

    def steps_by_mode(self) -> dict[str, int]:
        """Return what V1 says of its steps, which it does where an engine has graphs."""
        return dict(self._num_steps)

    def _keeping_unscaled(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the sampler's draw: what a batch of greedy requests is drawn from is its input."""

        def keeping(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._observing:
                self._processed = logits.clone()
            return sample(logits, *args, **kwargs)

        return keeping

    def _keep_processed(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep what random requests are drawn from: scaled, and cut by top-k and top-p."""
        if self._observing:
            logits, _, top_k, top_p = args
            self._processed = apply_top_k_top_p(logits.clone(), top_k, top_p)


class Mrv2Subject:
    """Our runner.

    Args:
        runner: A `VllmRunner` whose trace is `copies`.
        copies: What it shows of each step.
    """

    def __init__(self, runner: Any, copies: "StepCopies") -> None:
        self._trace = copies
        self.runner: Any = runner
        self._output: ModelRunnerOutput | None = None

    @classmethod
    def build(cls, vllm_config: VllmConfig, on: torch.device) -> "Mrv2Subject":
        """Build a runner of its own on a device.

        Args:
            vllm_config: A private copy of the engine's config.
            on: The device.
        """
        refused = config_refusals(vllm_config)
        if refused:
            raise UnsupportedByRunner([str(refusal) for refusal in refused])
        copies = StepCopies()
        return cls(VllmRunner(vllm_config, on, copies), copies)

    def observe(self, on: bool) -> None:
        """Start or stop copying values."""
        self._trace.observing = on

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step up to its hidden states."""
        output: ModelRunnerOutput | None = self.runner.execute_model(step)
        return output

    def sample(self, forced: Forced | None, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step."""
        tokens = None if forced is None else self._trace.forced(forced)
        output: ModelRunnerOutput = self.runner.sample_tokens(grammar, tokens)
        self._output = output
        return output

    def observation(self) -> Observation:
        """Return what the last step did, in our order."""
        assert self._output is not None
        return self._trace.observation(self._output, block_sizes_of(self.runner))

    def ledger(self) -> dict[str, dict[str, object]]:
        """Return what the request ledger remembers."""
        return {
            req_id: {
                "prompt_len": known.prompt_len,
                "temperature": known.sampling.temperature,
                "num_logprobs": known.sampling.num_logprobs,
            }
            for req_id, known in self.runner.ledger.known()
        }

    def reset(self) -> None:
        """Start over with empty rows and a poisoned KV cache."""
        self.runner.reset()
        poison(self.kv_tensors())

    def kv_tensors(self) -> list[Tensor]:
        """Return the KV cache of each layer."""
        return list(self.runner.kv_caches)

    def steps_by_mode(self) -> dict[str, int]:
        """Return what our runner counted."""
        return {mode: count for mode, count in self.runner.steps_by_mode.items() if count}


SUBJECTS: dict[str, Callable[[VllmConfig, torch.device], Subject]] = {
    "v1": V1Subject.build,
    "mrv2": Mrv2Subject.build,
    "vllm-v2": VllmV2Subject,
}
"""What can be a candidate, by the name of a pair."""


def load(subject: Subject, vllm_config: VllmConfig, weights_of: nn.Module) -> None:
    """Load a candidate's model and let it share the storage of another's weights."""
    subject.runner.load_model()
    theirs = dict(weights_of.named_parameters())
    for name, parameter in subject.runner.get_model().named_parameters():
        parameter.data = theirs[name].data
    gc.collect()


def initialize(subject: Subject, kv_cache_config: KVCacheConfig) -> None:
    """Allocate a candidate's own KV cache."""
    subject.runner.initialize_kv_cache(kv_cache_config)
    if kv_cache_config.needs_kv_cache_zeroing:
        subject.runner._init_kv_zero_meta()


class _ForcingSampler(nn.Module):
    """V1's sampler, with the tokens that it returns replaced when asked.

    It keeps its own choice and, when observed, the logits that it was given: behind a grammar's
    mask and before all else, as ours are shown.
    """

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self.sampler = sampler
        self.observing = False
        self.raw: Tensor | None = None
        self.own_choice: Tensor | None = None
        self._forced: Forced | None = None
        self._req_ids: list[str] = []
        # The runner scores prompts with these, and asks for the mode in its warm-up.
        self.compute_logprobs: Callable[..., Any] = sampler.compute_logprobs
        self.gather_logprobs: Callable[..., Any] = sampler.gather_logprobs
        self.logprobs_mode: str = sampler.logprobs_mode

    def force(self, forced: Forced | None, req_ids: list[str]) -> None:
        """Set the tokens of the next step, by request, and the order of the batch."""
        self._forced, self._req_ids = forced, list(req_ids)

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Any:
        """Sample, keep the choice, and return the forced tokens in its place."""
        if self.observing:
            self.raw = logits.float().clone()
        output = self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        self.own_choice = output.sampled_token_ids[:, 0].clone()
        if self._forced is not None:
            for index, req_id in enumerate(self._req_ids):
                if req_id in self._forced:
                    output.sampled_token_ids[index, 0] = self._forced[req_id]
        return output


class StepCopies:
    """A StepTrace that copies the values of one step."""

    def __init__(self) -> None:
        self.observing = False
        self.draw_ids: list[str] = []
        self._values: dict[str, Any] = {}

    def wants(self, probe: Probe) -> bool:
        """Say whether values are kept; a pass that measures makes none only to be seen."""
        return self.observing

    def record(self, probe: Probe, value: object) -> None:
        """Copy what an observation needs."""
        if probe == "layout":
            self._values = {"layout": value}
            self.draw_ids = _draw_ids(value)
        elif not self.observing:
            return
        elif isinstance(value, InputBatch):
            num_reqs = value.layout.num_reqs
            self._values |= {
                "input_ids": ints(value.input_ids),
                "positions": ints(value.positions),
                "seq_lens": ints(value.seq_lens[:num_reqs]),
                "slots": tuple(ints(slots) for slots in value.slots),
                "block_tables": tuple(table[:num_reqs].clone() for table in value.block_tables),
            }
        elif probe in ("logits", "processed_logits") and isinstance(value, Tensor):
            self._values[probe] = value.float().clone()
        elif isinstance(value, SamplerOutput):
            self._values["tokens"] = ints(value.token_ids)

    def forced(self, tokens: Forced) -> list[list[int]]:
        """Return the tokens to force on the last step, for each of its requests in batch order."""
        layout = self._values["layout"]
        drawing = set(self.draw_ids)
        return [[tokens.get(name, 0)] if name in drawing else [] for name in layout.req_ids]

    def observation(self, output: ModelRunnerOutput, block_sizes: list[int]) -> Observation:
        """Return what was returned, with the copies of what it came from.

        Tokens and logprobs are taken from the output as vLLM's scheduler takes them. The copies are
        put into its order, which has a row for each token that it returns.
        """
        values, layout = self._values, self._values["layout"]
        returned = [
            (req_id, token)
            for req_id in output.req_ids
            for token in output.sampled_token_ids[output.req_id_to_index[req_id]]
        ]
        draw_ids = [req_id for req_id, _ in returned]
        rows = [self.draw_ids.index(req_id) for req_id in draw_ids if req_id in self.draw_ids]
        return Observation(
            req_ids=list(layout.req_ids),
            query_lens=layout.query_lens.astype(np.int64),
            input_ids=values["input_ids"],
            positions=values["positions"],
            seq_lens=values["seq_lens"],
            slots=values["slots"],
            blocks=used_blocks(
                values["block_tables"], block_sizes, list(layout.req_ids), values["seq_lens"]
            ),
            draw_ids=draw_ids,
            logits=values["logits"].cpu()[rows],
            processed_logits=values["processed_logits"].cpu()[rows],
            tokens=np.array([token for _, token in returned], dtype=np.int64),
            drawn=values["tokens"][rows],
            logprobs=_returned_logprobs(output),
            prompt_logprobs=prompt_logprobs_of(output),
        )


def _draw_ids(layout: Any) -> list[str]:
    counts = np.diff(layout.cu_num_logits).tolist()
    return [
        req_id for req_id, count in zip(layout.req_ids, counts, strict=True) for _ in range(count)
    ]


def _returned_logprobs(output: ModelRunnerOutput) -> ObservedLogprobs | None:
    """Return the logprobs of each returned token, sliced as vLLM's scheduler does."""
    if output.logprobs is None:
        return None
    slices = [
        output.logprobs.slice_request(output.req_id_to_index[req_id], len(tokens))
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)
        if tokens
    ]
    return ObservedLogprobs(
        token_ids=np.concatenate([part.logprob_token_ids for part in slices]).astype(np.int64),
        values=np.concatenate([part.logprobs for part in slices]).astype(np.float32),
        ranks=np.concatenate([part.sampled_token_ranks for part in slices]).astype(np.int64),
    )
