"""Whatever a shadow does, the desk finds out, ends it, says why, and the serving thread goes on.

The children here are real processes that speak the desk's language and import no vLLM.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrv2_diff.shadow import desk as desks
from mrv2_diff.shadow.counters import Counters
from mrv2_diff.shadow.desk import Desk
from mrv2_diff.shadow.messages import Start
from mrv2_diff.shadow.settings import Settings
from mrv2_diff.shadow.weights import SharedWeights

CHILD = """
import os, pickle, signal, sys, time
from multiprocessing.connection import Connection
from mrv2_diff.shadow.messages import Done, Failed, Ready
from mrv2_diff.shadow.slices import Room

pipe = Connection(int(sys.argv[1]))
receive = lambda: pickle.loads(pipe.recv_bytes())
send = lambda message: pipe.send_bytes(pickle.dumps(message))
receive()
send(Ready(
    room=Room(num_blocks=50, block_sizes=(32,), max_num_reqs=8, max_model_len=256),
    num_shared=1, num_own=0,
))
while True:
    lot = receive()
    parts = list(lot.slices)
    while not lot.is_last:
        send(Done())
        lot = receive()
        parts += lot.slices
    for part in parts:
        tokens = sum(len(answer.__slots__) > 0 for answer in part.answers.values())
        FAULT
        send(Done(num_slices=1, compared_tokens=tokens, findings=FINDINGS, dropped=DROPPED))
