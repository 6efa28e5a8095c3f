"""On real engines: planted faults are made short, run again alike, and are tests of pytest."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from mrv2_diff import case_file, cli, process
from mrv2_diff.case import Add
from mrv2_diff.record import read

process.prepare()

pytestmark = pytest.mark.vllm

FAULTS = ("stale-row", "swapped-logit-row")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is left of the cases that find two faults."""
    folder = tmp_path_factory.mktemp("short")
    faults = [part for fault in FAULTS for part in ("--mutant", fault)]
    assert cli.main(["shrink", *faults, "--repeat", "2", "--out", str(folder)]) == 0
    return folder


def test_little_is_left_and_it_fails_alike(short: Path, tmp_path: Path) -> None:
    files = sorted(short.glob("*.json"))
    assert len(files) == len(FAULTS)
    given = [part for file in files for part in ("--case-file", str(file))]
    assert cli.main(["run", *given, "--out", str(tmp_path)]) == 1
    records = {record.id: record for record in read(tmp_path / "records.jsonl")}
    for file in files:
        kept = case_file.read(file)
        assert kept.found is not None
        record = records[kept.case.id]
        assert record.first_divergence is not None
        assert (record.verdict, record.first_divergence.value) == (
            kept.found.verdict,
            kept.found.value,
        )
        assert sum(isinstance(event, Add) for event in kept.case.workload()) <= 4
        assert record.steps <= 12
        assert f"with the planted fault {kept.case.fault}" in record.summary


def test_a_written_test_and_cases_are_tests_of_pytest(short: Path, tmp_path: Path) -> None:
    """In one session, on two engines: the written module's, and that of the cases."""
    (file, *_) = sorted(short.glob("*.json"))
    (module, *_) = sorted(short.glob("test_*.py"))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    if (
        "--mrv2-pair"
        not in subprocess.run(
            [*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
    ):
        command += ["-p", "mrv2_diff.pytest_plugin"]  # of an installation without the entry point
    command += ["--mrv2-pair", "v1,mrv2", "--mrv2-case", "lifecycle.greedy"]
    command += ["--mrv2-case-file", str(file), "--junitxml=junit.xml", str(module)]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    cases = {case.get("name"): case for case in
             ElementTree.parse(tmp_path / "junit.xml").iter("testcase")}  # fmt: skip
    assert len(cases) == 3
    failures = {name: [one.text or "" for one in case.iter("failure")]
                for name, case in cases.items()}  # fmt: skip
    assert failures["lifecycle.greedy"] == []
    (of_file,) = failures[case_file.read(file).case.id]
    assert "slots" in of_file
    (of_module,) = failures[module.stem]
    assert "WRONG_VALUE" in of_module
