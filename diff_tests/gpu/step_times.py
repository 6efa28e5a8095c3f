"""Times of a steady decode step under both runners, eager, as a first measure on a CUDA device.

usage: python diff_tests/gpu/step_times.py FILE.json [--rounds 2] [--model DIR] [--batches 1,32,256]

Engines run one after the other, each runner once in a round, because a host's clock drifts. Host is
the time inside execute_model and sample_tokens; span is the device's time from the start of the one
to the end of the other. Weights are random: only the shape of the model counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2_diff.models.shapes import QWEN3_0_6B

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.5,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
RUNNERS = ("v1", "mrv2")
PROMPT_TOKENS = 32
WARM_UP = 16
MEASURED = 64
ENGINE_LIMIT_S = 150


@dataclass
class Stopwatch:
    """Times every step of a runner whose batch only decodes."""

    batch: int = 0
    execute_us: list[float] = field(default_factory=list)
    sample_us: list[float] = field(default_factory=list)
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def attach(self, runner: Any, device: str) -> None:
        """Stand before the runner's two calls."""
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._on_gpu = device == "cuda"
        self._timed = False
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def start(self, batch: int) -> None:
        """Forget all and wait for steps of `batch` tokens."""
        self.batch = batch
        self.execute_us, self.sample_us, self.events = [], [], []

    def _execute_model(self, scheduler_output: Any, *rest: Any) -> Any:
        steady = scheduler_output.total_num_scheduled_tokens == self.batch
        self._timed = steady and not scheduler_output.scheduled_new_reqs
        if not self._timed:
            return self._execute(scheduler_output, *rest)
        self._first = self._event()
        began = time.perf_counter()
        result = self._execute(scheduler_output, *rest)
        self.execute_us.append((time.perf_counter() - began) * 1e6)
        return result

    def _sample_tokens(self, grammar_output: Any) -> Any:
        if not self._timed:
            return self._sample(grammar_output)
        began = time.perf_counter()
        result = self._sample(grammar_output)
        self.sample_us.append((time.perf_counter() - began) * 1e6)
        if self._on_gpu:
            self.events.append((self._first, self._event()))
        return result

    def _event(self) -> Any:
        if not self._on_gpu:
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def figures(self) -> dict[str, Any]:
        """Return medians and quartiles in microseconds, the warm-up left out."""
        host = [left + right for left, right in zip(self.execute_us, self.sample_us, strict=True)]
        span = [first.elapsed_time(last) * 1e3 for first, last in self.events]
        columns = {"execute": self.execute_us, "sample": self.sample_us, "host": host, "span": span}
        return {name: _quartiles(values[WARM_UP:]) for name, values in columns.items() if values}


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"steps": len(values), "q1": round(low), "median": round(middle), "q3": round(high)}


def measure(model: str, engine: dict[str, Any], batches: list[int]) -> dict[str, Any]:
    """Run one engine in this process and return its runner's class and its times by batch."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, max_num_seqs=max(batches), **engine)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    watch = Stopwatch()
    watch.attach(runner, "cuda" if torch.cuda.is_available() else "cpu")
    parameters = SamplingParams(
        temperature=0, max_tokens=WARM_UP + MEASURED + 2, ignore_eos=True, detokenize=False
    )
    times = {}
    for batch in batches:
        prompts = [
            {"prompt_token_ids": [3 + (place * 7 + number) % 200 for place in range(PROMPT_TOKENS)]}
            for number in range(batch)
        ]
        watch.start(batch)
        llm.generate(prompts, parameters, use_tqdm=False)
        times[str(batch)] = watch.figures()
    name = f"{type(runner).__module__}.{type(runner).__qualname__}"
    return {"runner_class": name, "times": times}


def run_engine(runner: str, request: dict[str, Any]) -> dict[str, Any]:
    """Measure in a new process under MRV2_RUNNER=runner; an error comes back as its text."""
    with tempfile.TemporaryDirectory(prefix="mrv2-times-") as folder:
        answer = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, __file__, str(answer), "--request", json.dumps(request)],
                env={**os.environ, **ENVIRONMENT, "MRV2_RUNNER": runner},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=ENGINE_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"runner": runner, "error": f"longer than {ENGINE_LIMIT_S} s"}
        if done.returncode or not answer.is_file():
            return {"runner": runner, "error": done.stdout[-3000:]}
        return {"runner": runner, **json.loads(answer.read_text())}


def table(rounds: list[dict[str, Any]], batches: list[int]) -> str:
    """Return one line for each batch, runner and round, for the eye."""
    lines = [f"{'batch':>5} {'runner':>6} {'execute':>8} {'sample':>8} {'host':>8} {'span':>8}  us"]
    for batch in batches:
        for entry in rounds:
            figures = entry.get("times", {}).get(str(batch))
            if figures:
                cells = (
                    figures.get(name, {}).get("median", "-")
                    for name in ("execute", "sample", "host", "span")
                )
                cells_text = " ".join(f"{cell:>8}" for cell in cells)
                lines.append(f"{batch:>5} {entry['runner']:>6} {cells_text}")
    lines += [f"{entry['runner']}: {entry['error']}" for entry in rounds if "error" in entry]
    return "\n".join(lines)


def main() -> int:
    """Measure rounds of both runners, write the figures, print a table; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Time steady decode steps of both runners.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--model", help="folder of a checkpoint; random Qwen3-0.6B when left out")
    parser.add_argument("--engine", default="{}", help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.request:
        options.file.write_text(json.dumps(measure(**json.loads(options.request))))
        return 0
    batches = [int(text) for text in options.batches.split(",")]
    with tempfile.TemporaryDirectory(prefix="mrv2-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_0_6B))
        request = {
            "model": options.model or folder,
            "engine": {**ENGINE, **json.loads(options.engine)},
            "batches": batches,
        }
        rounds = []
        for number in range(options.rounds):
            for runner in RUNNERS if number % 2 == 0 else reversed(RUNNERS):
                rounds.append({"round": number, **run_engine(runner, request)})
                options.file.write_text(
                    json.dumps({"request": request, "rounds": rounds}, indent=1)
                )
    print(table(rounds, batches))
    return int(any("error" in entry for entry in rounds))


if __name__ == "__main__":
    sys.exit(main())