"""

Begun = Callable[..., Desk]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "found.jsonl"


@pytest.fixture
def begin(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begun]:
    """Start a desk whose child does something for each step."""
    started: list[Desk] = []
    path = os.pathsep.join(entry for entry in sys.path if entry)

    def make(
        fault: str = "pass",
        findings: str = "[]",
        dropped: str = "{}",
        program: str = CHILD,
        limit_s: float = 20.0,
        max_behind: int = 256,
        gather_s: float = 0.05,
    ) -> Desk:
        for name, text in {"FAULT": fault, "FINDINGS": findings, "DROPPED": dropped}.items():
            program = program.replace(name, text)
        settings = Settings(
            share=1.0, file=file, limit_s=limit_s, max_behind=max_behind, gather_s=gather_s
        )
        desk = Desk(
            settings,
            Counters(None),
            [sys.executable, "-c", program],
            {**os.environ, "PYTHONPATH": path},
        )
        started.append(desk)
        desk.start(start_message(), lambda params: None)
        return desk

    yield make
    for desk in started:
        desk.close()


def start_message() -> Start:
    return Start(
        vllm_config=None,
        kv_cache_config=None,
        num_blocks=51,
        max_num_reqs=8,
        kv_bytes=1,
        weights=SharedWeights(),
        platform="cpu",
        local_rank=0,
    )


def serve(desk: Desk, req_id: str = "a", num_steps: int = 4, begin_at: int = 0) -> list[int]:
    """Do what a worker does for a request, and return the tokens that it was served."""
    served = []
    for number in range(begin_at, begin_at + num_steps):
        is_new = number == 0
        new = SimpleNamespace(
            req_id=req_id,
            prompt_token_ids=[1, 2, 3],
            sampling_params=SimpleNamespace(max_tokens=20, logprobs=None, logprob_token_ids=None),
            num_computed_tokens=0,
        )
        desk.begin(
            SimpleNamespace(
                scheduled_new_reqs=[new] if is_new else [],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[] if is_new else [req_id],
                    num_computed_tokens=[] if is_new else [2 + number],
                    resumed_req_ids=set(),
                ),
                num_scheduled_tokens={req_id: 3 if is_new else 1},
                finished_req_ids=set(),
            )
        )
        output = SimpleNamespace(
            req_id_to_index={req_id: 0}, sampled_token_ids=[[40 + number]], logprobs=None
        )
        found = desk.end(None)
        if found is not None:
            desk.answer(found, output)
        served += output.sampled_token_ids[0]
    return served


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_gone(desk: Desk) -> bool:
    try:
        os.kill(int(str(desk.report()["pid"])), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_shadow_that_agrees_says_nothing(begin: Begun, file: Path) -> None:
    desk = begin()
    assert desk.wait_until_idle(30)
    assert serve(desk) == [40, 41, 42, 43]
    assert desk.wait_until_idle(30)
    report = desk.report()
    assert (report["compared_tokens"], report["sampled_requests"], report["up"]) == (4, 1, 1)
    assert report["fault"] is None
    assert lines(file) == []


def test_findings_are_written_and_counted(begin: Begun, file: Path) -> None:
    findings = (
        "[{'verdict': 'mismatch', 'kind': 'token'}, {'verdict': 'near tie', 'kind': 'token'}]"
    )
    desk = begin(findings=findings)
    desk.wait_until_idle(30)
    serve(desk, num_steps=2)
    assert desk.wait_until_idle(30)
    report = desk.report()
    assert (report["mismatches"], report["near_ties"]) == (2, 2)
    written = lines(file)
    assert [line["verdict"] for line in written] == ["mismatch", "near tie"] * 2
    assert all(line["time"] for line in written)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("send(Failed(error='ValueError: broken')); sys.exit(1)", "failed: ValueError: broken"),
        ("send(Failed(error='MemoryError')); sys.exit(1)", "failed: MemoryError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died: ended by SIGKILL"),
        ("sys.exit(3)", "died: ended with 3"),
        ("time.sleep(600)", "hung: no answer within 1 s"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "hung: no answer within 1 s"),
        ("pipe.send_bytes(b'nonsense')", "its answer is no message"),
        ("send('done')", "its answer is a str"),
    ],
)
def test_a_fault_is_contained(begin: Begun, file: Path, fault: str, reason: str) -> None:
    desk = begin(fault=fault, limit_s=1.0)
    assert desk.wait_until_idle(30)
    began = time.monotonic()
    assert serve(desk) == [40, 41, 42, 43]
    assert time.monotonic() - began < 0.5, "serving waited for the shadow"
    deadline = time.monotonic() + 30
    while desk.fault is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reason in str(desk.fault)
    assert serve(desk, begin_at=4) == [44, 45, 46, 47]
    (line,) = lines(file)
    assert line["kind"] == "abandoned"
    assert reason in line["reason"]
    assert (desk.report()["faults"], desk.report()["up"]) == (1, 0)
    deadline = time.monotonic() + 10
    while not is_gone(desk) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(desk), "the process of an abandoned shadow still runs"


def test_a_shadow_that_does_not_start_is_contained(begin: Begun, file: Path) -> None:
    desk = begin(program="raise SystemExit(7)")
    assert desk.wait_until_idle(30)
    assert desk.fault == "died: ended with 7"
    assert serve(desk) == [40, 41, 42, 43]


def test_nothing_is_followed_before_the_shadow_is_ready(begin: Begun) -> None:
    desk = begin(program="import time; time.sleep(600)")
    assert serve(desk) == [40, 41, 42, 43]
    assert desk.report()["sampled_requests"] == 0
    assert not desk.wait_until_idle(0.1)


def test_a_shadow_that_falls_behind_gives_up_what_it_follows(
    begin: Begun, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "MAX_WAITING_BYTES", 5000)
    desk = begin(fault="time.sleep(0.3) if not part.forget_all else None")
    desk.wait_until_idle(30)
    serve(desk, num_steps=12)
    assert desk.wait_until_idle(30)
    behind = [line for line in lines(file) if line["kind"] == "behind"]
    assert [line["requests"] for line in behind] == [["a"]]
    assert "5000 bytes" in behind[0]["reason"]
    assert desk.fault is None
    assert desk._waiting_bytes == 0
    serve(desk, req_id="b", num_steps=2)
    assert desk.wait_until_idle(30)
    assert desk.report()["sampled_requests"] == 2
    assert desk.report()["dropped_requests"] == 1


def test_a_shadow_that_falls_behind_takes_no_further_request(begin: Begun) -> None:
    desk = begin(fault="time.sleep(0.2)", max_behind=3)
    desk.wait_until_idle(30)
    serve(desk, num_steps=8)
    serve(desk, req_id="b", num_steps=1)
    assert desk.wait_until_idle(30)
    report = desk.report()
    assert (report["sampled_requests"], report["busy_requests"]) == (1, 1)
    assert (report["compared_tokens"], report["dropped_requests"]) == (8, 0)


def test_a_shadow_that_has_no_core_is_not_hung(
    begin: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the kernel says that nine tenths of the time were spent waiting for one."""
    began = time.monotonic()
    monkeypatch.setattr(desks, "starved_s", lambda pid: (time.monotonic() - began) * 0.9)
    desk = begin(fault="time.sleep(1.0)", limit_s=0.4)
    assert desk.wait_until_idle(30)
    serve(desk, num_steps=1)
    assert desk.wait_until_idle(30)
    assert desk.fault is None
    assert desk.report()["compared_tokens"] == 1


