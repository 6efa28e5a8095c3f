"""What a shadow costs those who are served: servers side by side, loaded in turns.

    python -m mrv2_diff.drivers.shadow_load [--minutes M] [--out FILE]

Four servers of V1 are up: two without a shadow, one whose shadow follows 1 % and one with 20 %. In
each round each of them gets the same requests from 30 clients while the others idle; rounds go on
until the time is over, each in another order. It passes if at 1 % mean latency, its 99th percentile
and throughput are at most 3 % worse than V1's alone, by the whole of a 95 % interval, if every
server gave the same token ids each time, and if no shadow found a mismatch or failed. The second
server without a shadow shows how far two of the same are apart.

Exit codes: 0 it passes, 1 it does not or that is not known, 2 bad input.
"""

import argparse
import asyncio
import json
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

import httpx

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
NUM_REQUESTS = 300
"""Of one load."""
ARMS: dict[str, float | None] = {
    "v1": None,
    "v1 again": None,
    "shadow 1 %": 0.01,
    "shadow 20 %": 0.2,
}
"""Each server, and the share of the requests that its shadow follows; None has no shadow."""
JUDGED = "shadow 1 %"
START_S = 240.0
LEAD = 1e-3
"""Least logprob by which each greedy token of a load leads the next. V1 differs from itself by up
to 15 spacings of float32 when its batch changes, which is 2e-5 here."""
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

Body = dict[str, Any]


@dataclass(slots=True)
class Arm:
    """One of the servers, and what its loads took."""

    name: str
    server: Server
    token_ids: list[list[list[int]]] = field(default_factory=list)
    """By load and by request."""
    loads: list[Load] = field(default_factory=list)
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


def candidates(num_requests: int) -> list[Body]:
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


