"""Times of the draw and of the cuts on a CUDA device, beside those of vLLM's V1 and V2.

usage: python diff_tests/gpu/bench_sampling.py FILE.json [--batches 1,32,256,1024] [--rounds 30]

Each operation is captured in a CUDA graph, several calls on as many copies of the logits, which are
written anew before each replay because vLLM's operations mask them in place. Candidates take turns
in every round, because clocks drift; a time is that of a replay by events, over the calls. What is
not importable is left out and named. Both of vLLM's runners cut by the same function.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from mrv2.sampling.gumbel import draw
from mrv2.sampling.min_p import cut_by_min_p
from mrv2.sampling.top_k_top_p import cut_to_top

VOCAB_SIZE = 151_936
MOST_CALLS = 8
LOGITS_BYTES = 4 << 30
"""Memory for the copies of the logits."""
Call: TypeAlias = Callable[[Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What all rows of a batch ask for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    steep: bool = False
    """Logits fall with the logarithm of their rank, as a model's do; else they are normal."""
    dtype: torch.dtype = torch.float32


SCENARIOS: dict[str, Request] = {
    "draw greedy": Request(temperature=0.0),
    "draw": Request(),
    "draw with temperature": Request(temperature=0.7),
    "draw with temperature, steep": Request(temperature=0.7, steep=True),
    "draw with temperature, bfloat16": Request(temperature=0.7, dtype=torch.bfloat16),
    "top-k 50, top-p 0.9": Request(top_k=50, top_p=0.9),
    "top-k 50, top-p 0.9, steep": Request(top_k=50, top_p=0.9, steep=True),
    "top-k 50": Request(top_k=50),
    "top-k 1000, top-p 0.95": Request(top_k=1000, top_p=0.95),
    "top-k 20000": Request(top_k=20_000),
    "top-p 0.9": Request(top_p=0.9),
    "top-p 0.9, steep": Request(top_p=0.9, steep=True),
    "min-p 0.1": Request(min_p=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """One value a row, for every candidate."""

    rows: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def columns_of(request: Request, batch: int) -> Columns:
    """Return the columns of a batch in which all ask for the same."""

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    return Columns(
        rows=torch.arange(batch, dtype=torch.int32, device="cuda"),
        positions=column(77, torch.int64),
        temperature=column(request.temperature, torch.float32),
        seed=torch.arange(batch, dtype=torch.int64, device="cuda") * 7919,
        top_k=column(request.top_k, torch.int32),
        top_p=column(request.top_p, torch.float32),
        min_p=column(request.min_p, torch.float32),
    )


def logits_of(request: Request, batch: int) -> Tensor:
    """Return random logits, [batch, VOCAB_SIZE]."""
    generator = torch.Generator("cuda").manual_seed(batch)
    logits = torch.randn(batch, VOCAB_SIZE, generator=generator, device="cuda")
    if request.steep:
        ranks = torch.rand(batch, VOCAB_SIZE, generator=generator, device="cuda").argsort(1) + 1
        logits = logits * 0.3 - ranks.float().log() * 1.8
    return logits.to(request.dtype)


def ours(request: Request, columns: Columns) -> Call:
    """Return this project's operation: the draw, or the cut that the request asks for."""
    cutoff = torch.full((len(columns.rows),), -torch.inf, device="cuda")
    if request.min_p:
        log_min_p = columns.min_p.log()
        return lambda logits: cut_by_min_p(
            cutoff.fill_(-torch.inf),
            logits,
            columns.rows,
            columns.temperature,
            columns.temperature,
            log_min_p,
        )
    if request.top_k or request.top_p < 1.0:
        return lambda logits: cut_to_top(
            cutoff.fill_(-torch.inf),
            logits,
            columns.rows,
            columns.temperature,
            columns.temperature,
            columns.top_k,
            columns.top_p,
        )
    token_ids = torch.empty(len(columns.rows), dtype=torch.int64, device="cuda")
    return lambda logits: draw(
        token_ids,
        logits,
        columns.rows,
        columns.positions,
        columns.temperature,
        columns.seed,
        columns.temperature,
        cutoff,
    )


def of_v1(request: Request, columns: Columns) -> Call:
    """Return vLLM V1's operation; ImportError where there is none."""
    if request.min_p:
        return _min_p_of_v1(request, columns)
    if request.top_k or request.top_p < 1.0:
        module = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton")
        cut = module.apply_top_k_top_p_triton
        top_k = columns.top_k if request.top_k else None
        top_p = columns.top_p if request.top_p < 1.0 else None
        return lambda logits: cut(logits, top_k, top_p)
    if not request.temperature:
        return lambda logits: logits.argmax(dim=-1)
    random_sample = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").random_sample
    by = columns.temperature.unsqueeze(1)

    def sample(logits: Tensor) -> object:
        logits = logits.float()
        divided = logits.div_(by) if request.temperature != 1.0 else logits
        return random_sample(divided.softmax(dim=-1, dtype=torch.float32), {})

    return sample


def _min_p_of_v1(request: Request, columns: Columns) -> Call:
    module = importlib.import_module("vllm.v1.sample.logits_processor.builtin")
    batch = len(columns.rows)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=batch))
    processor = module.MinPLogitsProcessor(config, torch.device("cuda"), False)
    processor.min_p_count = batch
    processor.min_p = columns.min_p.unsqueeze(1)
    return lambda logits: processor.apply(logits)


