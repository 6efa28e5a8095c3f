"""The tier runner counts what ran, and does not let a tier pass that proved nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import run_tiers

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = run_tiers.Tier("reference")
GPU = run_tiers.Tier("gpu", may_skip=True)


def _report(folder: Path, *, tests: int, failures: int = 0, skipped: int = 0) -> Path:
    path = folder / "junit.xml"
    counts = f'tests="{tests}" failures="{failures}" errors="0" skipped="{skipped}"'
    path.write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    return path


def test_counts_are_read(tmp_path: Path) -> None:
    report = _report(tmp_path, tests=5, failures=1)
    outcome = run_tiers.read_outcome(REFERENCE, report, status=1)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (4, 1, 0)
    assert str(outcome) == "reference: 4 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize(
    ("tests", "skipped", "status", "fault"),
    [
        (0, 0, 5, "no test ran"),
        (3, 1, 0, "only tests marked gpu"),
        (3, 0, 3, "status 3"),
    ],
)
def test_an_empty_skipped_or_broken_tier_fails(
    tmp_path: Path, tests: int, skipped: int, status: int, fault: str
) -> None:
    report = _report(tmp_path, tests=tests, skipped=skipped)
    outcome = run_tiers.read_outcome(REFERENCE, report, status)
    assert len(outcome.faults) == 1
    assert fault in outcome.faults[0]


def test_a_tier_without_report_fails(tmp_path: Path) -> None:
    assert run_tiers.read_outcome(REFERENCE, tmp_path / "none.xml", status=4).faults


def test_only_the_gpu_tier_may_skip(tmp_path: Path) -> None:
    assert not run_tiers.read_outcome(GPU, _report(tmp_path, tests=2, skipped=2), 0).faults
    assert [tier.name for tier in run_tiers.TIERS if tier.may_skip] == ["gpu"]


def test_an_unknown_tier_is_refused_with_the_names() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "diff_tests" / "run_tiers.py"), "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "unknown tier nonsense; choose from checks, reference" in result.stderr
