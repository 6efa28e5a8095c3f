"""V1, ours and vLLM's own V2 runner on the same steps, and a referee where two of them differ."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mrv2_diff import process
from mrv2_diff.catalog import CASES
from mrv2_diff.drivers.variables import clean_environment
from mrv2_diff.mutants import MUTANTS
from mrv2_diff.record import Record, read
from mrv2_diff.verdict import Verdict

process.prepare()

# E402: vLLM reads the environment when it is imported.
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import Module  # noqa: E402

from mrv2_diff.apart import run_apart  # noqa: E402
from mrv2_diff.lockstep.engine import LockstepEngine  # noqa: E402
from mrv2_diff.lockstep.layers import layers_of  # noqa: E402
from mrv2_diff.lockstep.subjects import Subject  # noqa: E402
from mrv2_diff.lockstep.worker import LockstepWorker  # noqa: E402
from mrv2_diff.models.checkpoint import cached_model  # noqa: E402
from mrv2_diff.referee import Referee  # noqa: E402
from mrv2_diff.run import RunRequest, run_cases  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="vllm-v2 runs on a CPU here")

PAIRS = [("v1", "mrv2"), ("v1", "vllm-v2"), ("mrv2", "vllm-v2")]
MUTANT = next(mutant for mutant in MUTANTS if mutant.id == "lost-staged-write")
"""Of those that need no op's reference: where Triton is interpreted, kernels run."""

PROGRAM = """
import sys
from contextlib import nullcontext
from mrv2_diff import interpreter, process
process.prepare()
interpreter.prepare()
from mrv2_diff.cli import main
from mrv2_diff.mutants import MUTANTS
faults = {mutant.id: mutant.apply for mutant in MUTANTS}
with faults.get(sys.argv[1], nullcontext)():
    sys.exit(main(sys.argv[2:]))
"""


def _run(fault: str, out: Path, *arguments: str) -> tuple[int, str, list[Record]]:
    """Run the command in a process that interprets Triton, with a fault in ours or without."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fault, "run", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(os.environ),
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, done.stdout, list(read(out / "records.jsonl"))


@on_cpu
def test_three_runners_agree_where_requests_are_preempted_and_come_back(tmp_path: Path) -> None:
    case = "lifecycle.preemption"
    code, printed, records = _run("", tmp_path, "--runners", "v1,mrv2,vllm-v2", "--case", case)
    assert code == 0, printed
    assert [record.pair for record in records] == PAIRS
    for record in records:
        assert record.verdict is Verdict.MATCH
        assert record.modes == ("forced", "free")
        assert record.events["preemptions"]
        assert record.events["resumes"]
        assert record.agreements["logits"].compared > 10_000
        assert record.agreements["block_tables"].compared
        assert record.environment["form"] == "small"
        assert not record.memory
        assert not record.latency
    assert "case" in printed
    assert "v1,vllm-v2" in printed


@on_cpu
def test_a_fault_of_ours_is_seen_beside_upstream_and_not_between_the_others(tmp_path: Path) -> None:
    code, _, records = _run(
        MUTANT.id, tmp_path, "--runners", "v1,mrv2,vllm-v2", "--case", "lifecycle.greedy"
    )
    found = {record.pair: record for record in records}
    assert code == 1
    assert found[("v1", "vllm-v2")].verdict is Verdict.MATCH
    for pair in (("v1", "mrv2"), ("mrv2", "vllm-v2")):
        first = found[pair].first_divergence
        assert first is not None
        assert first.value == MUTANT.first
    assert ", mrv2 has " in found[("mrv2", "vllm-v2")].summary


def _judged(fault: AbstractContextManager[object], *, layers: bool = False) -> Record:
    request = RunRequest(
        cases=(CASES["lifecycle.greedy"],),
        pair=("v1", "mrv2"),
        model=None,
        small=True,
        referee=True,
        layers=layers,
    )
    with fault:
        (record,) = run_cases(request)
    return record


@contextmanager
def _layer_of_ours(number: int) -> Iterator[None]:
    """Let one value behind a layer of our runner be a little too large."""
    build = LockstepWorker._build

    def builds(self: LockstepWorker, name: str) -> Subject:
        subject = build(self, name)
        if name == "mrv2":
            layers_of(subject.runner.get_model())[number].register_forward_hook(_raise_one_value)
        return subject

    with patch.object(LockstepWorker, "_build", builds):
        yield


def _raise_one_value(_layer: Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    output[0][-1, 7] += 0.125


@contextmanager
def _logits_of(side: str) -> Iterator[None]:
    """Let one runner's logits of token 3 be a little too large, from its third step on.

    Not while the floor is measured: a runner that differs from itself is not judged.
    """
    start = LockstepEngine.__init__

    def starts(self: LockstepEngine, *args: object) -> None:
        start(self, *args)  # type: ignore[arg-type]
        worker = self.worker
        runner = worker.reference.runner if side == "v1" else worker.candidate(side).runner
        model = runner.get_model()
        compute, calls = model.compute_logits, iter(range(1_000_000))

        def faulty(hidden: Tensor, *further: object) -> Tensor:
            logits: Tensor = compute(hidden, *further)
            if worker._pass is not None and worker._pass.candidate == "mrv2" and next(calls) >= 3:
                logits[..., 3] += 0.01
            return logits

        model.compute_logits = faulty

    with patch.object(LockstepEngine, "__init__", starts):
        yield


def test_a_fault_in_one_layer_is_named_by_that_layer() -> None:
    record = _judged(_layer_of_ours(1), layers=True)
    assert record.verdict is Verdict.WRONG_VALUE
    first = record.first_divergence
    assert first is not None
    assert (first.value, first.index, first.step) == ("hidden_states.1", 7, 0)
    assert [near.index for near in first.around] == list(range(4, 11))
    differ = [near.index for near in first.around if near.reference != near.candidate]
    assert differ == [7]
    assert record.agreements["hidden_states.0"].differing == 0
    assert record.agreements["hidden_states.0"].compared > 5_000
    assert {"hidden_states.0", "hidden_states.1"} < set(record.noise_floor)
    assert "--layers" in record.command


def test_where_ours_is_wrong_the_referee_is_nearer_v1() -> None:
    record = _judged(_logits_of("mrv2"))
    assert record.verdict is Verdict.WRONG_VALUE
    assert record.first_divergence is not None
    assert record.first_divergence.value == "logits"
    assert "the referee (float64) is nearer the candidate in 0 and nearer V1 in" in record.summary


def test_where_v1_is_wrong_the_referee_says_so() -> None:
    record = _judged(_logits_of("v1"))
    assert record.verdict is Verdict.REFERENCE_WRONG, record.summary
    assert "nearer V1 in 0 of" in record.summary


def test_drafts_of_v1_beside_random_requests_are_wrong_by_the_referee_too() -> None:
    case = CASES["sampling.beside_drafts"].on("cpu")
    model = cached_model(case.engine.model)
    found = run_apart(case, model, "cpu", "none", Referee(model, case.engine.dtype))
    assert found.verdict is Verdict.REFERENCE_WRONG, found.summary
    assert "V1's in 0" in found.summary
