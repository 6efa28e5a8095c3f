"""One vLLM engine in this process, driven event by event, with a lockstep worker inside."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrv2_diff import process

process.prepare()

# E402: vLLM reads the environment when it is imported.
import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from mrv2_diff.case import Abort, Add, EngineSpec, Event  # noqa: E402
from mrv2_diff.lockstep import device  # noqa: E402
from mrv2_diff.lockstep.worker import LockstepWorker, Pass  # noqa: E402
from mrv2_diff.right_values import Markers  # noqa: E402

THREADS = 1
"""Of torch, unless OMP_NUM_THREADS says otherwise. A tiny model's operations are too small for two
threads to help, and threads that wait for each other make every figure depend on what else runs."""

_MAX_IDLE_STEPS = 3
"""Steps that may pass without a scheduled token while requests wait.

More means that the workload does not fit.
"""


_PAUSE = 0.01
"""Seconds between looks at a grammar that is being compiled."""
_MAX_GRAMMAR_SECONDS = 60.0
"""From the start of a workload; then it counts as a request that cannot be scheduled."""


class LockstepEngine:
    """An engine for one EngineSpec.

    Args:
        spec: The engine's sizes.
        model: Folder of the checkpoint.
        graphs: One of `GRAPHS` of a case: how its steps may reach the device.

    Raises:
        ConfigError: There are no such graphs on this device.
    """

    def __init__(self, spec: EngineSpec, model: Path, graphs: str = "none") -> None:
        device.check_graphs(graphs)
        if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() != THREADS:
            torch.set_num_threads(THREADS)
        self._llm: Any = LLM(
            model=str(model),
            **spec.arguments(device.kind(), graphs),
            worker_cls=f"{LockstepWorker.__module__}.{LockstepWorker.__qualname__}",
        )
        self._engine: Any = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self.worker: LockstepWorker = self._engine.model_executor.driver_worker.worker
        self.dtype = str(self._engine.vllm_config.model_config.dtype).removeprefix("torch.")
        """Of the model, by torch's name."""
        self.arithmetic = device.arithmetic(self.dtype)
        """In which it is computed."""
        self.num_aborted = 0
        """Requests that the last workload gave up before they had ended."""
        self.logprobs_mode = spec.logprobs_mode
        self.markers = _markers(self._engine.vllm_config.reasoning_config)
        """Of thinking sections."""
        self.vocab_size: int = self._engine.vllm_config.model_config.get_vocab_size()

    def run(self, events: tuple[Event, ...], settings: Pass) -> None:
        """Run a workload to its end under a pass's settings.

        Raises:
            RuntimeError: Requests wait and nothing can be scheduled.
        """
        self._engine.reset_prefix_cache()
        self.num_aborted = 0
        self.worker.begin(settings)
        try:
            self._drive(events)
        except BaseException:
            self._drain()
            raise

    def takes(self, events: tuple[Event, ...]) -> bool:
        """Say whether vLLM takes every request of a workload; nothing is run."""
        try:
            for event in events:
                if isinstance(event, Add):
                    self._request(event)
        except Exception:  # noqa: BLE001 - vLLM has errors of its own kinds for a bad request
            return False
        return True

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        """Let the reference run requests alone, as V1's users do; return vLLM's completions."""
        self.worker.end()
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def _drive(self, events: tuple[Event, ...]) -> None:
        waiting, step, idle = list(events), 0, 0
        deadline = time.monotonic() + _MAX_GRAMMAR_SECONDS
        while waiting or self._core.scheduler.has_requests():
            while waiting and waiting[0].step <= step:
                self._apply(waiting.pop(0))
            _, executed = self._core.step_fn()
            if self._waits_for_grammar() and time.monotonic() < deadline:
                time.sleep(_PAUSE)  # a thread compiles it, and no step goes faster for that
                continue
            idle = 0 if executed or not self._core.scheduler.has_unfinished_requests() else idle + 1
            if idle > _MAX_IDLE_STEPS:
                raise RuntimeError(
                    "requests wait and nothing can be scheduled; give the case's engine more blocks"
                )
            step += 1

    def _waits_for_grammar(self) -> bool:
        """Say whether no request runs and one waits until its grammar is compiled."""
        scheduler = self._core.scheduler
        waiting = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return not scheduler.running and any(
            request.status == waiting for request in scheduler.requests.values()
        )

    def _apply(self, event: Event) -> None:
        if isinstance(event, Abort):
            self.num_aborted += event.req_id in self._core.scheduler.requests
            self._core.abort_requests([event.req_id])
            return
        self._core.add_request(*self._core.preprocess_add_request(self._request(event)))

    def _request(self, event: Add) -> Any:
        further = {name: _plain(value) for name, value in event.further.items()}
        bad_words = further.pop("bad_words", None)
        grammar = event.further.get("structured_outputs")
        if isinstance(grammar, dict):
            arguments = {name: _plain(value) for name, value in grammar.items()}
            further["structured_outputs"] = StructuredOutputsParams(**arguments)
        params = SamplingParams(
            max_tokens=event.max_tokens,
            temperature=event.temperature,
            seed=event.seed,
            logprobs=event.logprobs,
            detokenize=False,
            **({"ignore_eos": True} | further),
        )
        if bad_words is not None:  # what vLLM would make of words with a tokenizer
            params._bad_words_token_ids = bad_words
        prompt = {"prompt_token_ids": [token % self.vocab_size for token in event.prompt]}
        return self._engine.input_processor.process_inputs(
            event.req_id, prompt, params, ("generate",)
        )

    def _drain(self) -> None:
        """Give up every request after a failure, so that the next pass starts empty."""
        runner = self.worker.reference.runner
        runner.execute_model_state = None
        self.worker.end()
        scheduler = self._core.scheduler
        self._core.abort_requests(list(scheduler.requests))
        for _ in range(_MAX_IDLE_STEPS):
            if scheduler.has_requests():
                self._core.step_fn()

    def close(self) -> None:
        """Shut the engine down and free what it held in this process."""
        self.worker.forget_candidates()
        self._engine.engine_core.shutdown()
        del self._llm, self._engine, self._core, self.worker
        cleanup_dist_env_and_memory()


def _plain(value: object) -> Any:
    """Return an option's value as vLLM takes it: tuples are lists."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _markers(reasoning: Any) -> Markers | None:
    if reasoning is None:
        return None
    start, end = reasoning.reasoning_start_token_ids, reasoning.reasoning_end_token_ids
    return Markers(start=tuple(start), end=tuple(end))


@contextmanager
def engine(spec: EngineSpec, model: Path) -> Iterator[LockstepEngine]:
    """Start an engine and close it at the end."""
    started = LockstepEngine(spec, model)
    try:
        yield started
    finally:
        started.close()
