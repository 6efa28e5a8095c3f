"""One vLLM engine in a process of its own: prompts go in, tokens and evidence come out.

`MRV2_RUNNER` acts while vLLM is imported, so an engine as its users start it, with one runner or
the other, needs a process for each. `run_job` starts this module as a program and hands it a `Job`;
inside, the engine lives in the program's own process, so that its worker can be asked what it is.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2_diff.drivers.variables import clean_environment

TIME_LIMIT_S = 240
"""For one job, the start of its engine included."""

OURS = "mrv2_compat.vllm_v1.runner.VllmRunner"
"""Class of our runner, as an outcome names it."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the program's process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_COMPILE_DISABLE": "1",  # a job of the compiled path sets it to 0
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one engine is to do: continuations of prompts, greedy unless `options` say otherwise.

    All are asked for at once.
    """

    model: str
    """Folder of the checkpoint."""
    engine: dict[str, Any]
    """Arguments of vLLM's `LLM`."""
    prompts: list[list[int]]
    max_tokens: list[int]
    """For each prompt; nothing else ends a continuation, unless its options say otherwise."""
    logprobs: list[int | None]
    """For each prompt."""
    options: list[dict[str, Any]] = field(default_factory=list)
    """For each prompt, further arguments of SamplingParams; none for any where the list is empty.
    `structured_outputs` is a mapping of the arguments of StructuredOutputsParams."""
    tokenizer: bool = False
    """Whether the engine has its tokenizer, which grammars need."""
    check_syncs_from: int | None = None
    """Step from which a call that waits for the device fails inside `execute_model` and
    `sample_tokens`; None never checks. CUDA only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What became of one prompt."""

    token_ids: list[int]
    logprobs: list[list[float]]
    """For each token its own, then the likeliest in falling order; empty where none were wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one engine did, and what it was."""

    runner_class: str
    steps: int
    """Calls of `execute_model` that ran tokens."""
    preemptions: int
    steps_checked: int
    """Steps that ran while a wait for the device would have failed."""
    async_scheduling: bool
    compiled_graphs: int
    """Graphs that torch.compile made."""
    attention: list[str]
    """Names of the attention backends."""
    steps_by_mode: dict[str, int] = field(default_factory=dict)
    """Steps of our runner by how they reached the device; empty for another's."""
    graph_mode: str = "NONE"
    """vLLM's CUDA graph mode, as it was resolved."""
    continuations: list[Continuation] = field(default_factory=list)


def run_job(job: Job, runner: str, environ: Mapping[str, str] | None = None) -> Outcome:
    """Run a job in a new process under `MRV2_RUNNER=runner`.

    Args:
        job: What to do.
        runner: A value of `MRV2_RUNNER`.
        environ: More variables for the process.

    Raises:
        RuntimeError: The program failed or took too long (status 124); with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="mrv2-job-") as folder:
        answer = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", __name__, str(answer)]
        done = subprocess.run(
            ["timeout", "-k", "5", str(TIME_LIMIT_S), *command],
            input=json.dumps(dataclasses.asdict(job)),
            env=job_environment({**(environ or {}), "MRV2_RUNNER": runner}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not answer.is_file():
            raise RuntimeError(f"{runner} ended with {done.returncode}:\n{done.stdout[-6000:]}")
        return _read_outcome(json.loads(answer.read_text()))


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's process, with `environ` in the last place."""
    return {**clean_environment(os.environ), **_ENVIRONMENT, **environ}


def _read_outcome(values: dict[str, Any]) -> Outcome:
    continuations = [Continuation(**entry) for entry in values.pop("continuations")]
    return Outcome(**values, continuations=continuations)


class Watch:
    """Counts what a runner does, and forbids waits for the device from a given step on."""

    def __init__(self, runner: Any, check_syncs_from: int | None) -> None:
        self.steps = self.preemptions = self.steps_checked = 0
        self._check_from = check_syncs_from
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def _execute_model(self, scheduler_output: Any, *rest: Any) -> Any:
        self.steps += scheduler_output.total_num_scheduled_tokens > 0
        self.preemptions += len(scheduler_output.preempted_req_ids or ())
        self.steps_checked += self._checks
        return self._guarded(self._execute, scheduler_output, *rest)

    def _sample_tokens(self, grammar_output: Any) -> Any:
        return self._guarded(self._sample, grammar_output)

    @property
    def _checks(self) -> bool:
        return self._check_from is not None and self.steps >= self._check_from

    def _guarded(self, function: Any, *arguments: Any) -> Any:
        if not self._checks:
            return function(*arguments)
        import torch

        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _run(job: Job) -> Outcome:
    from torch._dynamo.utils import counters
    from vllm import LLM

    llm = LLM(model=job.model, skip_tokenizer_init=not job.tokenizer, **job.engine)
    engine = llm.llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    watch = Watch(runner, job.check_syncs_from)
    prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    finished = llm.generate(prompts, _parameters(job), use_tqdm=False)
    groups = runner.attn_groups
    return Outcome(
        runner_class=f"{type(runner).__module__}.{type(runner).__qualname__}",
        steps=watch.steps,
        preemptions=watch.preemptions,
        steps_checked=watch.steps_checked,
        async_scheduling=bool(engine.vllm_config.scheduler_config.async_scheduling),
        compiled_graphs=counters["stats"]["unique_graphs"],
        attention=sorted({group.backend.get_name() for row in groups for group in row}),
        steps_by_mode=getattr(runner, "steps_by_mode", {}),
        graph_mode=engine.vllm_config.compilation_config.cudagraph_mode.name,
        continuations=[_continuation(request.outputs[0]) for request in finished],
    )


def _parameters(job: Job) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = job.options or [{} for _ in job.prompts]
    parameters = []
    for limit, count, further in zip(job.max_tokens, job.logprobs, options, strict=True):
        asked = {
            "temperature": 0,
            "max_tokens": limit,
            "logprobs": count,
            "ignore_eos": True,
            "detokenize": False,
            **further,
        }
        if "structured_outputs" in asked:
            asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
        if "logit_bias" in asked:  # a job travels as JSON, whose keys are text
            asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
        parameters.append(SamplingParams(**asked))
    return parameters


def _continuation(output: Any) -> Continuation:
    token_ids = list(output.token_ids)
    rows = []
    for token_id, row in zip(token_ids, output.logprobs or (), strict=False):
        others = sorted((entry.logprob for entry in row.values()), reverse=True)
        rows.append([row[token_id].logprob, *others])
    return Continuation(token_ids=token_ids, logprobs=rows)


def main() -> None:
    """Read a job from standard input and write its outcome into the file that is named."""
    outcome = _run(Job(**json.load(sys.stdin)))
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main()
