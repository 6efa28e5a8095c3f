"""What a shadow costs those who are served: servers side by side, loaded in turns.

    python -m mrv2_diff.drivers.shadow_load [--minutes M] [--out FILE]

Four servers of V1 are up: two without a shadow, one whose shadow follows 1 % and one with 20 %. In
each round each of them gets the same requests from 30 clients while the others idle. After two
rounds all of them are ended and started anew, until the time is over. It passes if at 1 % mean
latency, its 99th percentile and throughput are at most 3 % worse than V1's alone, by the whole of a
95 % interval, if every server gave the same token ids each time, and if no shadow found a mismatch
or failed. The second server without a shadow shows how far two of the same are apart.

Exit codes: 0 it passes, 1 it does not or that is not known, 2 bad input.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from mrv2_diff.device_bench.ratios import balanced_orders
from mrv2_diff.drivers.server import Server, serving
from mrv2_diff.drivers.shadow_cost import (
    BOUND,
    FAIL,
    FIGURES,
    INCONCLUSIVE,
    PASS,
    Load,
    Worse,
    compare,
    figures,
)
from mrv2_diff.environment import collect
from mrv2_diff.models import ModelSpec, cached_model

NUM_CLIENTS = 30
NUM_REQUESTS = 1200
"""Of one load: 10 s."""
NUM_BEFORE = 350
"""Requests right before a load that are not counted: 3 s. A shadow runs what it has gathered each
5 s, so twice in the 10 s of a load, as it would go on doing."""
NUM_ROUNDS = 2
"""Of one life of the servers, which takes 50 s to begin on two cores."""
ARMS: dict[str, float | None] = {
    "v1": None,
    "v1 again": None,
    "shadow 1 %": 0.01,
    "shadow 20 %": 0.2,
}
"""Each server, and the share of the requests that its shadow follows; None has no shadow."""
ALONE = ("v1", "v1 again")
"""The servers that the others are compared with, together."""
JUDGED = "shadow 1 %"
START_S = 240.0
MODEL = ModelSpec(layers=8)
"""So many that the engine sets the pace, and not the web server."""
LEADS = {"cpu": 1e-3, "cuda": 0.02}
"""Least logprob by which each greedy token of a load leads the next. V1 differs from itself by up
to 15 spacings of float32 when its batch changes, which is 2e-5 here; on a CUDA device by 7,745,
since Triton's attention multiplies float32 as TF32."""
MAX_LOTS = 40
"""Lots of candidates that are tried, each of as many as are needed."""
_COMMON = (
    "--dtype=float32",
    "--seed=0",
    "--max-model-len=256",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=128",
    "--block-size=32",
    "--num-gpu-blocks-override=200",
    "--served-model-name=tiny",
)
_CPU = (
    "--enforce-eager",
    # On two cores, vLLM's own choice for a CPU makes the engine spin for its worker's answers, and
    # hold up its threads that receive requests: a load takes 2 to 16 s, one way or the other.
    "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
_CUDA = (
    "--attention-backend=TRITON_ATTN",
    "--gpu-memory-utilization=0.05",
    '--compilation-config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", '
    '"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}',
)

Body = dict[str, Any]


def device() -> str:
    """Return `cuda` where there is such a device, else `cpu`; vLLM need not be imported for it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def serve_arguments() -> tuple[str, ...]:
    """Return the arguments of `vllm serve` on this machine."""
    return (*_COMMON, *(_CUDA if device() == "cuda" else _CPU))


@dataclass(slots=True)
class Arm:
    """One of the servers, and what its loads took."""

    name: str
    server: Server
    token_ids: list[list[list[int]]] = field(default_factory=list)
    """By load and by request."""
    loads: list[Load] = field(default_factory=list)
    """In this life of the server."""
    compared_late: int = 0
    """Tokens that the shadow compared when a load was over."""

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        """Call a method of the worker and return its answer."""
        answer = httpx.post(
            f"{self.server.url}/collective_rpc",
            json={"method": method, "args": args},
            timeout=timeout_s,
        )
        (found,) = answer.raise_for_status().json()["results"]
        return found

    def report(self, wait_s: float) -> dict[str, Any]:
        """Return the shadow's counters, once it is idle."""
        return dict(self.call("mrv2_shadow_report", wait_s, timeout_s=wait_s + 60))


def candidates(num_requests: int, first: int = 0) -> list[Body]:
    """Return greedy requests of many lengths; some share prefixes, some want logprobs."""
    made = []
    for number in range(first, first + num_requests):
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


def repeatable(arm: Arm, num_requests: int) -> list[Body]:
    """Return requests whose tokens do not hang on how V1 rounds, by what V1 says of them.

    Raises:
        RuntimeError: Too few of the candidates are such.
    """
    lead, kept = LEADS[device()], list[Body]()
    for lot in range(MAX_LOTS):
        asked = candidates(num_requests, lot * num_requests)
        probes = [{**body, "logprobs": 2, "return_tokens_as_token_ids": True} for body in asked]
        choices = [choice for choice, _ in _answers(arm, probes)]
        kept += [body for body, choice in zip(asked, choices, strict=True) if _lead(choice) >= lead]
        if len(kept) >= num_requests:
            return kept[:num_requests]
    raise RuntimeError(
        f"{len(kept)} of {MAX_LOTS * num_requests} requests have tokens that lead by {lead}, and "
        f"{num_requests} are needed: the model's logits are too close to each other"
    )


def _lead(choice: dict[str, Any]) -> float:
    """Return the least logprob by which a token of an answer leads the next likely one."""
    leads = []
    for place in choice["logprobs"]["top_logprobs"]:
        first, second = sorted(place.values(), reverse=True)[:2]
        leads.append(first - second)
    return min(leads)


def load(arm: Arm, bodies: Sequence[Body]) -> None:
    """Let the clients send the requests, and keep tokens and times."""
    began = time.perf_counter()
    answers = _answers(arm, bodies)
    wall_s = time.perf_counter() - began
    latencies = np.array([seconds for _, seconds in answers])
    arm.loads.append(Load(latencies=latencies, wall_s=wall_s))
    arm.token_ids.append([choice["token_ids"] for choice, _ in answers])


def _answers(arm: Arm, bodies: Sequence[Body]) -> list[tuple[dict[str, Any], float]]:
    """Return answer and seconds of each request; a client sends its next when it has an answer."""
    found: list[Any] = [None] * len(bodies)

    async def client(http: aiohttp.ClientSession, own: Iterator[tuple[int, Body]]) -> None:
        for number, body in own:
            began = time.perf_counter()
            async with http.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()
                said = await answer.json()
            found[number] = said["choices"][0], time.perf_counter() - began

    async def all_clients() -> None:
        # The server closes what is idle for 5 seconds, and a request may just then be on its way.
        connector = aiohttp.TCPConnector(limit=NUM_CLIENTS, keepalive_timeout=1.0)
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(
            arm.server.url, connector=connector, timeout=limit
        ) as http:
            shared = iter(enumerate(bodies))
            await asyncio.gather(*(client(http, shared) for _ in range(NUM_CLIENTS)))

    asyncio.run(all_clients())
    return found


def started(
    arms: dict[str, float | None],
    folder: Path,
    stack: ExitStack,
    *,
    further: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> list[Arm]:
    """Start the servers and wait until their shadows follow.

    Args:
        arms: As `ARMS`.
        folder: For logs and findings.
        stack: Ends the servers.
        further: More variables of the servers that have a shadow.
        arguments: More arguments of them.
    """

    def start(name: str, share: float | None) -> Arm:
        environ = {"MRV2_RUNNER": "v1", "OMP_NUM_THREADS": "1"}
        more: Sequence[str] = ()
        if share is not None:
            file = str(folder / f"{name}.jsonl")
            settings = {"MRV2_SHADOW_SHARE": str(share), "MRV2_SHADOW_FILE": file}
            environ |= {"MRV2_RUNNER": "shadow", **settings, **(further or {})}
            more = arguments
        server = stack.enter_context(
            serving(
                cached_model(MODEL), folder / f"{name}.log", (*serve_arguments(), *more), environ
            )
        )
        return Arm(name, server)

    # On a CUDA device vLLM fails if memory is given back there while it measures its own.
    with ThreadPoolExecutor(len(arms) if device() == "cpu" else 1) as pool:
        found = list(pool.map(start, arms.keys(), arms.values()))
    if device() == "cpu":
        for arm in found:
            _bind_engine(arm)
    for arm, share in zip(found, arms.values(), strict=True):
        if share is not None and not arm.report(START_S)["up"]:
            raise RuntimeError(f"the shadow of {arm.name} is not up: {arm.report(0)}")
    return found


@dataclass(slots=True)
class Measured:
    """What came out of all lives of the servers."""

    lives: dict[str, list[list[Load]]] = field(default_factory=dict)
    """The loads of each server, of each life."""
    token_ids: list[list[int]] = field(default_factory=list)
    """Of the first load."""
    reports: dict[str, dict[str, int]] = field(default_factory=dict)
    """The counters of each shadow, summed."""
    compared_late: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, arms: list[Arm], reports: dict[str, dict[str, Any]]) -> None:
        """Take in one life."""
        self.token_ids = self.token_ids or arms[0].token_ids[0]
        self.faults += faults(arms, self.token_ids, reports)
        for arm in arms:
            self.lives.setdefault(arm.name, []).append(arm.loads)
        for name, report in reports.items():
            before = self.reports.get(name, {})
            self.reports[name] = {
                key: before.get(key, 0) + value
                for key, value in report.items()
                if isinstance(value, int) and key not in _NO_COUNTS
            }
        for arm in arms:
            self.compared_late[arm.name] = self.compared_late.get(arm.name, 0) + arm.compared_late

    def worse(self) -> dict[str, dict[str, Worse]]:
        """Return by how much each is worse.

        V1's second server is compared with its first, and each other one with both of them.
        """
        first, second = (self.lives[name] for name in ALONE)
        shadows = (name for name in self.lives if name not in ALONE)
        return {
            ALONE[1]: compare(second, first),
            **{name: compare(self.lives[name], first, second) for name in shadows},
        }


_NO_COUNTS = ("pid", "up", "is_idle")
"""What a report says that is no counter."""


def one_life(
    folder: Path, orders: Iterator[tuple[str, ...]], bodies: list[Body]
) -> tuple[list[Arm], dict[str, dict[str, Any]]]:
    """Start the servers, load them in a few rounds, and end them.

    Args:
        folder: For logs and findings.
        orders: The order of the servers in each round.
        bodies: The requests; they are chosen here if there are none yet.
    """
    with ExitStack() as stack:
        arms = started(ARMS, folder, stack)
        if not bodies:
            bodies += repeatable(arms[0], NUM_REQUESTS)
        by_name = {arm.name: arm for arm in arms}
        for arm in arms:
            _answers(arm, bodies[:NUM_BEFORE])  # warm
            _settle(arm)
        for _ in range(NUM_ROUNDS):
            for name in next(orders):
                _answers(by_name[name], bodies[-NUM_BEFORE:])
                load(by_name[name], bodies)
                by_name[name].compared_late += _settle(by_name[name])
        return arms, {arm.name: arm.report(60) for arm in arms if ARMS[arm.name] is not None}


def _bind_engine(arm: Arm) -> None:
    """Keep the thread that runs a server's steps on one core, as vLLM does on a CPU otherwise.

    Loads of one server then differ by less.

    Raises:
        RuntimeError: There is no process that can be told to be the engine's.
    """
    engines = [
        process.pid
        for process in psutil.Process(arm.server.pid).children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]
    if len(engines) != 1:
        raise RuntimeError(f"{arm.name} has {len(engines)} processes named EngineCore, not one")
    os.sched_setaffinity(engines[0], {min(os.sched_getaffinity(0))})  # of the main thread


def _orders() -> list[tuple[str, ...]]:
    """Return all orders of the servers, in pairs of one and its reverse, the pairs shuffled."""
    orders = balanced_orders(list(ARMS))
    pairs = list(zip(orders[::2], orders[1::2], strict=True))
    random.Random(0).shuffle(pairs)
    return [order for pair in pairs for order in pair]


def measure(deadline: float) -> Measured:
    """Let servers live until a time of `time.monotonic`.

    No life is begun that would not be over by then, but there is one.
    """
    found, bodies, longest = Measured(), list[Body](), 0.0
    orders = cycle(_orders())
    while not found.lives or time.monotonic() + longest < deadline:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found.add(*one_life(Path(folder), orders, bodies))
        longest = max(longest, time.monotonic() - began)
    return found


def _settle(arm: Arm) -> int:
    """Let a shadow end what it has of a load, which would be another server's cost.

    Returns:
        How many tokens that were.
    """
    if ARMS[arm.name] is None:
        return 0
    at_end = int(arm.report(0)["compared_tokens"])
    return int(arm.report(60)["compared_tokens"]) - at_end


def faults(
    arms: list[Arm], token_ids: list[list[int]], reports: dict[str, dict[str, Any]]
) -> list[str]:
    """Return what is wrong in one life whatever the times are; empty if nothing is.

    Args:
        arms: The servers.
        token_ids: What each load of each of them should have given.
        reports: Of the shadows.
    """
    found = [
        f"{arm.name}: other token ids than v1"
        for arm in arms
        if any(tokens != token_ids for tokens in arm.token_ids)
    ]
    for name, report in reports.items():
        if report["mismatches"] or report["faults"] or not report["compared_tokens"]:
            found.append(f"{name}: {json.dumps(report)}")
    return found


def verdict(wrong: Sequence[str], judged: dict[str, Worse]) -> str:
    """Return `PASS` where nothing is wrong and all figures pass, else what the worst one is."""
    verdicts = {one.verdict for one in judged.values()}
    if wrong or FAIL in verdicts:
        return FAIL
    return INCONCLUSIVE if INCONCLUSIVE in verdicts else PASS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say the figures and the verdict."""
    parser = argparse.ArgumentParser(
        prog="python -m mrv2_diff.drivers.shadow_load",
        description="What a shadow costs those who are served, by servers side by side.",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=31.0, help="of all, starts included (default: 31)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    given = parser.parse_args(arguments)
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: {given.out.parent} is no folder")
    found = measure(time.monotonic() + 60 * given.minutes)
    worse = found.worse()
    said = verdict(found.faults, worse[JUDGED])
    sys.stdout.write(_text(found, worse, said))
    if given.out is not None:
        record = {
            "environment": collect(device()),
            "clients": NUM_CLIENTS,
            "requests": NUM_REQUESTS,
            "model": asdict(MODEL),
            "lives": {
                name: [figures(loads) for loads in lives] for name, lives in found.lives.items()
            },
            "figures": {name: figures(_all(lives)) for name, lives in found.lives.items()},
            "worse": {
                name: {figure: one.values() for figure, one in ones.items()}
                for name, ones in worse.items()
            },
            "reports": found.reports,
            "compared_late": found.compared_late,
            "faults": found.faults,
            "verdict": said,
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(said != PASS)


def _text(found: Measured, worse: dict[str, dict[str, Worse]], said: str) -> str:
    first = found.lives[ALONE[0]]
    alone = figures(_all(first))
    lines = [
        f"{NUM_CLIENTS} clients, {NUM_REQUESTS} requests a load, {NUM_ROUNDS} rounds of loads in "
        f"each life of the servers; lives: {len(first)}",
        f"the part by which each server is worse than v1 alone ({ALONE[1]}: than the other one; a "
        "shadow: than both), with 95 % intervals",
        f"{'':12}" + "".join(f"{name:>26}" for name in FIGURES),
        f"{ALONE[0]:12}" + "".join(f"{alone[name]:>26.3f}" for name in FIGURES),
        *(
            f"{name:12}" + "".join(f"{ones[figure]!s:>26}" for figure in FIGURES)
            for name, ones in worse.items()
        ),
    ]
    for name, report in found.reports.items():
        drawn = sum(report[f"{kind}_requests"] for kind in ("sampled", "busy", "no_room"))
        lines.append(
            f"{name}: followed {report['sampled_requests']} of {drawn} drawn requests "
            f"({report['dropped_requests']} not to the end, {report['resumed_requests']} resumes); "
            f"{report['compared_tokens']} tokens compared, {found.compared_late[name]} of them "
            f"when a load was over; {report['mismatches']} mismatches, {report['near_ties']} near "
            f"ties, {report['faults']} faults"
        )
    if not any("token ids" in fault for fault in found.faults):
        lines.append("token ids: the same from every server in every load")
    parts = ", ".join(f"{name} {one.verdict}" for name, one in worse[JUDGED].items())
    lines += [*found.faults, f"verdict on {JUDGED}, at most {BOUND:.0%} worse: {said} ({parts})"]
    return "\n".join(lines) + "\n"


def _all(lives: Sequence[Sequence[Load]]) -> list[Load]:
    return [load for loads in lives for load in loads]


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0, up to 600")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
