"""The face that vLLM's worker sees: the names of V1's runner, over the core runner.

No logic of a step lives here. The scheduler's output is translated, handed to the core, and the
core's output translated back. What vLLM may touch and what became of each name is in `surface.py`,
which also answers for the names that have nothing to do and for those of refused features.
"""

import gc
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.tasks import SupportedTask
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.utils import AttentionGroup, clear_layer_kv_caches
from vllm.v1.worker.workspace import reset_workspace_manager

from mrv2 import (
    EXTENSIONS,
    ConfigError,
    GraphSizes,
    NullTrace,
    ProtocolError,
    Runner,
    StepTrace,
    UnsupportedByRunner,
    draw_unattached,
    generate_head,
    stages_with,
)
from mrv2.ports import AttentionPlanner, Model
from mrv2_compat.vllm_v1 import surface
from mrv2_compat.vllm_v1.features.active import NO_FEATURES, ActiveFeatures
from mrv2_compat.vllm_v1.features.feature import Feature, FeatureContext
from mrv2_compat.vllm_v1.features.registry import FEATURES
from mrv2_compat.vllm_v1.host import graphs
from mrv2_compat.vllm_v1.host.attention import (
    VllmAttentionPlanner,
    attention_groups,
    backend_names,
    create_builders,
)
from mrv2_compat.vllm_v1.host.config import runner_config
from mrv2_compat.vllm_v1.host.kv_cache import KVCaches, kv_cache_spec
from mrv2_compat.vllm_v1.host.model import VllmModel
from mrv2_compat.vllm_v1.requests.refusals import backend_refusals, kv_cache_refusals
from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask
from mrv2_compat.vllm_v1.step.ledger import RequestLedger
from mrv2_compat.vllm_v1.step.translate_in import plan_step
from mrv2_compat.vllm_v1.step.translate_out import (
    AsyncOutput,
    BatchIndices,
    model_runner_output,
)


