"""`MRV2_RUNNER=mrv2 vllm serve`: 50 requests at once, answered as V1 answers, provably by ours."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from mrv2_diff.drivers.one_engine import OURS
from mrv2_diff.drivers.server import (
    NotServedByMrv2Error,
    Server,
    assert_mrv2_served,
    free_port,
    serve_command,
    serve_environment,
    serving,
)
from mrv2_diff.models import ModelSpec, cached_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_REQUESTS = 50
ABORT_AFTER = 4
"""Tokens after which the client of an aborted request hangs up."""
ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--seed=0",
    "--max-model-len=256",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=96",
    "--block-size=32",
    "--num-gpu-blocks-override=40",
)
EOS_ID = 330
TEXT = "the quick brown fox jumps over the lazy dog and goes on to the next river "


@dataclass(frozen=True)
class Question:
    """One request, and how its client behaves."""

    body: dict[str, Any]
    aborts: bool


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


def questions() -> list[Question]:
    """Token ids and texts of many lengths; streamed, aborted and with logprobs, in all mixtures."""
    made = []
    for number in range(NUM_REQUESTS):
        length = 1 + (number * 37) % 150
        ids = [4 + (number * 31 + place * place) % 240 for place in range(length)]
        text = (TEXT * 2)[number : number + length]
        streams = number % 3 == 0
        body = {
            "model": "tiny",
            "prompt": text if number % 4 == 1 else ids,
            "max_tokens": 6 + number % 27,
            "temperature": 0,
            "stream": streams,
            "return_token_ids": True,
            "ignore_eos": number % 5 != 2,
            "logprobs": 3 if number % 7 == 0 else None,
        }
        made.append(Question(body, aborts=streams and number % 2 == 1))
    return made


QUESTIONS = questions()


async def ask(client: httpx.AsyncClient, question: Question) -> Answer:
    """Send one request and read its answer, up to where its client hangs up."""
    answer = Answer()
    if not question.body["stream"]:
        reply = await client.post("/v1/completions", json=question.body)
        take(answer, reply.raise_for_status().json()["choices"][0])
        return answer
    async with client.stream("POST", "/v1/completions", json=question.body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                take(answer, choice)
            if question.aborts and len(answer.token_ids) >= ABORT_AFTER:
                break
    return answer


def take(answer: Answer, choice: dict[str, Any]) -> None:
    """Add what one message brought."""
    answer.token_ids += choice["token_ids"] or []
    answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
    answer.finished = answer.finished or choice["finish_reason"] is not None


def ask_all(server: Server) -> list[Answer]:
    """Send every question at once."""

    async def run() -> list[Answer]:
        limits = httpx.Limits(max_connections=NUM_REQUESTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(ask(client, question) for question in QUESTIONS))

    return asyncio.run(run())


@dataclass(frozen=True)
class Run:
    """A server that is up, what it answered, and its worker's report afterwards."""

    server: Server
    answers: list[Answer]
    report: dict[str, Any] | None


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_model(ModelSpec())


def started(model: Path, log: Path, environ: dict[str, str]) -> Iterator[Run]:
    arguments = (*ARGUMENTS, "--served-model-name", "tiny")
    with serving(model, log, arguments, environ) as server:
        answers = ask_all(server)
        yield Run(server, answers, server.report())


@pytest.fixture(scope="module")
def ours(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    log = tmp_path_factory.mktemp("ours") / "log"
    yield from started(model, log, {"MRV2_RUNNER": "mrv2"})


@pytest.fixture(scope="module")
def v1(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    log = tmp_path_factory.mktemp("v1") / "log"
    yield from started(model, log, {"MRV2_RUNNER": "v1"})


@pytest.fixture(scope="module")
def hidden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """MRV2_RUNNER=mrv2 with every entry point hidden, as if the plugin were not installed."""
    log = tmp_path_factory.mktemp("hidden") / "log"
    hiding = {"VLLM_PLUGINS": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    yield from started(model, log, {"MRV2_RUNNER": "mrv2", **hiding})


def differing(ours: list[Answer], theirs: list[Answer]) -> list[int]:
    """Numbers of the requests whose tokens differ, as far as both clients read."""
    return [
        number
        for number, (question, mine, other) in enumerate(zip(QUESTIONS, ours, theirs, strict=True))
        if shown(question, mine) != shown(question, other)
    ]


def shown(question: Question, answer: Answer) -> list[int]:
    return answer.token_ids[:ABORT_AFTER] if question.aborts else answer.token_ids


def test_the_questions_are_what_they_claim() -> None:
    prompts = [question.body["prompt"] for question in QUESTIONS]
    assert len(QUESTIONS) == NUM_REQUESTS
    assert len({len(prompt) for prompt in prompts}) > 20
    for kind in (str, list):
        assert sum(isinstance(prompt, kind) for prompt in prompts) > 10
    for name in ("stream", "logprobs"):
        assert sum(bool(question.body[name]) for question in QUESTIONS) > 5
    assert sum(question.aborts for question in QUESTIONS) > 5


def test_every_request_is_answered(ours: Run) -> None:
    for question, answer in zip(QUESTIONS, ours.answers, strict=True):
        if question.aborts:
            assert len(answer.token_ids) >= ABORT_AFTER
            continue
        assert answer.finished
        limit = question.body["max_tokens"]
        expected = [limit] if question.body["ignore_eos"] else range(1, limit + 1)
        assert len(answer.token_ids) in expected
        wanted = len(answer.token_ids) if question.body["logprobs"] else 0
        assert len(answer.logprobs) == wanted


def test_our_runner_did_it(ours: Run) -> None:
    assert_mrv2_served(ours.report)
    assert ours.report is not None
    longest = max(question.body["max_tokens"] for question in QUESTIONS)
    assert ours.report["steps_executed"] >= longest


def test_tokens_are_v1s(ours: Run, v1: Run) -> None:
    assert differing(ours.answers, v1.answers) == []


def test_logprobs_are_v1s(ours: Run, v1: Run) -> None:
    compared = 0
    for question, mine, other in zip(QUESTIONS, ours.answers, v1.answers, strict=True):
        if not question.aborts:
            assert mine.logprobs == pytest.approx(other.logprobs, abs=2e-3)
            compared += len(mine.logprobs)
    assert compared > 50


def test_v1_does_not_pass_the_proof(v1: Run) -> None:
    assert_refuted(v1)


def test_without_the_plugin_tokens_are_the_same_and_the_proof_fails(ours: Run, hidden: Run) -> None:
    assert differing(ours.answers, hidden.answers) == []
    assert_refuted(hidden)


def assert_refuted(run: Run) -> None:
    """The worker knows no report, and its server goes on."""
    assert run.report is None
    with pytest.raises(NotServedByMrv2Error, match="not one of ours"):
        assert_mrv2_served(run.report)
    assert httpx.get(f"{run.server.url}/health").status_code == httpx.codes.OK


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "not one of ours"),
        ({"runner_class": "vllm.V1", "steps_executed": 9}, "vllm.V1"),
        ({"runner_class": OURS, "steps_executed": 0}, "no step"),
    ],
)
def test_the_proof_can_fail(report: dict[str, Any] | None, reason: str) -> None:
    with pytest.raises(NotServedByMrv2Error, match=reason):
        assert_mrv2_served(report)


