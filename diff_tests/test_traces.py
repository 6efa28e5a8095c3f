"""Traces of live engines: recorded from both runners and from a server, and played in both."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from mrv2_diff.drivers.one_engine import job_environment
from mrv2_diff.drivers.server import serving
from mrv2_diff.harness import TraceReplay
from mrv2_diff.models import ModelSpec, cached_model
from mrv2_diff.traces import damage
from mrv2_diff.traces.check import check_steps
from mrv2_diff.traces.events import Event, Head, Output
from mrv2_diff.traces.format import FrameWriter, open_trace
from mrv2_diff.traces.recorder import IDLE_S
from mrv2_diff.traces.replay import ReplayRefusedError, ReplayResult, replay
from mrv2_diff.verdict import Verdict

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LIMIT_S = 400
NAMES_STAY = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}


def record_mixed(path: Path, runner: str, *, private: bool = False) -> Path:
    """Record the mixed load of `drivers.mixed`."""
    environ = {
        "MRV2_RUNNER": runner,
        "MRV2_TRACE": str(path),
        "MRV2_TRACE_PRIVATE": str(int(private)),
        **NAMES_STAY,
    }
    done = subprocess.run(
        [sys.executable, "-m", "mrv2_diff.drivers.mixed", str(cached_model(ModelSpec()))],
        env=job_environment(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert path.is_file(), f"nothing was recorded; make setup installs the door\n{done.stdout}"
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One trace of each runner, and a private one."""
    folder = tmp_path_factory.mktemp("traces")
    asked = {"mrv2": ("mrv2", False), "v1": ("v1", False), "private": ("v1", True)}
    with ThreadPoolExecutor(2) as pool:  # most of it is one thread that imports
        paths = pool.map(
            lambda name: record_mixed(
                folder / f"{name}.trace", asked[name][0], private=asked[name][1]
            ),
            asked,
        )
        return dict(zip(asked, paths, strict=True))


