"""A runner's process without vLLM: it speaks the protocol and makes figures up."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mrv2_diff.device_bench.channel import RunnerProcess

PROGRAM = """
import json, os, sys, time
requests, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
told = json.loads(os.environ["FAKE"])
for line in requests:
    command = json.loads(line)
    do = command["do"]
    act = told.get(do, {})
    print("asked", do, flush=True)
    if act.get("dies"):
        print("the last words", flush=True)
        os._exit(7)
    if act.get("hangs"):
        time.sleep(600)
    us = told.get("us", 100.0)
    answer = {
        "load": {"device": told.get("device", "cpu"), "environment": {"device": "made up"}},
        "start": {"runner_class": "a.Runner", "start_s": 1.0, "kv_tokens": 64, "memory": None,
                  "memory_reported": {}},
        "record": {"stream": told.get("stream", "same")},
        "throughput": {"stream": told.get("stream", "same"), "tokens_per_s": 1e6 / us,
                       "seconds": 1.0, "steps": 9, "ttft_ms": [1.0, 2.0]},
        "profile": {"busy_us": 50.0, "outside_us": 5.0, "plan_us": 1.0, "copy_us": 2.0,
                    "calls": {"cudaGraphLaunch": 1.0}, "num_calls": 1.0, "uploads": 1.0,
                    "downloads": 1.0, "kernels": [{"name": "gemm", "kind": "model", "runs": 1.0,
                                                   "microseconds": 45.0}]},
        "forget": {},
    }.get(do) or {
        "columns": {name: [us, us + 0.1] for name in ("host_us", "cpu_us", "execute_us",
                    "sample_us", "read_us", "wait_us", "wall_us")},
        "other_threads_us": 1.0, "peak_allocated": None,
    }
    if act.get("error"):
        answer = {"error": "Traceback: " + act["error"]}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""

Start = Callable[[str, Path, dict[str, str]], RunnerProcess]
Told = dict[str, dict[str, object]]


@pytest.fixture
def starting(tmp_path: Path) -> Callable[[Told], Start]:
    """Makes what starts a made-up process, which is told by runner what to do."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def starts(told: Told) -> Start:
        def start(runner: str, log: Path, environ: dict[str, str]) -> RunnerProcess:
            fake = json.dumps(told.get(runner, {}))
            command = (sys.executable, str(program))
            return RunnerProcess(runner, log, {**environ, "FAKE": fake}, command)

        return start

    return starts