def repeatable(arm: Arm, num_requests: int) -> list[Body]:
    """Return requests whose tokens do not hang on how V1 rounds, by what V1 says of them.

    Raises:
        RuntimeError: Too few of the candidates are such.
    """
    asked = candidates(num_requests + num_requests // 5)
    probes = [{**body, "logprobs": 2, "return_tokens_as_token_ids": True} for body in asked]
    choices = [choice for choice, _ in _answers(arm, probes)]
    kept = [body for body, choice in zip(asked, choices, strict=True) if _lead(choice) >= LEAD]
    if len(kept) < num_requests:
        raise RuntimeError(
            f"{len(kept)} of {len(asked)} requests have tokens that lead by {LEAD}, and "
            f"{num_requests} are needed: the model's logits are too close to each other"
        )
    return kept[:num_requests]


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
    arm.loads.append(Load(latencies=[seconds for _, seconds in answers], wall_s=wall_s))
    arm.token_ids.append([choice["token_ids"] for choice, _ in answers])


def _answers(arm: Arm, bodies: Sequence[Body]) -> list[tuple[dict[str, Any], float]]:
    """Return answer and seconds of each request; a client sends its next when it has an answer."""
    found: list[Any] = [None] * len(bodies)

    async def client(http: httpx.AsyncClient, own: Iterator[tuple[int, Body]]) -> None:
        for number, body in own:
            began = time.perf_counter()
            answer = await http.post("/v1/completions", json=body)
            seconds = time.perf_counter() - began
            found[number] = answer.raise_for_status().json()["choices"][0], seconds

    async def all_clients() -> None:
        # The server closes what is idle for 5 seconds, and a request may just then be on its way.
        limits = httpx.Limits(max_connections=NUM_CLIENTS, keepalive_expiry=1.0)
        async with httpx.AsyncClient(base_url=arm.server.url, timeout=300, limits=limits) as http:
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
    """Start the servers, all at once, and wait until their shadows follow.

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
            serving(cached_model(ModelSpec()), folder / f"{name}.log", (*ARGUMENTS, *more), environ)
        )
        return Arm(name, server)

    with ThreadPoolExecutor(len(arms)) as pool:
        found = list(pool.map(start, arms.keys(), arms.values()))
    for arm, share in zip(found, arms.values(), strict=True):
        if share is not None and not arm.report(START_S)["up"]:
            raise RuntimeError(f"the shadow of {arm.name} is not up: {arm.report(0)}")
    return found


def measure(arms: list[Arm], bodies: Sequence[Body], deadline: float) -> int:
    """Load the servers in rounds until a time of `time.monotonic`, and return how many there were.

    No round is begun that would not be over by then, but there is one.
    """
    by_name = {arm.name: arm for arm in arms}
    num_rounds, longest = 0, 0.0
    for order in cycle(balanced_orders(list(by_name))):
        began = time.monotonic()
        if num_rounds and began + longest > deadline:
            break
        for name in order:
            load(by_name[name], bodies)
            _settle(by_name[name])
        num_rounds += 1
        longest = max(longest, time.monotonic() - began)
    return num_rounds


def _settle(arm: Arm) -> None:
    """Let a shadow end what it has of a load, which would be another server's cost."""
    if ARMS[arm.name] is not None:
        at_end = arm.report(0)["compared_tokens"]
        arm.compared_late += arm.report(60)["compared_tokens"] - at_end


def faults(arms: list[Arm], reports: dict[str, dict[str, Any]]) -> list[str]:
    """Return what is wrong whatever the times are; empty if nothing is."""
    found = [
        f"{arm.name}: other token ids than v1"
        for arm in arms
        if any(tokens != arms[0].token_ids[0] for tokens in arm.token_ids)
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
        "--minutes", type=_minutes, default=9.0, help="of all, the start included (default: 9)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    given = parser.parse_args(arguments)
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: {given.out.parent} is no folder")
    deadline = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = started(ARMS, Path(folder), stack)
        bodies = repeatable(arms[0], NUM_REQUESTS)
        for arm in arms:
            load(arm, bodies)  # warm
            _settle(arm)
            arm.loads.clear()
            arm.compared_late = 0
        num_rounds = measure(arms, bodies, deadline)
        reports = {arm.name: arm.report(60) for arm in arms if ARMS[arm.name] is not None}
    worse = {arm.name: compare(arm.loads, arms[0].loads) for arm in arms[1:]}
    wrong = faults(arms, reports)
    _say(arms, worse, reports, num_rounds, wrong)
    if given.out is not None:
        record = {
            "environment": collect("cpu"),
            "clients": NUM_CLIENTS,
            "requests": NUM_REQUESTS,
            "rounds": num_rounds,
            "figures": {arm.name: figures(arm.loads) for arm in arms},
            "worse": {
                name: {figure: asdict(one) for figure, one in found.items()}
                for name, found in worse.items()
            },
            "reports": reports,
            "compared_late": {arm.name: arm.compared_late for arm in arms if arm.name in reports},
            "faults": wrong,
            "verdict": verdict(wrong, worse[JUDGED]),
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(verdict(wrong, worse[JUDGED]) != PASS)


def _say(
    arms: list[Arm],
    worse: dict[str, dict[str, Worse]],
    reports: dict[str, dict[str, Any]],
    num_rounds: int,
    wrong: list[str],
) -> None:
    alone = figures(arms[0].loads)
    lines = [
        f"{NUM_CLIENTS} clients, {num_rounds} rounds of {NUM_REQUESTS} requests; the part by which "
        "each server is worse than v1, with 95 % intervals",
        f"{'':12}" + "".join(f"{name:>26}" for name in FIGURES),
        f"{'v1':12}" + "".join(f"{alone[name]:>26.3f}" for name in FIGURES),
        *(
            f"{name:12}" + "".join(f"{found[figure]!s:>26}" for figure in FIGURES)
            for name, found in worse.items()
        ),
    ]
    late = {arm.name: arm.compared_late for arm in arms}
    for name, report in reports.items():
        drawn = sum(report[f"{kind}_requests"] for kind in ("sampled", "busy", "no_room"))
        lines.append(
            f"{name}: followed {report['sampled_requests']} of {drawn} drawn requests "
            f"({report['dropped_requests']} not to the end, {report['resumed_requests']} resumes); "
            f"{report['compared_tokens']} tokens compared, {late[name]} of them when a load was "
            f"over; {report['mismatches']} mismatches, {report['near_ties']} near ties, "
            f"{report['faults']} faults"
        )
    if not any("token ids" in fault for fault in wrong):
        lines.append("token ids: the same from every server in every load")
    lines += wrong
    judged = worse[JUDGED]
    parts = ", ".join(f"{name} {one.verdict}" for name, one in judged.items())
    lines.append(
        f"verdict on {JUDGED}, at most {BOUND:.0%} worse: {verdict(wrong, judged)} ({parts})"
    )
    sys.stdout.write("\n".join(lines) + "\n")


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