def of_v2(request: Request, columns: Columns) -> Call:
    """Return vLLM V2's operation; ImportError where there is none of its own."""
    if request.min_p:
        apply_min_p = importlib.import_module("vllm.v1.worker.gpu.sample.min_p").apply_min_p
        return lambda logits: apply_min_p(logits, columns.rows, columns.min_p)
    if request.top_k or request.top_p < 1.0:
        raise ImportError("V2 calls V1's function")
    gumbel_sample = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
    return lambda logits: gumbel_sample(
        logits,
        columns.rows,
        columns.temperature,
        columns.seed,
        columns.positions,
        apply_temperature=True,
        is_drafting=False,
    )


CANDIDATES: Mapping[str, Callable[[Request, Columns], Call]] = {
    "mrv2": ours,
    "v1": of_v1,
    "v2": of_v2,
}


class Captured:
    """Several calls of one operation, each on its own copy of the logits."""

    def __init__(self, call: Call, logits: Tensor, copies: list[Tensor]) -> None:
        self._logits, self._copies = logits, copies
        for _ in range(2):
            self._write()
            call(copies[0])
        torch.cuda.synchronize()
        self._write()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call(copies[0])
        torch.cuda.synchronize()
        self.peak_bytes = torch.cuda.max_memory_allocated() - before
        del result
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for copy in copies:
                call(copy)
        self.times_us: list[float] = []

    def _write(self) -> None:
        for copy in self._copies:
            copy.copy_(self._logits)

    def time(self) -> None:
        """Replay once and keep the time of a call."""
        self._write()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        self._graph.replay()
        ended.record()
        torch.cuda.synchronize()
        self.times_us.append(began.elapsed_time(ended) * 1e3 / len(self._copies))

    def figures(self) -> dict[str, float]:
        """Return quartiles in microseconds, the first two rounds left out, and peak memory."""
        low, middle, high = statistics.quantiles(self.times_us[2:], n=4)
        return {
            "q1_us": round(low, 2),
            "median_us": round(middle, 2),
            "q3_us": round(high, 2),
            "peak_bytes": self.peak_bytes,
        }


def measure(request: Request, batch: int, rounds: int) -> dict[str, Any]:
    """Time every candidate in turn, round after round."""
    columns = columns_of(request, batch)
    logits = logits_of(request, batch)
    calls = max(1, min(MOST_CALLS, LOGITS_BYTES // (logits.numel() * logits.element_size())))
    copies = [torch.empty_like(logits) for _ in range(calls)]
    captured, figures = {}, {}
    for name, candidate in CANDIDATES.items():
        try:
            captured[name] = Captured(candidate(request, columns), logits, copies)
        except ImportError as error:
            figures[name] = {"left_out": str(error)}
    for _ in range(rounds + 2):
        for each in captured.values():
            each.time()
    return figures | {name: each.figures() for name, each in captured.items()}


def environment() -> dict[str, str]:
    """Return what the times depend on."""
    try:
        vllm = str(getattr(importlib.import_module("vllm"), "__version__", "parts of it"))
    except ImportError:
        vllm = "none"
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "vllm": vllm,
    }


def main() -> int:
    """Measure, print a table as it grows and write the figures."""
    parser = argparse.ArgumentParser(description="Time the draw and the cuts beside vLLM's.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--batches", default="1,32,256,1024")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="scenarios whose name holds this text")
    options = parser.parse_args()
    batches = [int(text) for text in options.batches.split(",")]
    record: dict[str, Any] = {"environment": environment(), "vocab_size": VOCAB_SIZE, "times": {}}
    print(f"{'scenario':<34} {'batch':>5} " + " ".join(f"{name:>9}" for name in CANDIDATES))
    for name, request in SCENARIOS.items():
        for batch in batches if options.only in name else ():
            figures = measure(request, batch, options.rounds)
            record["times"].setdefault(name, {})[str(batch)] = figures
            cells = (figures[candidate].get("median_us", "-") for candidate in CANDIDATES)
            print(f"{name:<34} {batch:>5} " + " ".join(f"{cell:>9}" for cell in cells), flush=True)
            options.file.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
