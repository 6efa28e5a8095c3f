"""Runs torch's profiler around steps. Its trace is read in `trace`."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mrv2_diff.device_bench.trace import StepProfile, read_profile


@contextmanager
def traced(num_steps: int) -> Iterator[list[StepProfile]]:
    """Trace the steps inside; the list holds their profile at the end.

    The device is idle when they begin and when they end, so that each step's work is in the trace.
    """
    found: list[StepProfile] = []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield found
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="mrv2-trace-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found.append(read_profile(json.loads(file.read_text())["traceEvents"], num_steps))
