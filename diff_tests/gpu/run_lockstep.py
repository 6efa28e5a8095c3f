"""Every case in lockstep on a CUDA device, eager and with CUDA graphs, many processes side by side.

usage: python diff_tests/gpu/run_lockstep.py FOLDER [--graphs none,FULL_DECODE_ONLY] [--case ID]
           [--processes 16] [--devices 1] [--seconds 560]

Each process runs `mrv2-diff run` for some of the cases that share an engine, and has a log of its
own under FOLDER/lockstep. All records are added to FOLDER/records.jsonl, also those of a process
that did not get to its end. Status 0 only where every case has a record for each kind of graphs,
and every one passes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mrv2_diff import record
from mrv2_diff.case import GRAPHS, Case
from mrv2_diff.catalog import CASES
from mrv2_diff.cli import TRACEBACK_VAR
from mrv2_diff.models import cached_model
from mrv2_diff.record import Record

_MOST_CASES = 4
"""Of one process: more would be the last to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process runs."""

    name: str
    graphs: str
    cases: tuple[str, ...]


def parts(cases: Sequence[Case], graphs: Sequence[str]) -> list[Part]:
    """Return what the processes run, the longest first; cases of one share an engine."""
    here = [case.on("cuda") for case in cases]
    found = []
    for engine in dict.fromkeys(case.engine for case in here):
        together = [case.id for case in here if case.engine == engine]
        num_parts = -(-len(together) // _MOST_CASES)
        for number in range(num_parts):
            chosen = tuple(together[number::num_parts])
            found += [Part(name=f"{kind}-{chosen[0]}", graphs=kind, cases=chosen)
                      for kind in graphs]  # fmt: skip
    return sorted(found, key=lambda part: -len(part.cases))


def run(part: Part, folder: Path, deadline: float, device: int) -> str:
    """Run a part on one of the devices, and return how it ended."""
    left = deadline - time.monotonic()
    if left < 1.0:
        return "not started, the time was over"
    out = folder / part.name
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mrv2_diff.cli", "run", "--graphs", part.graphs]
    command += ["--out", str(out)]
    for case in part.cases:
        command += ["--case", case]
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        TRACEBACK_VAR: "1",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(device),
    }
    began = time.monotonic()
    with (folder / f"{part.name}.log").open("wb") as log:
        done = subprocess.run(
            ["timeout", "-k", "5", f"{left:.0f}", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    return f"status {done.returncode} after {time.monotonic() - began:.0f} s"


def records_of(part: Part, folder: Path) -> list[Record]:
    """Return the whole records that a part has written."""
    file = folder / part.name / "records.jsonl"
    return list(record.read(file)) if file.is_file() else []


def told(part: Part, made: Sequence[Record]) -> list[str]:
    """Return a line for each case of a part."""
    by_id = {each.id: each for each in made}
    lines = []
    for case in part.cases:
        each = by_id.get(case)
        if each is None:
            lines.append(f"! {'NO RECORD':<18} {case}")
            continue
        floor = " ".join(f"{value}={size:g}" for value, size in each.noise_floor.items())
        mark = " " if each.verdict.passes else "!"
        lines.append(f"{mark} {each.verdict:<18} {case}: {each.summary}")
        lines.append(f"      floor {floor or 'none'}; steps {each.steps_by_mode}")
    return lines


def main() -> int:
    """Run the parts and say what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--devices", type=int, default=1, help="GPUs, used by turns")
    parser.add_argument("--seconds", type=float, default=560.0)
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.seconds
    cases = [CASES[name] for name in asked.case] or list(CASES.values())
    for spec in {case.engine.model for case in cases}:
        cached_model(spec)
    work = parts(cases, asked.graphs.split(","))
    folder = asked.folder / "lockstep"
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(asked.processes) as pool:
        devices = itertools.cycle(range(asked.devices))
        ends = list(pool.map(lambda part, n: run(part, folder, deadline, n), work, devices))
    num_passed = num_asked = 0
    bad: list[str] = []
    for part, end in zip(work, ends, strict=True):
        made = records_of(part, folder)
        for each in made:
            record.append(asked.folder / "records.jsonl", each)
        lines = told(part, made)
        print(f"{part.name}: {end}", *lines, sep="\n", flush=True)
        bad += [f"{part.graphs}:{line[:200]}" for line in lines if not line.startswith("  ")]
        num_asked += len(part.cases)
        num_passed += sum(each.verdict.passes for each in made)
    print("", *bad, sep="\n")
    print(f"lockstep: {num_passed} of {num_asked} cases pass", flush=True)
    return 0 if num_passed == num_asked else 1


if __name__ == "__main__":
    sys.exit(main())