def test_differing_tokens_are_seen(ours: Run) -> None:
    changed = [Answer(list(answer.token_ids)) for answer in ours.answers]
    whole, aborted = 1, next(n for n, question in enumerate(QUESTIONS) if question.aborts)
    for number in (whole, aborted):
        changed[number].token_ids[ABORT_AFTER - 1] += 1
    assert differing(ours.answers, changed) == sorted([whole, aborted])


def test_an_unsupported_request_is_refused_and_the_server_goes_on(ours: Run) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
    url = f"{ours.server.url}/v1/completions"
    for asked, message in (
        ({"watermarking": True}, "watermarking (watermarking=True): leave it out"),
        ({"allowed_token_ids": [EOS_ID], "min_tokens": 2}, "min_tokens is 2 and forbids every one"),
        ({"top_p": 1.5}, "top_p must be in (0, 1]"),
        ({"logit_bias": {"999": 1.0}}, "999"),
    ):
        refused = httpx.post(url, json={**body, **asked}, timeout=60)
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert message in refused.json()["error"]["message"]
    served = httpx.post(url, json=body, timeout=60)
    assert served.status_code == httpx.codes.OK
    before = (ours.report or {})["steps_executed"]
    assert (ours.server.report() or {})["steps_executed"] > before


def test_a_processor_that_raises_ends_its_request_and_the_server_goes_on(
    model: Path, tmp_path: Path
) -> None:
    processor = "mrv2_diff.drivers.processors:Climbs"
    arguments = (*ARGUMENTS, "--served-model-name", "tiny", "--logits-processors", processor)
    climb = [8, 9, 10, 11, 12, 13]
    wanted: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True}
    body = {"model": "tiny", "temperature": 0, "return_token_ids": True, **wanted}
    arguments_of: dict[str, dict[str, Any]] = {
        "plain": {},
        "climbs": {"climbs": 1},
        "raises": {"climbs": 1, "raises": "late"},
    }
    asked = ["plain", "climbs", "raises", "climbs"] * 3
    with serving(model, tmp_path / "log", arguments, {"MRV2_RUNNER": "mrv2"}) as server:

        async def ask_at_once() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                posts = (
                    client.post("/v1/completions", json={**body, "vllm_xargs": arguments_of[kind]})
                    for kind in asked
                )
                return await asyncio.gather(*posts)

        for _ in range(2):
            replies = asyncio.run(ask_at_once())
            for kind, reply in zip(asked, replies, strict=True):
                if kind == "raises":
                    assert reply.status_code == httpx.codes.INTERNAL_SERVER_ERROR
                    continue
                assert reply.status_code == httpx.codes.OK
                token_ids = reply.json()["choices"][0]["token_ids"]
                assert len(token_ids) == len(climb)
                assert (token_ids == climb) == (kind == "climbs")
        assert httpx.get(f"{server.url}/health").status_code == httpx.codes.OK
        assert_mrv2_served(server.report())
    said = (tmp_path / "log").read_text()
    assert re.search(r"request cmpl-\S+: the logits processor \S+Climbs raised RuntimeError", said)


def test_an_unsupported_server_is_refused_before_its_engine_starts(model: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        serve_command(model, free_port(), [*ARGUMENTS, "--enable-lora", "--enable-prompt-embeds"]),
        env=serve_environment({"MRV2_RUNNER": "mrv2"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode not in (0, None)
    assert "not supported by the mrv2 runner" in said
    assert "- LoRA (" in said
    assert "- prompt embeddings (" in said
    assert "EngineCore" not in said, f"an engine was started, {time.monotonic() - began:.0f} s in"