def test_the_kernel_says_how_long_a_process_waited_for_a_core() -> None:
    assert 0.0 <= desks.starved_s(os.getpid()) < 1e6
    assert desks.starved_s(-1) == 0.0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes to the child."""
    found: list[Any] = []
    send = Desk._send

    def noted(self: Desk, message: Any) -> None:
        found.append(message)
        send(self, message)

    monkeypatch.setattr(Desk, "_send", noted)
    return found


def test_steps_are_gathered_until_somebody_waits_for_the_shadow(
    begin: Begun, sent: list[Any]
) -> None:
    desk = begin(gather_s=300.0)
    desk.wait_until_idle(30)
    serve(desk, num_steps=20)
    time.sleep(0.2)
    assert len(sent) == 1, "the start"
    assert desk.wait_until_idle(30)
    assert [len(lot.slices) for lot in sent[1:]] == [20]
    serve(desk, begin_at=20, num_steps=3)
    time.sleep(0.2)
    assert len(sent) == 2, "nobody waits any more"


def test_steps_are_gathered_until_their_time_is_over(begin: Begun) -> None:
    desk = begin(gather_s=0.3)
    desk.wait_until_idle(30)
    serve(desk, num_steps=5)
    assert desk.report()["compared_tokens"] == 0
    assert wait_for_tokens(desk, 5) == 5


def test_steps_are_gathered_until_half_of_what_may_wait_does(begin: Begun, sent: list[Any]) -> None:
    desk = begin(gather_s=300.0, max_behind=20)
    desk.wait_until_idle(30)
    serve(desk, num_steps=11)
    assert wait_for_tokens(desk, 9) >= 9, "the tenth may be due before it is answered"


def test_steps_are_gathered_until_half_of_the_bytes_that_may_wait_do(
    begin: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "MAX_WAITING_BYTES", 40_000)
    desk = begin(gather_s=300.0, max_behind=1000)
    desk.wait_until_idle(30)
    serve(desk, num_steps=25)
    assert wait_for_tokens(desk, 15) >= 15
    assert desk.report()["dropped_requests"] == 0


def test_a_lot_of_large_steps_has_few_of_them(
    begin: Begun, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "LOT_BYTES", 2500)
    desk = begin(gather_s=300.0)
    desk.wait_until_idle(30)
    serve(desk, num_steps=5)
    assert desk.wait_until_idle(30)
    assert [len(lot.slices) for lot in sent[1:]] == [2, 2, 1]
    assert desk.report()["compared_tokens"] == 5


def test_many_steps_go_in_lots_that_are_run_together(begin: Begun, sent: list[Any]) -> None:
    desk = begin(gather_s=300.0, max_behind=1000)
    desk.wait_until_idle(30)
    serve(desk, num_steps=2 * desks.LOT + 5)
    assert desk.wait_until_idle(30)
    lots = sent[1:]
    assert [len(lot.slices) for lot in lots] == [desks.LOT, desks.LOT, 5]
    assert [lot.is_last for lot in lots] == [False, False, True]
    assert desk.report()["compared_tokens"] == 2 * desks.LOT + 5


def test_room_comes_back_when_the_child_has_ended_a_request(begin: Begun) -> None:
    """The child has 8 rows, and may run what arrives later before it runs an earlier end."""
    desk = begin(gather_s=300.0)
    desk.wait_until_idle(30)
    for number in range(9):
        serve(desk, req_id=f"r{number}", num_steps=1)
        desk.begin(ending(f"r{number}"))
    assert desk.report()["sampled_requests"] == 8
    assert desk.report()["no_room_requests"] == 1
    assert desk.wait_until_idle(30)
    serve(desk, req_id="last", num_steps=1)
    assert desk.report()["sampled_requests"] == 9


def wait_for_tokens(desk: Desk, num_tokens: int) -> int:
    """Wait, without hurrying the shadow, until so many were compared; return how many are."""
    deadline = time.monotonic() + 20
    while True:
        compared = int(str(desk.report()["compared_tokens"]))
        if compared >= num_tokens or time.monotonic() > deadline:
            return compared
        time.sleep(0.05)


def ending(req_id: str) -> Any:
    """A step in which a request is no more."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={},
        finished_req_ids={req_id},
    )


