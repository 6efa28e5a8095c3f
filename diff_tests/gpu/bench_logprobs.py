"""Times and memory of logprobs on a CUDA device: ours, V1's, and those of vLLM's V2 runner.

usage: python diff_tests/gpu/bench_logprobs.py FILE.json [--batches 1,32,256,1024] [--counts 0,5,20]
       [--prompts 8192,32768] [--hidden 1024] [--vocab 151936] [--rounds 50]

Logits and weights are random. vLLM's sides are measured where it is installed, as black boxes and
on the same tensors; sides alternate within a round, because clocks drift. A prompt's time is from
hidden states to values on the host; its memory is the peak above what was allocated before. The
logits' own allocation is counted in, since a prompt's are made on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mrv2.config import RunnerConfig
from mrv2.extension import ExtensionResources
from mrv2.features.prompt_logprobs import PromptLogprobs
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.logprobs import gather_logprobs
from mrv2.state.block_tables import BlockTables
from mrv2.state.requests import RequestColumns

WARM_UP = 5
Side = Callable[[Tensor, Tensor, int], object]
"""Takes logits [num_logits, vocab_size], one token of each row, and how many of the likeliest."""


def sides() -> dict[str, Side]:
    """Return what is measured on logits, by name."""
    found: dict[str, Side] = {"mrv2": gather_logprobs}
    try:
        from vllm.v1.sample.sampler import Sampler
    except ImportError:
        return found

    def v1(logits: Tensor, token_ids: Tensor, count: int) -> object:
        return Sampler.gather_logprobs(Sampler.compute_logprobs(logits), count, token_ids)

    found["v1"] = v1
    try:
        from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    except ImportError:
        return found

    def v2(logits: Tensor, token_ids: Tensor, count: int) -> object:
        return compute_topk_scores(logits, count, token_ids)

    found["v2"] = v2
    return found


def time_rounds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Return device times of alternating calls in microseconds, and each one's peak in MiB.

    A call is captured in a CUDA graph where it can be, so that the host's part is not in its time;
    `eager` says where it could not.
    """
    runs, figures = {}, {}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        runs[name], eager = captured(call)
        figures[name] = {"peak_mib": round(peak, 2), "eager": eager}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs) if number % 2 else reversed(list(runs)):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            runs[name]()
            last.record()
            last.synchronize()
            times[name].append(first.elapsed_time(last) * 1e3)
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        figures[name] |= {"us": round(middle, 1), "q1": round(low, 1), "q3": round(high, 1)}
    return figures


def captured(call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """Return a graph's replay of a call, or the call itself where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:  # noqa: BLE001 - any error says that it cannot be captured
        torch.cuda.synchronize()
        return call, True
    return graph.replay, False


def bench_batches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every batch, count and dtype."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for batch in numbers(options.batches):
            logits = (torch.randn(batch, options.vocab, device="cuda") * 4).to(dtype)
            token_ids = logits.argmax(dim=1)
            for count in numbers(options.counts):
                calls = {
                    name: partial(side, logits, token_ids, count) for name, side in sides().items()
                }
                figures = time_rounds(calls, options.rounds)
                entry = {"batch": batch, "count": count, "dtype": str(dtype), "sides": figures}
                results.append(entry)
                print(entry, flush=True)
    return results


def bench_prompts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure whole prompts in one step, ours from hidden states to the host."""
    results = []
    weights = torch.randn(options.vocab, options.hidden, device="cuda", dtype=torch.bfloat16)
    for length in numbers(options.prompts):
        hidden = torch.randn(length, options.hidden, device="cuda", dtype=torch.bfloat16) / 8
        for count in (0, 5):
            calls = prompt_sides(length, count, hidden, weights)
            figures = {name: time_prompt(call) for name, call in calls.items()}
            entry = {"prompt": length, "count": count, "sides": figures}
            results.append(entry)
            print(entry, flush=True)
    return results


def prompt_sides(
    length: int, count: int, hidden: Tensor, weights: Tensor
) -> dict[str, Callable[[], object]]:
    """Return what scores a prompt, by name."""
    vocab_size = weights.shape[0]
    arena = Arena(Transfers(hidden.device))
    config = RunnerConfig(
        device=hidden.device,
        max_num_reqs=1,
        max_num_tokens=length,
        max_model_len=length,
        vocab_size=vocab_size,
        kv_groups=(),
    )
    requests = RequestColumns(1, length, arena)
    scorer = PromptLogprobs(
        ExtensionResources(
            config=config,
            model=cast("Any", SimpleNamespace(compute_logits=None)),
            requests=requests,
            block_tables=BlockTables((), config.num_rows, arena),
            arena=arena,
        )
    )
    arrival = Arrival(
        req_id="prompt",
        token_ids=[(index * 7919) % vocab_size for index in range(length)],
        prompt_len=length,
        num_computed_tokens=0,
        block_ids=(),
        sampling=Sampling(num_prompt_logprobs=count),
    )
    requests.admit(0, arrival)
    requests.flush()
    arena.flush()
    start = np.zeros(1, dtype=np.int32)
    locations = np.array([0, length], dtype=np.int32)

    def to_logits(part: Tensor) -> Tensor:
        return part @ weights.T

    def ours() -> object:
        scorer.admit(0, arrival)
        return scorer.score(start, start, locations, hidden, to_logits)

    found: dict[str, Callable[[], object]] = {"mrv2": ours}
    try:
        from vllm.v1.worker.gpu.sample.prompt_logprob import compute_prompt_logprobs_with_chunking
    except ImportError:
        return found
    targets = requests.token_ids.tensor[0, 1:length].long()

    def v2() -> object:
        return compute_prompt_logprobs_with_chunking(targets, hidden[:-1], to_logits, count)

    found["v2"] = v2
    return found


def time_prompt(call: Callable[[], object]) -> dict[str, float | str]:
    """Return the fastest of three calls in milliseconds, and the peak in MB (10**6 bytes)."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - another version of vLLM may take other arguments
        return {"error": str(error)[:500]}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    return {"ms": round(min(times), 2), "peak_mb": round(peak, 1)}


def environment() -> dict[str, str]:
    """Return what the figures were measured on."""
    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        vllm = "not installed"
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "vllm": vllm,
        "python": sys.version.split()[0],
    }


def numbers(text: str) -> list[int]:
    """Return the integers of a list such as `1,32`."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure, write the figures, print a line for each."""
    parser = argparse.ArgumentParser(description="Time logprobs on a CUDA device.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--batches", default="1,32,256,1024")
    parser.add_argument("--counts", default="0,5,20")
    parser.add_argument("--prompts", default="8192,32768")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this measures a CUDA device, and there is none", file=sys.stderr)
        return 1
    figures = {
        "environment": environment(),
        "logprobs": bench_batches(options),
        "prompts": bench_prompts(options),
    }
    options.file.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
