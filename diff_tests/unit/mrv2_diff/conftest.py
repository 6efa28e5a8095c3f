"""A record and a step with plausible figures, from which tests change what they are about."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mrv2_diff.observation import Observation, ObservedLogprobs
from mrv2_diff.record import Agreement, Cost, Latency, Memory, Quartiles, Record
from mrv2_diff.verdict import Verdict

MakeRecord = Callable[..., Record]
Observe = Callable[..., Observation]

LOGITS = ((0.0, 3.0, 5.0, 1.0, 2.0, 4.0), (6.0, 4.0, 1.0, 3.0, 5.0, 2.0))


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


def _cost(quantity: str, verdict: Verdict, ratio: float, **others: Any) -> Cost:
    given: dict[str, Any] = {
        "budget": 1.05, "low": ratio - 0.02, "high": ratio + 0.02, "samples": 12,
        "phase": "sample", "summary": f"{quantity}: {ratio:.3f} times V1's",
    }  # fmt: skip
    return Cost(quantity=quantity, verdict=verdict, ratio=ratio, **(given | others))


def _costs(memory: Verdict = Verdict.MATCH, time: Verdict = Verdict.MATCH) -> tuple[Cost, ...]:
    return _cost("memory", memory, 1.25, op="aten::zeros"), _cost("host time", time, 0.85)


MakeCosts = Callable[..., tuple[Cost, ...]]


@pytest.fixture
def make_costs() -> MakeCosts:
    return _costs


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


def _observation(
    *,
    logits: Sequence[Sequence[float]] = LOGITS,
    tokens: Sequence[int] | None = None,
    num_logprobs: int | None = None,
    **changes: Any,
) -> Observation:
    """Return a step in which `a` decodes and `b` runs a prompt of three tokens; both draw."""
    raw = torch.tensor(logits, dtype=torch.float32)
    drawn = raw.argmax(dim=1).numpy() if tokens is None else np.array(tokens, dtype=np.int64)
    step = Observation(
        req_ids=["a", "b"],
        query_lens=np.array([1, 3]),
        input_ids=np.array([11, 21, 22, 23]),
        positions=np.array([7, 0, 1, 2]),
        seq_lens=np.array([8, 3]),
        slots=(np.array([39, 64, 65, 66]), np.array([7, 0, 1, 2])),
        draw_ids=["a", "b"],
        logits=raw,
        processed_logits=raw.clone(),
        tokens=drawn,
        drawn=drawn.copy(),
        logprobs=None if num_logprobs is None else _logprobs(raw, drawn, num_logprobs),
    )
    return dataclasses.replace(step, **changes)


def _logprobs(logits: torch.Tensor, tokens: Any, count: int) -> ObservedLogprobs:
    values = torch.log_softmax(logits, dim=-1)
    drawn = values.gather(1, torch.from_numpy(tokens)[:, None])
    top = values.topk(count, dim=1)
    return ObservedLogprobs(
        token_ids=np.concatenate((tokens[:, None], top.indices.numpy()), axis=1),
        values=torch.cat((drawn, top.values), dim=1).numpy(),
        ranks=(values >= drawn).sum(dim=1).numpy(),
    )


@pytest.fixture
def observe() -> Observe:
    return _observation
