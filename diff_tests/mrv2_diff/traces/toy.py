"""Traces of no engine: heads and events with nothing behind them."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mrv2_diff.traces.events import (
    EngineFacts,
    Event,
    Executed,
    Head,
    HowItRan,
    Known,
    KVFacts,
    KVGroupFacts,
    Mask,
    ModelFacts,
    NewRequest,
    Output,
    Params,
    Sampled,
)
from mrv2_diff.traces.format import FrameWriter

VOCAB_SIZE = 331
NO_ONE = Known([], [], {}, [], [], [])


def a_head(**changes: object) -> Head:
    """A head of a tiny engine."""
    head = Head(
        runner="mrv2",
        runner_class="mrv2_compat.vllm_v1.runner.VllmRunner",
        is_private=False,
        device="cpu",
        environment={"mrv2": "0.1.0"},
        vllm="0.32.0",
        model=ModelFacts(
            name="tiny", config_sha256="0" * 64, weights_sha256="1" * 64, vocab_size=VOCAB_SIZE
        ),
        engine=EngineFacts(
            dtype="float32",
            seed=0,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            block_size=32,
            kv_cache_dtype="auto",
            enable_prefix_caching=False,
            logprobs_mode="raw_logprobs",
            max_logprobs=20,
        ),
        how=HowItRan(async_scheduling=False, enforce_eager=True, cudagraph_mode="NONE"),
        kv=KVFacts(
            num_blocks=64,
            num_bytes=1 << 20,
            groups=[KVGroupFacts(spec="FullAttentionSpec", values={}, layers=["a", "b"])],
        ),
    )
    return msgspec.structs.replace(head, **changes)


def arrival(
    req_id: str = "../../x", prompt: tuple[int, ...] = (5, 6, 7), **params: Any
) -> Executed:
    """A step in which a request arrives, with its whole prompt."""
    new = NewRequest(req_id, list(prompt), Params(temperature=0.0, **params), [[1, 2]], 0)
    return Executed([new], NO_ONE, {req_id: len(prompt)}, [], None, None, None, False, False)


def going_on(req_id: str = "../../x", computed: int = 3, outputs: int = 1) -> Executed:
    """A step in which it decodes."""
    known = Known([req_id], [], {}, [None], [computed], [outputs])
    return Executed([], known, {req_id: 1}, [], None, None, None, False, False)


def a_load(num_steps: int, seed: int = 0) -> list[Event]:
    """Events of a request after the other, with masks."""
    draw = random.Random(seed)
    events: list[Event] = []
    name = ""
    for step in range(num_steps):
        place = step % 8
        if place == 0:
            name = f"request-{step // 8}-{draw.getrandbits(64):x}"
            prompt = tuple(draw.randrange(VOCAB_SIZE) for _ in range(50))
            events.append(arrival(name, prompt))
        else:
            events.append(going_on(name, 49 + place, place))
        bits = np.array([[draw.getrandbits(31) for _ in range(11)]], np.int32)
        events.append(Sampled(step, [name], Mask.of(bits)))
        events.append(Output(step, [name], [[draw.randrange(VOCAB_SIZE)]]))
    return events


def write(path: Path, events: list[Event], head: Head | None = None, frame: int = 30) -> Path:
    """Write a trace with so many events in a frame, and return its path."""
    with path.open("wb") as file:
        writer = FrameWriter(file, a_head() if head is None else head)
        for start in range(0, len(events), frame):
            part = events[start : start + frame]
            whole = sum(isinstance(event, Output) for event in part)
            writer.events([msgspec.msgpack.encode(event) for event in part], whole)
        writer.end("the test ended")
    return path