@pytest.fixture(scope="module")
def replays(traces: dict[str, Path]) -> dict[tuple[str, str, bool], ReplayResult]:
    """Each trace in both runners, forced, and in its own runner, free."""
    asked = [
        ("mrv2", "mrv2", True), ("mrv2", "v1", True), ("mrv2", "mrv2", False),
        ("v1", "mrv2", True), ("v1", "v1", True), ("private", "mrv2", True),
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(
            lambda key: replay(TraceReplay(trace=traces[key[0]], runner=key[1], forced=key[2])),
            asked,
        )
        return dict(zip(asked, results, strict=True))


Replays = dict[tuple[str, str, bool], ReplayResult]


@pytest.mark.parametrize("name", ["mrv2", "v1"])
def test_what_the_load_is_about_is_in_the_trace(traces: dict[str, Path], name: str) -> None:
    trace = open_trace(traces[name])
    contents = check_steps(trace.head, trace.steps())
    assert trace.head.runner == name
    assert contents.requests == 12
    assert contents.masks > 0
    assert contents.preemptions > 0
    assert contents.resumes > 0
    assert contents.steps == contents.steps_with_output
    finished = {name for step in trace.steps() for name in step.executed.finished_req_ids}
    assert {"q2", "q4"} <= finished  # the two that were given up
    prefix = [new.num_computed_tokens for step in trace.steps() for new in step.executed.new]
    assert any(prefix)  # and one that found its prefix in the cache


@pytest.mark.parametrize("name", ["mrv2", "v1"])
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_it_replays_in_both_runners(replays: Replays, name: str, runner: str) -> None:
    result = replays[name, runner, True]
    assert result.verdict is Verdict.MATCH, (result.divergence, result.error)
    assert result.compared > 150


def test_it_replays_free_with_unseeded_draws_compared(replays: Replays) -> None:
    result = replays["mrv2", "mrv2", False]
    assert result.verdict is Verdict.MATCH, (result.divergence, result.error)
    assert result.left_out == 0


def test_a_private_trace_compares_runners(replays: Replays, traces: dict[str, Path]) -> None:
    result = replays["private", "mrv2", True]
    assert result.verdict is Verdict.MATCH, (result.divergence, result.error)
    assert result.compared > 150
    # Which request is first in its step differs from engine to engine.
    prompts = sorted(_prompts(open_trace(traces["private"]).steps()), key=len)
    clear = sorted(_prompts(open_trace(traces["v1"]).steps()), key=len)
    assert [len(prompt) for prompt in prompts] == [len(prompt) for prompt in clear]
    assert not any(prompt in clear for prompt in prompts)


def _prompts(steps: object) -> list[list[int]]:
    return [new.prompt for step in steps for new in step.executed.new]  # type: ignore[attr-defined]


def test_an_altered_token_is_the_first_divergence(traces: dict[str, Path], tmp_path: Path) -> None:
    trace = open_trace(traces["mrv2"])
    steps = list(trace.steps())
    step = next(step for step in steps if step.number > 30 and _drawn(step.output) is not None)
    victim = _drawn(step.output)
    assert victim is not None
    events = [
        _altered(event, step.number, victim) if isinstance(event, Output) else event
        for event in trace.events()
    ]
    path = rewritten(tmp_path / "altered.trace", trace.head, events)
    result = replay(TraceReplay(trace=path))
    assert result.verdict is Verdict.WRONG_VALUE
    assert result.divergence is not None
    assert (result.divergence.step, result.divergence.req_id) == (step.number, victim)
    assert "spacings of the dtype" in result.divergence.policy


def _drawn(output: Output | None) -> str | None:
    """Return a greedy request that drew a token."""
    if output is None:
        return None
    for req_id, tokens in zip(output.req_ids, output.token_ids, strict=True):
        if tokens and req_id in ("q0", "q1", "q10"):
            return req_id
    return None


def _altered(event: Output, step: int, req_id: str) -> Output:
    if event.step != step:
        return event
    token_ids = [
        [(tokens[0] + 1) % 331] if name == req_id else tokens
        for name, tokens in zip(event.req_ids, event.token_ids, strict=True)
    ]
    return Output(event.step, event.req_ids, token_ids)


def rewritten(path: Path, head: Head, events: list[Event]) -> Path:
    """Write a trace anew, with checksums that are right."""
    with path.open("wb") as file:
        writer = FrameWriter(file, head)
        whole = sum(isinstance(event, Output) for event in events)
        writer.events([msgspec.msgpack.encode(event) for event in events], whole)
        writer.end("rewritten")
    return path


# Refused, with what differs, before any process starts or before it allocates.


def changed(traces: dict[str, Path], path: Path, **changes: object) -> Path:
    """A trace whose head is another."""
    trace = open_trace(traces["mrv2"])
    head = msgspec.structs.replace(trace.head, **changes)
    return rewritten(path, head, list(trace.events()))


def test_another_model_is_refused(traces: dict[str, Path]) -> None:
    other = cached_model(ModelSpec(seed=7))
    with pytest.raises(ReplayRefusedError, match="weights_sha256"):
        replay(TraceReplay(trace=traces["mrv2"], model=other))
    deeper = cached_model(ModelSpec(layers=3))
    with pytest.raises(ReplayRefusedError, match="config_sha256"):
        replay(TraceReplay(trace=traces["mrv2"], model=deeper))


def test_another_vllm_is_refused(traces: dict[str, Path], tmp_path: Path) -> None:
    path = changed(traces, tmp_path / "t", vllm="0.31.9")
    with pytest.raises(ReplayRefusedError, match=r"vLLM: recorded '0\.31\.9', here '0\.32"):
        replay(TraceReplay(trace=path))


def test_more_requests_than_the_machine_holds_are_refused(
    traces: dict[str, Path], tmp_path: Path
) -> None:
    engine = msgspec.structs.replace(
        open_trace(traces["mrv2"]).head.engine, max_num_seqs=2_000_000, max_model_len=1_000_000
    )
    path = changed(traces, tmp_path / "t", engine=engine)
    with pytest.raises(ReplayRefusedError, match="memory: 2000000 requests of 1000000 tokens"):
        replay(TraceReplay(trace=path))


@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_another_kv_group_is_refused_before_weights_are_loaded(
    traces: dict[str, Path], tmp_path: Path, runner: str
) -> None:
    kv = open_trace(traces["mrv2"]).head.kv
    group = msgspec.structs.replace(kv.groups[0], spec="SlidingWindowSpec")
    path = changed(traces, tmp_path / "t", kv=msgspec.structs.replace(kv, groups=[group]))
    with pytest.raises(
        ReplayRefusedError, match=r"recorded 'SlidingWindowSpec'.*; no weights were loaded"
    ):
        replay(TraceReplay(trace=path, runner=runner))


def test_another_configuration_is_refused(traces: dict[str, Path], tmp_path: Path) -> None:
    engine = open_trace(traces["mrv2"]).head.engine
    path = changed(
        traces, tmp_path / "t", engine=msgspec.structs.replace(engine, logprobs_mode="../../x")
    )
    with pytest.raises(ReplayRefusedError, match="does not take the recorded configuration"):
        replay(TraceReplay(trace=path))


# A server.


def test_a_server_is_recorded_under_load(tmp_path: Path) -> None:
    model = cached_model(ModelSpec())
    path = tmp_path / "serve.trace"
    arguments = (
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "8",
        "--block-size", "32", "--num-gpu-blocks-override", "24",
    )  # fmt: skip
    environ = {"MRV2_RUNNER": "mrv2", "MRV2_TRACE": str(path)}
    with serving(model, tmp_path / "log", arguments, environ) as server:

        def ask(number: int) -> int:
            body = {
                "model": str(model), "prompt": [4 + (number * place) % 240 for place in range(30)],
                "max_tokens": 24, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200)
            return answer.raise_for_status().json()["usage"]["completion_tokens"]  # type: ignore[no-any-return]

        with ThreadPoolExecutor(10) as pool:
            assert list(pool.map(ask, range(1, 21))) == [24] * 20
        time.sleep(2 * IDLE_S + 1)  # vLLM kills its engine process as soon as the server ends
    trace = open_trace(path)
    contents = check_steps(trace.head, trace.steps())
    assert contents.requests == 20
    assert contents.tokens >= 20 * 24
    for name, damaged in damage.copies(path):
        copy = tmp_path / "copy.trace"
        copy.write_bytes(damaged)
        assert damage.read(copy) is not None, f"{name} was read to its end"
    result = replay(TraceReplay(trace=path, runner="v1"))
    assert result.verdict is Verdict.MATCH, (result.divergence, result.error)
    assert result.compared >= 20 * 24
