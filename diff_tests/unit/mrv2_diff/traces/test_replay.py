"""What cannot be played here is refused with what differs, before any process starts."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mrv2_diff.harness import TraceReplay
from mrv2_diff.models import ModelSpec, cached_model
from mrv2_diff.traces import replay as replaying
from mrv2_diff.traces.events import Event, Executed, Head
from mrv2_diff.traces.facts import model_facts, vllm_version
from mrv2_diff.traces.format import TraceError, open_trace
from mrv2_diff.traces.privacy import Noise
from mrv2_diff.traces.replay import ReplayRefusedError, replay
from mrv2_diff.traces.toy import VOCAB_SIZE, a_head, a_load, arrival, write

SPEC = ModelSpec()


class StartedError(Exception):
    """A process was started."""


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process starts in these tests: the attempt is what they look for."""

    def start(*arguments: Any, **named: Any) -> None:
        raise StartedError

    monkeypatch.setattr(subprocess, "run", start)


def _head(**changes: object) -> Head:
    """Of an engine that could be here."""
    facts = model_facts(cached_model(SPEC), VOCAB_SIZE)
    return a_head(**({"vllm": vllm_version(), "model": facts} | changes))


def _trace(folder: Path, head: Head, events: list[Event] | None = None) -> Path:
    return write(folder / "t.trace", events or a_load(32), head)


def test_what_could_be_played_starts_a_process(tmp_path: Path) -> None:
    with pytest.raises(StartedError):
        replay(TraceReplay(trace=_trace(tmp_path, _head())))


def _refused(tmp_path: Path, head: Head, model: Path | None = None) -> list[str]:
    with pytest.raises(ReplayRefusedError) as refused:
        replay(TraceReplay(trace=_trace(tmp_path, head), model=model))
    return refused.value.reasons


def test_another_vllm(tmp_path: Path) -> None:
    reasons = _refused(tmp_path, _head(vllm="0.31.9"))
    assert reasons == [f"vLLM: recorded '0.31.9', here '{vllm_version()}'"]


def test_another_model_is_told_by_each_value_that_differs(tmp_path: Path) -> None:
    other = cached_model(ModelSpec(layers=3))
    (config, weights) = sorted(_refused(tmp_path, _head(), other))
    here = model_facts(other, VOCAB_SIZE)
    assert config == (
        f"model['config_sha256']: recorded '{_head().model.config_sha256}', "
        f"here '{here.config_sha256}'"
    )
    assert weights.startswith("model['weights_sha256']: recorded '")


def test_other_weights_of_the_same_configuration(tmp_path: Path) -> None:
    (weights,) = _refused(tmp_path, _head(), cached_model(ModelSpec(seed=7)))
    assert weights.startswith("model['weights_sha256']")


def test_a_model_that_must_be_named(tmp_path: Path) -> None:
    facts = msgspec.structs.replace(_head().model, tiny=None, name="../../models/large")
    assert _refused(tmp_path, _head(model=facts)) == [
        "it was recorded of the model '../../models/large': name its folder with --model"
    ]


def test_more_than_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "available_bytes", lambda: 1 << 20)
    engine = msgspec.structs.replace(_head().engine, max_num_seqs=500_000)
    (memory,) = _refused(tmp_path, _head(engine=engine))
    assert memory.startswith("memory: 500000 requests of 128 tokens and 64 KV blocks need about ")
    assert memory.endswith(" MiB, and 1 MiB are free")


def test_all_that_differs_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "available_bytes", lambda: 1 << 20)
    reasons = _refused(tmp_path, _head(vllm="0.31.9", runner_class="x"),
                       cached_model(ModelSpec(seed=7)))  # fmt: skip
    assert [reason.partition(":")[0].partition("[")[0] for reason in reasons] == [
        "vLLM", "runner", "model", "memory"
    ]  # fmt: skip


def test_other_kv_groups_in_the_steps(tmp_path: Path) -> None:
    request = msgspec.structs.replace(arrival().new[0], block_ids=[[1], [2]])
    path = _trace(tmp_path, _head(), [msgspec.structs.replace(arrival(), new=[request])])
    with pytest.raises(TraceError, match="blocks of 2 KV groups, and there are 1"):
        replay(TraceReplay(trace=path))


def test_a_private_trace_has_nothing_of_its_prompts(tmp_path: Path) -> None:
    """In the bytes of the file: no prompt is there, and each has its length."""
    before = a_load(320)
    noise = Noise(VOCAB_SIZE)
    path = _trace(tmp_path, _head(is_private=True), [noise.of(event) for event in before])
    after = list(open_trace(path).events())
    prompts = [_prompts(events) for events in (before, after)]
    assert [len(prompt) for prompt in prompts[0]] == [len(prompt) for prompt in prompts[1]]
    assert len(prompts[0]) >= 40
    found = {tuple(prompt) for prompt in prompts[0]} & {tuple(prompt) for prompt in prompts[1]}
    assert not found


def _prompts(events: list[Event]) -> list[list[int]]:
    return [new.prompt for event in events if isinstance(event, Executed) for new in event.new]
