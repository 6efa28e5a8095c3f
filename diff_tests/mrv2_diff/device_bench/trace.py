"""Reads what torch's profiler wrote of some steps: busy time, kernels, driver calls, uploads.

The trace is that of `export_chrome_trace`, whose events have a category, a name, a beginning and a
length, both in microseconds. Driver calls are those that CUPTI reports to the profiler; it leaves
out a few that do nothing, such as cudaGetDevice and cudaGetLastError.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrv2_diff.parameters import PARAMETERS

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
BRACKET = {"cudaDeviceSynchronize": 2}
"""Calls that the measurement itself makes, in all: one to end the steps, one of the profiler's."""

MODEL = "model"
ATTENTION_PLAN = "attention plan"
OUTSIDE = "outside"
COPY = "copy"

_PLAN_NAMES = re.compile(r"prepare_varlen|num_splits|scheduler_metadata|get_mla_metadata", re.I)
"""Kernels that plan attention: made anew each step, and neither forward nor sampling."""
_SURELY_MODEL_NAMES = re.compile(r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|flash::|fmha", re.I)
"""Libraries of the model alone, whose templates' names say much else."""
_MODEL_NAMES = re.compile(
    r"flash|attention|attn|paged|"
    r"rms_?norm|layer_?norm|rotary|rope|silu|swiglu|act_and_mul|gelu|reshape_and_cache|"
    r"embedding|vectorized_gather|indexSelect",
    re.I,
)
"""Of vLLM's dense decoders. Every kernel is listed with its class, so that a reader can check."""
_NOT_MODEL_NAMES = re.compile(
    "|".join(
        [
            r"sampl|gumbel|softmax|argmax|slot_mapping|scatter",
            r"prepare_|gather_block|block_table|post_update|logit",
            *(row.kernels for row in PARAMETERS if row.kernels is not None),
        ]
    ),
    re.I,
)
"""Win over the names of the model: `_topk_log_softmax_kernel`, `gather_block_tables`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All runs of one kernel, per step."""

    name: str
    kind: str
    runs: float
    microseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step, on average over those that were traced."""

    busy_us: float
    """Time in which a kernel or a copy ran: the union of their intervals."""
    outside_us: float
    """Kernels outside the model's forward and logits, attention's plan and copies left out."""
    plan_us: float
    copy_us: float
    calls: dict[str, float]
    """Of the driver and the runtime, by name."""
    uploads: float
    """Copies from host to device."""
    downloads: float
    kernels: list[Kernel]
    """Longest first."""

    @property
    def num_calls(self) -> float:
        """Calls of driver and runtime."""
        return sum(self.calls.values())


def read_profile(events: Iterable[Mapping[str, Any]], num_steps: int) -> StepProfile:
    """Return the profile of a trace of so many steps.

    Raises:
        ValueError: The trace has no event of the device, so that nothing can be said.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    on_device = [event for event in whole if event.get("cat") in ON_DEVICE]
    if not on_device:
        raise ValueError(
            "the trace has no kernel and no copy: the profiler did not see the device; "
            "end other profilers of it and try again"
        )
    busy = union_us([(float(event["ts"]), float(event["dur"])) for event in on_device])
    kernels = _kernels(on_device, num_steps)
    copies = Counter(_direction(event["name"]) for event in on_device if event["cat"] != "kernel")
    return StepProfile(
        busy_us=busy / num_steps,
        outside_us=_total(kernels, OUTSIDE),
        plan_us=_total(kernels, ATTENTION_PLAN),
        copy_us=_total(kernels, COPY),
        calls=_calls(whole, num_steps),
        uploads=copies["HtoD"] / num_steps,
        downloads=copies["DtoH"] / num_steps,
        kernels=kernels,
    )


def union_us(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each a beginning and a length."""
    total, end = 0.0, float("-inf")
    for start, length in sorted(intervals):
        stop = start + length
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def kind_of(event_name: str, category: str = "kernel") -> str:
    """Return the class of a kernel or copy by its name."""
    if category != "kernel":
        return COPY
    if _PLAN_NAMES.search(event_name):
        return ATTENTION_PLAN
    if _SURELY_MODEL_NAMES.search(event_name):
        return MODEL
    if _MODEL_NAMES.search(event_name) and not _NOT_MODEL_NAMES.search(event_name):
        return MODEL
    return OUTSIDE


def _kernels(events: Sequence[Mapping[str, Any]], num_steps: int) -> list[Kernel]:
    runs: Counter[tuple[str, str]] = Counter()
    lengths: Counter[tuple[str, str]] = Counter()
    for event in events:
        key = (event["name"], kind_of(event["name"], event["cat"]))
        runs[key] += 1
        lengths[key] += event["dur"]
    found = [
        Kernel(name=key[0], kind=key[1], runs=runs[key] / num_steps, microseconds=us / num_steps)
        for key, us in lengths.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def _calls(events: Sequence[Mapping[str, Any]], num_steps: int) -> dict[str, float]:
    counts = Counter(event["name"] for event in events if event.get("cat") in CALLS)
    counts.subtract({name: min(own, counts[name]) for name, own in BRACKET.items()})
    return {name: count / num_steps for name, count in counts.most_common() if count}


def _direction(name: str) -> str:
    """Return the direction in a name such as "Memcpy HtoD (Pinned -> Device)"; else the name."""
    return next((word for word in ("HtoD", "DtoH", "DtoD") if word in name), name)


def _total(kernels: Sequence[Kernel], kind: str) -> float:
    return sum(kernel.microseconds for kernel in kernels if kernel.kind == kind)
