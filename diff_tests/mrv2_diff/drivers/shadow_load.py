"""What a shadow costs those who are served: servers side by side, loaded in turns.

    python -m mrv2_diff.drivers.shadow_load [ROUNDS]

Three servers of V1 are up: one without a shadow, one that follows 1 % and one that follows 20 %.
In each round each of them gets the same requests from 30 clients, in another order of the servers,
while the others idle. Figures are of all rounds; the last line is JSON.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mrv2_diff.drivers.server import Server, serving
from mrv2_diff.models import ModelSpec, cached_model

NUM_CLIENTS = 30
NUM_REQUESTS = 150
"""Of one load."""
SHARES = (None, 0.01, 0.2)
"""Of the requests that are followed; None is V1 without a shadow."""
START_S = 240.0
ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--seed=0",
    "--max-model-len=256",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=128",
    "--block-size=32",
    "--num-gpu-blocks-override=100",
    "--served-model-name=tiny",
)


@dataclass(slots=True)
class Arm:
    """One of the servers, and what its loads took."""

    share: float | None
    server: Server
    token_ids: list[list[list[int]]] = field(default_factory=list)
    """By load and by request."""
    seconds: list[list[float]] = field(default_factory=list)
    """The same, of latency."""
    wall: list[float] = field(default_factory=list)
    """Of each load."""

    @property
    def name(self) -> str:
        """Return `v1`, or `shadow` with its share."""
        return "v1" if self.share is None else f"shadow {self.share:.0%}"

    def figures(self) -> dict[str, float]:
        """Return mean and 99th percentile of latency in seconds, and requests in a second."""
        latencies = sorted(second for load in self.seconds for second in load)
        return {
            "mean_s": statistics.fmean(latencies),
            "p99_s": latencies[int(len(latencies) * 0.99)],
            "requests_per_s": len(latencies) / sum(self.wall),
        }

    def report(self, wait_s: float) -> dict[str, Any]:
        """Return the shadow's counters, once it is idle."""
        answer = httpx.post(
            f"{self.server.url}/collective_rpc",
            json={"method": "mrv2_shadow_report", "args": [wait_s]},
            timeout=wait_s + 60,
        )
        (report,) = answer.raise_for_status().json()["results"]
        return dict(report)


def bodies(num_requests: int) -> list[dict[str, Any]]:
    """Return greedy requests of many lengths; some share prefixes, some want logprobs."""
    made = []
    for number in range(num_requests):
        own = [4 + (number * 31 + place * place) % 240 for place in range(1 + (number * 37) % 90)]
        made.append(
            {
                "model": "tiny",
                "prompt": ([9] * 64 if number % 3 == 0 else []) + own,
                "max_tokens": 8 + number % 25,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "logprobs": 3 if number % 7 == 0 else None,
            }
        )
    return made


def load(arm: Arm, num_requests: int = NUM_REQUESTS) -> None:
    """Let the clients send the requests, each its next when it has an answer."""

    async def client(http: httpx.AsyncClient, own: Iterator[tuple[int, dict[str, Any]]]) -> None:
        for number, body in own:
            began = time.perf_counter()
            answer = await http.post("/v1/completions", json=body)
            seconds[number] = time.perf_counter() - began
            token_ids[number] = answer.raise_for_status().json()["choices"][0]["token_ids"]

    async def all_clients() -> None:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=arm.server.url, timeout=300, limits=limits) as http:
            shared = iter(enumerate(bodies(num_requests)))
            await asyncio.gather(*(client(http, shared) for _ in range(NUM_CLIENTS)))

    seconds: list[float] = [0.0] * num_requests
    token_ids: list[list[int]] = [[] for _ in range(num_requests)]
    began = time.perf_counter()
    asyncio.run(all_clients())
    arm.wall.append(time.perf_counter() - began)
    arm.seconds.append(seconds)
    arm.token_ids.append(token_ids)


def started(shares: Sequence[float | None], folder: Path, stack: ExitStack) -> list[Arm]:
    """Start a server for each share, and wait until its shadow follows."""
    arms = []
    for number, share in enumerate(shares):
        environ = {"MRV2_RUNNER": "v1", "OMP_NUM_THREADS": "1"}
        if share is not None:
            environ |= {
                "MRV2_RUNNER": "shadow",
                "MRV2_SHADOW_SHARE": str(share),
                "MRV2_SHADOW_FILE": str(folder / f"{number}.jsonl"),
            }
        server = stack.enter_context(
            serving(cached_model(ModelSpec()), folder / f"{number}.log", ARGUMENTS, environ)
        )
        arms.append(Arm(share, server))
    for arm in arms:
        if arm.share is not None and not arm.report(START_S)["up"]:
            raise RuntimeError(f"the shadow of {arm.name} is not up: {arm.report(0)}")
    return arms


def main() -> int:
    """Measure, and say the figures."""
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = started(SHARES, Path(folder), stack)
        for arm in arms:
            load(arm)  # warm
            arm.seconds.clear()
            arm.wall.clear()
        for number in range(num_rounds):
            turn = number % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                load(arm)
        found = {
            arm.name: {
                **arm.figures(),
                "same_tokens": arm.token_ids == arms[0].token_ids,
                "requests": sum(map(len, arm.seconds)),
                "report": None if arm.share is None else arm.report(60),
            }
            for arm in arms
        }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