def test_what_the_child_drops_is_not_followed_any_longer(begin: Begun, file: Path) -> None:
    desk = begin(dropped="{work.req_id: 'lost' for work in part.work}")
    desk.wait_until_idle(30)
    serve(desk, num_steps=1)
    assert desk.wait_until_idle(30)
    serve(desk, num_steps=1, begin_at=1)
    assert desk.wait_until_idle(30)
    assert desk.report()["compared_tokens"] == 1
    assert [line["reason"] for line in lines(file)] == ["lost"]


def test_a_step_that_cannot_be_read_is_contained(begin: Begun, file: Path) -> None:
    desk = begin()
    desk.wait_until_idle(30)
    serve(desk, num_steps=1)
    desk.begin(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=set()))
    assert "a step could not be cut" in str(desk.fault)
    assert serve(desk, begin_at=1) == [41, 42, 43, 44]


def test_answers_of_later_steps_wait_for_those_of_earlier_ones(begin: Begun) -> None:
    """Outputs of overlapping steps may be asked for late; the shadow gets steps in order."""
    desk = begin()
    desk.wait_until_idle(30)
    serve(desk, num_steps=1)
    desk.wait_until_idle(30)
    slices = []
    for number in (1, 2):
        desk.begin(
            SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=["a"], num_computed_tokens=[2 + number], resumed_req_ids=set()
                ),
                num_scheduled_tokens={"a": 1},
                finished_req_ids=set(),
            )
        )
        found = desk.end(None)
        assert found is not None
        slices.append(found)
    output = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[5]], logprobs=None)
    desk.answer(slices[1], output)
    assert not desk.wait_until_idle(0.3)
    threading.Thread(target=desk.answer, args=(slices[0], output)).start()
    assert desk.wait_until_idle(30)
    assert desk.report()["compared_tokens"] == 3


def test_a_file_that_cannot_be_written_any_more_stops_nothing(begin: Begun, file: Path) -> None:
    desk = begin(findings="[{'verdict': 'mismatch'}]")
    desk.wait_until_idle(30)
    file.mkdir()
    serve(desk, num_steps=2)
    assert desk.wait_until_idle(30)
    assert desk.report()["mismatches"] == 2
    assert desk.fault is None


def test_messages_survive_the_way() -> None:
    assert pickle.loads(pickle.dumps(start_message())) == start_message()
