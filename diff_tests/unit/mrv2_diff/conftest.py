"""A record with plausible figures, from which tests change what they are about."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from mrv2_diff.record import Agreement, Latency, Memory, Quartiles, Record
from mrv2_diff.verdict import Verdict

MakeRecord = Callable[..., Record]


def _quartiles(median: float) -> Quartiles:
    return Quartiles(q1=median * 0.9, median=median, q3=median * 1.2, count=48)


def _latency(total: float) -> Latency:
    return Latency(
        execute_us=_quartiles(total * 0.7),
        sample_us=_quartiles(total * 0.2),
        output_us=_quartiles(total * 0.08),
        total_us=_quartiles(total),
    )


def _memory(scale: int) -> Memory:
    return Memory(
        step_peak_tensor_bytes=412_000 * scale,
        step_peak_python_bytes=38_000 * scale,
        state_held_bytes=9_400_000,
    )


def _agreement(compared: int, worst: float, policy: str) -> Agreement:
    return Agreement(
        compared=compared,
        differing=0,
        max_abs_diff=worst,
        required_tolerance=worst,
        policy=policy,
    )


def _record(**changes: Any) -> Record:
    draw = random.Random(7)
    record = Record(
        id="sampling-greedy",
        area="sampling",
        feature="Greedy decoding",
        pair=("v1", "mrv2"),
        verdict=Verdict.MATCH,
        summary="Every compared value agrees within its floor.",
        modes=("forced", "free"),
        steps=48,
        request_steps=384,
        events={"arrivals": 8, "finishes": 8, "preemptions": 0},
        agreements={
            "tokens": _agreement(384, 0.0, "exact"),
            "logits": _agreement(127_104, 3.1e-6, "within 4 spacings of float32"),
            "positions": _agreement(512, 0.0, "exact"),
        },
        noise_floor={"logits": 4.2e-6},
        memory={"v1": _memory(2), "mrv2": _memory(1)},
        latency={"v1": _latency(1850.0), "mrv2": _latency(1210.0)},
        logit_diffs=[draw.choice((0.0, 1e-6, 3.1e-6)) * draw.random() for _ in range(48)],
        command="mrv2-diff run --case sampling-greedy --pair v1,mrv2",
        environment={"commit": "0123456789ab", "vllm": "0.32.0", "device": "Some CPU"},
    )
    return dataclasses.replace(record, **changes)


@pytest.fixture
def make_record() -> MakeRecord:
    return _record