class VllmRunner:
    """A model runner for vLLM's V1-mode workers.

    The core runner is made once the KV cache is known; until then only loading, profiling and
    questions about the model work.

    Args:
        vllm_config: The engine's config; refusals were checked against it before the worker
            started.
        device: Where the model runs.
        trace: Observes the values of each step; nobody by default.
        features: Those that the engine may use.
    """

    _features = NO_FEATURES

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        trace: StepTrace | None = None,
        features: Sequence[Feature] = FEATURES,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.load_config = vllm_config.load_config
        self.compilation_config = vllm_config.compilation_config
        self.parallel_config = vllm_config.parallel_config
        self.scheduler_config = vllm_config.scheduler_config
        self.speculative_config = vllm_config.speculative_config
        self.lora_config = vllm_config.lora_config
        self.device = device
        self.dtype = self.model_config.dtype
        self.max_model_len = self.model_config.max_model_len
        self.max_num_reqs = self.scheduler_config.max_num_seqs
        self.max_num_tokens = self.scheduler_config.max_num_batched_tokens
        self.model_memory_usage = 0
        self.steps_executed = 0
        self.jit_warmup_registry = JitWarmupRegistry(vllm_config)
        self.ledger = RequestLedger()
        self.kv_cache_config: KVCacheConfig | None = None
        self.attn_groups: list[list[AttentionGroup]] = []
        self._trace: StepTrace = trace or NullTrace()
        self._model: VllmModel | None = None
        self._kv: KVCaches | None = None
        self._core: Runner | None = None
        self._step: Any = None
        """The core's `Step` between vLLM's two calls."""
        self._num_drafts: dict[str, int] = {}
        self._indices = BatchIndices()
        self._graph_sizes = GraphSizes()
        self._is_captured = False
        self._available = features
        self._features = self._load_features()
        self.uniform_decode_query_len = 1 + self._features.max_drafts

    # Start: load, profile, allocate.

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the model onto the device."""
        if load_dummy_weights:
            raise UnsupportedByRunner(
                ["loading dummy weights for elastic expert parallelism: turn it off"]
            )
        on_gpu = self.device.type == "cuda"
        profiler = DeviceMemoryProfiler() if on_gpu else nullcontext()
        with profiler as memory, self.jit_warmup_registry.activate():
            module = get_model(vllm_config=self.vllm_config)
        if memory is not None:
            self.model_memory_usage = int(memory.consumed_memory)
        self._model = VllmModel(module, self.vllm_config)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return what each layer stores for a block, by layer name."""
        specs = kv_cache_spec(self.vllm_config)
        refused = kv_cache_refusals(specs)
        if refused:
            raise UnsupportedByRunner([str(refusal) for refusal in refused])
        return specs

    def profile_run(self, randomize_inputs: bool = False) -> None:
        """Run the largest forward and draw, and what features add, for vLLM to measure.

        On a GPU this is beside the core's own state, and behind its kernels, which stay on the
        device once they are loaded.
        """
        core = self._core_without_cache() if self.device.type == "cuda" else None
        hidden, last = self._dummy_run(self.max_num_tokens, randomize_inputs=randomize_inputs)
        self._dummy_sampler_run(last)
        with torch.inference_mode():
            self._features.profile(hidden, self._require_model())
        if core is not None:
            torch.cuda.synchronize(self.device)  # its pinned memory must not be given out again yet
        del hidden, last, core
        gc.collect()

    def warming_up_model(self) -> None:
        """Compile the model on a CPU, where vLLM compiles it at its first forward."""
        if self.compilation_config.mode != CompilationMode.NONE:
            with _freezing_for_max_autotune(self.compilation_config.inductor_compile_config):
                self.profile_run()

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Allocate and bind the KV caches, make the metadata builders, build the core runner."""
        self.kv_cache_config = kv_cache_config
        self.attn_groups = attention_groups(kv_cache_config, self.vllm_config)
        refused = backend_refusals(backend_names(self.attn_groups))
        if refused:
            raise UnsupportedByRunner([str(refusal) for refusal in refused])
        with self.jit_warmup_registry.activate():
            block_sizes = create_builders(
                self.attn_groups, kv_cache_config, self.vllm_config, self.device
            )
            self._kv = KVCaches(
                kv_cache_config,
                self.vllm_config,
                self.attn_groups,
                block_sizes,
                self.device,
                kv_cache_allocation_context,
            )
        self._graph_sizes = graphs.graph_sizes(
            self.vllm_config,
            self.attn_groups,
            kv_cache_config,
            is_profiling=is_profiling,
            max_drafts=self._features.max_drafts,
        )
        self._start_core(kv_cache_config)
        if self.device.type == "cuda":
            self._require_core().warm_up()

    def _init_kv_zero_meta(self) -> None:
        self._require_kv().prepare_zeroing()

    @torch.inference_mode()
    def capture_model(self) -> int:
        """Capture the CUDA graphs of the resolved mode.

        Returns:
            Bytes of device memory that they take; 0 where there are none.

        Raises:
            CaptureError: A step cannot be captured.
        """
        core = self._require_core()
        if core.config.graphs == GraphSizes():
            return 0
        num_bytes = graphs.capture(core.capture, self.device)
        self._is_captured = True
        return num_bytes

    def profile_cudagraph_memory(self) -> int:
        """Capture over a small KV cache, let go of all of it, and return the bytes it took."""
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        cache = graphs.minimal_kv_cache(
            self.vllm_config, self.get_kv_cache_spec(), num_blocks=self.max_num_reqs
        )
        with set_current_vllm_config(self.vllm_config):
            self.initialize_kv_cache(cache, is_profiling=True)
            try:
                return self.capture_model()
            finally:
                self._forget_kv_cache()

    def _forget_kv_cache(self) -> None:
        """Undo `initialize_kv_cache`, graphs included."""
        torch.cuda.synchronize(self.device)
        if self._core is not None:
            self._core.release_graphs()
        graphs.release_pieces()
        clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
        self._kv = self._core = self.kv_cache_config = None
        self._is_captured = False
        self.attn_groups = []
        gc.collect()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def _dummy_run(
        self,
        num_tokens: int,
        randomize_inputs: bool = False,
        uniform_decode: bool = False,
        **_options: object,
    ) -> tuple[Tensor, Tensor]:
        """Run the model over made-up tokens. No row and no KV block is touched.

        Once there is a KV cache, a decode step runs as any other, over requests that are none. All
        else leaves attention out.

        Args:
            num_tokens: Tokens to run.
            randomize_inputs: Draw the token ids instead of taking id 0 for all.
            uniform_decode: Whether it is a decode step.
            _options: Switches of features that are refused at start.

        Returns:
            Hidden states, [num_tokens, hidden_size], and those of as many tokens as there can be
            requests.
        """
        if uniform_decode and self._core is not None:
            hidden = self._core.run_idle(num_tokens)
            return hidden, hidden
        vocab_size = self.model_config.get_vocab_size()
        high = vocab_size if randomize_inputs else 1
        input_ids = torch.randint(high, (num_tokens,), dtype=torch.int32, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self._require_model().forward_without_kv(input_ids, positions)
        return hidden, hidden[: min(num_tokens, self.max_num_reqs)]

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: Tensor) -> Tensor:
        """Draw at random from the logits of these hidden states.

        The sampler is one of its own, so that no row is touched.
        """
        return draw_unattached(self._require_model().compute_logits(hidden_states))

    # Steps. The worker calls them in torch's inference mode.

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: object | None = None
    ) -> ModelRunnerOutput | None:
        """Queue a step up to its hidden states; a step without tokens only updates the rows.

        Raises:
            ProtocolError, CapacityError, ConfigError: The step contradicts itself, the ledger or
                the rows, or does not fit. Ledger and rows are as they were, so that another step
                can be sent. So they are where the model or a feature raises.
        """
        if self._step is not None:
            raise ProtocolError(
                "execute_model was called twice; call sample_tokens for the step in flight first"
            )
        core, kv, config = self._require_core(), self._require_kv(), self.model_config
        plan = plan_step(
            scheduler_output, self.ledger, config.seed, config.get_vocab_size(), self._features
        )
        try:
            if scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies:
                core.check(plan)  # before blocks are overwritten
                kv.apply(scheduler_output)
            if not plan.scheduled.req_ids:
                core.update_rows(plan)
                return EMPTY_MODEL_RUNNER_OUTPUT
            self._step = core.execute(plan)
        except Exception:
            self.ledger.take_back_step()
            raise
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._num_drafts = {req_id: len(token_ids) for req_id, token_ids in drafts.items()}
        self.steps_executed += 1
        return None

    def sample_tokens(
        self,
        grammar_output: GrammarOutput | None,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Queue sampling, copies and commit of the step in flight.

        Args:
            grammar_output: What grammars allow in this step; None where they constrain nothing.
            forced: For each request of the step, in batch order, the tokens that are committed in
                place of the drawn ones: none where it draws none, else one or more (teacher
                forcing).

        Raises:
            ProtocolError: No step is in flight: it was not executed, ran no tokens, or was sampled
                already. Or what is given does not fit it; then it can still be sampled.
            ExtensionError: A feature raised, and the step was given up.
        """
        if self._step is None:
            raise ProtocolError(
                "sample_tokens was called, and no step is in flight; "
                "call execute_model first, with a step that runs tokens"
            )
        core, layout = self._require_core(), self._step.layout
        grammar = grammar_mask(
            grammar_output,
            layout.req_ids,
            layout.cu_num_logits,
            core.config.vocab_size,
            self._num_drafts,
        )
        try:
            pending = core.sample(self._step, forced, grammar)
        except (ProtocolError, ConfigError):
            raise
        except Exception:
            self._step = None  # the core has given it up
            raise
        self._step = None
        self._features.after_sample()
        if self.scheduler_config.async_scheduling:
            return AsyncOutput(pending, self._indices, self._features)
        return model_runner_output(pending.wait(), self._indices, self._features)

    # Questions about the model, and its weights.

    def get_model(self) -> nn.Module:
        """Return the loaded module, unwrapped."""
        module: nn.Module = self._require_model().module
        return module

    @property
    def model(self) -> nn.Module:
        """The loaded module; None after `shutdown`, as callers that clean up expect."""
        return self._model.module if self._model is not None else None  # type: ignore[return-value]

    @property
    def kv_caches(self) -> list[Tensor]:
        """One tensor for each layer, in layer order; empty before the KV cache is initialised."""
        return self._kv.tensors if self._kv is not None else []

    @property
    def steps_by_mode(self) -> dict[str, int]:
        """How many steps reached the device in each way: eagerly, or with graphs of which kind."""
        if self._core is None:
            return {}
        return {mode.value: count for mode, count in self._core.num_steps.items()}

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """Return the one task: text generation."""
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take a model length that vLLM fitted to the memory, before there is a KV cache."""
        self.max_model_len = max_model_len

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Load new weights into the model in place."""
        reload_weights(
            self.vllm_config,
            self.get_model(),
            weights_iterator=weights_iterator,
            weights_path=weights_path,
            is_checkpoint_format=is_checkpoint_format,
        )

    def shutdown(self) -> None:
        """Let go of the model, the KV cache and vLLM's process-wide caches, to free memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
        self.compilation_config.static_forward_context.clear()
        self._model = self._kv = self._core = self._step = None
        self.attn_groups = []
        _ROPE_DICT.clear()
        reset_workspace_manager()

    def reset(self) -> None:
        """Start over with empty rows, as after `initialize_kv_cache`; KV bytes stay."""
        if self.kv_cache_config is None:
            raise ProtocolError("there is nothing to reset before the KV cache is initialised")
        self.ledger = RequestLedger()
        self._step = None
        if self._core is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # as in `profile_run`
            self._core.release_graphs()
        self._start_core(self.kv_cache_config)
        if self._is_captured:
            self.capture_model()

    def __getattr__(self, name: str) -> Any:
        """Answer for a name of V1's runner that a feature serves, or nothing but the surface."""
        if name in self._features.served:
            return self._features.served[name]
        return surface.answer(self, name)

    def _load_features(self) -> ActiveFeatures:
        context = FeatureContext(vllm_config=self.vllm_config, device=self.device)
        return ActiveFeatures.load(self._available, context)

    def _start_core(self, kv_cache_config: KVCacheConfig) -> None:
        """Build the core runner, and begin anew whatever belongs to its rows and batches."""
        self._features = self._load_features()
        self._indices = BatchIndices()
        self._core = self._build_core(kv_cache_config)

    def _build_core(self, kv_cache_config: KVCacheConfig) -> Runner:
        return self._core_over(
            self._require_model(),
            VllmAttentionPlanner(self.attn_groups, kv_cache_config, self.vllm_config),
            kv_cache_config,
        )

    def _core_over(
        self, model: Model, attention: AttentionPlanner, kv_cache_config: KVCacheConfig
    ) -> Runner:
        """Return a core runner with what the features bring."""
        features = self._features
        parts = features.parts()
        stages = stages_with(parts.reshaping, parts.narrowing)
        return Runner(
            runner_config(
                self.vllm_config,
                kv_cache_config,
                self.device,
                self._graph_sizes,
                features.max_drafts,
            ),
            model,
            attention,
            trace=self._trace,
            head=parts.head(stages) if parts.head else generate_head(stages=stages),
            extensions=(*EXTENSIONS, *parts.extensions),
        )

    @torch.inference_mode()
    def _core_without_cache(self) -> Runner:
        """Return a core of the size that there will be, with its kernels loaded."""
        specs, features = self.get_kv_cache_spec(), self._features
        self._features = self._load_features()
        core = self._build_core(graphs.minimal_kv_cache(self.vllm_config, specs, num_blocks=1))
        self._features = features
        core.warm_up()
        return core

    def _require_model(self) -> VllmModel:
        if self._model is None:
            raise ProtocolError("the model is not loaded; call load_model first")
        return self._model

    def _require_kv(self) -> KVCaches:
        if self._kv is None:
            raise ProtocolError("there is no KV cache; call initialize_kv_cache first")
        return self._kv

    def _require_core(self) -> Runner:
        if self._core is None:
            raise ProtocolError(
                "the runner cannot step; call load_model and initialize_kv_cache first"
            )
        return self._core


def _freezing_for_max_autotune(inductor_options: dict[str, Any]) -> AbstractContextManager[Any]:
    """Freeze the weights while compiling if max-autotune is on: oneDNN's GEMMs want constants."""
    if not inductor_options.get("max_autotune", False):
        return nullcontext()
    from torch._inductor import config  # heavy, and rarely asked for

    patched: AbstractContextManager[Any] = config.patch(freezing=True)
    return patched
