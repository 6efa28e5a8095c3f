"""pytest's plugin: nothing without its options; with them each case is a test like any other."""

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

# Kept from one session to the next, each of which would import it anew.
import mrv2_diff.pytest_cases  # noqa: F401
from mrv2_diff import pytest_plugin

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
MODULE = pytest_plugin.__name__
PLUGIN = ("-p", MODULE, "-p", "no:unraisableexception")

CONFTEST = """
import dataclasses
from mrv2_diff import pytest_cases
from mrv2_diff.case import Add, Case, EngineSpec
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.record import Agreement, Record
from mrv2_diff.verdict import Divergence, Verdict

def case(id, num_blocks=100, **options):
    add = Add(step=0, req_id="a", prompt=(1,), max_tokens=1, options=tuple(options.items()))
    return Case(id=id, area=id.partition(".")[0], feature="f", title="t",
                engine=EngineSpec(model=ModelSpec(), num_blocks=num_blocks),
                workload=lambda: (add,))

CASES = {one.id: one for one in (
    case("sampling.good"), case("rows.good", num_blocks=50), case("sampling.wrong"),
    case("sampling.refused"), case("rows.crashed", num_blocks=50),
    case("sampling.thinking", thinking_token_budget=3))}
FIRST = Divergence(mode="forced", step=3, value="slots", req_id="r-7", index=2,
                   reference="64", candidate="96", policy="exact")

class Runner:
    kind = "cpu"
    def __init__(self, pair):
        self.pair, self.ran = pair, []
    def record(self, case):
        self.ran.append(case.id)
        name = case.id.partition(".")[2]
        verdict = {"wrong": Verdict.WRONG_VALUE, "refused": Verdict.REFUSED,
                   "crashed": Verdict.CRASHED}.get(name, Verdict.MATCH)
        return Record(
            id=case.id, area=case.area, feature="f", pair=self.pair, verdict=verdict,
            summary=f"it is {name}", modes=("forced",), steps=4, request_steps=4, events={},
            agreements={}, noise_floor={}, memory={}, latency={}, environment={},
            first_divergence=FIRST if name == "wrong" else None,
            error="Traceback\\nValueError: of ours" if name == "crashed" else None,
            command=f"mrv2-diff run --case {case.id}")
    def close(self):
        print("\\nRAN " + " ".join(self.ran))

def pytest_configure(config):
    config.stash[pytest_cases.LOCKSTEP] = pytest_cases.Lockstep(
        cases=lambda: CASES, start=Runner)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with a test of its own and a fake catalog."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("def test_of_others(): pass")
    return pytester


def _run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_inprocess(*PLUGIN, *arguments)


def test_each_case_is_a_test_and_others_are_left_alone(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-pair", "v1,mrv2", "-s")
    result.assert_outcomes(passed=3, failed=2, skipped=1)
    result.stdout.fnmatch_lines(["collected 6 items"])


def test_cases_of_an_engine_follow_each_other(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-pair", "v1,mrv2", "-s")
    result.stdout.fnmatch_lines(
        [
            "RAN sampling.good sampling.wrong sampling.refused sampling.thinking "
            "rows.good rows.crashed"
        ]
    )


def test_a_failure_says_value_step_request_and_both_sides(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-case", "sampling.wrong")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "WRONG_VALUE: it is wrong",
            "  value * slots",
            "  step * 3 (forced)",
            "  request * r-7, index 2",
            "  reference v1 * 64",
            "  candidate mrv2 * 96",
            "  bound * exact",
            "run it again:  mrv2-diff run --case sampling.wrong",
            "make it short: mrv2-diff shrink sampling.wrong",
        ]
    )
    assert "pytest_cases.py" not in result.stdout.str()


def test_a_crash_shows_its_traceback(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-case", "rows.crashed")
    result.stdout.fnmatch_lines(["CRASHED: it is crashed", "ValueError: of ours"])


def test_a_refused_case_is_skipped_with_its_reason(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-case", "sampling.refused", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*refused: it is refused*"])


def test_a_case_that_v1_fails_is_skipped_where_v1_is_both(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-pair", "v1,v1", "--mrv2-case", "sampling.thinking", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*V1 is known to be wrong in this case*"])


def test_cases_are_chosen_by_area_and_by_k(project: pytest.Pytester) -> None:
    _run(project, "--mrv2-area", "rows").assert_outcomes(passed=1, failed=1)
    result = _run(project, "--mrv2-pair", "v1,mrv2", "-k", "good and sampling")
    result.assert_outcomes(passed=1, deselected=5)


def test_files_that_are_named_are_collected_too(project: pytest.Pytester) -> None:
    arguments = ("--mrv2-case", "sampling.good", str(project.path))
    _run(project, *arguments).assert_outcomes(passed=2)


def test_a_case_file_is_a_test(project: pytest.Pytester) -> None:
    project.makeconftest(CONFTEST + "\nCASES = {}\n")
    project.makepyfile(
        make="""
        from pathlib import Path
        from conftest import case
        from mrv2_diff.case_file import CaseFile, write
        write(CaseFile(case=case("sampling.wrong"), pair=("v1", "mrv2")), Path("one.json"))
        """
    )
    assert project.runpython(project.path / "make.py").ret == 0
    result = _run(project, "--mrv2-case-file", "one.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["make it short: mrv2-diff shrink one.json"])


def test_junit_has_the_divergence_and_the_verdict(project: pytest.Pytester) -> None:
    _run(project, "--mrv2-area", "sampling", "--junitxml=junit.xml")
    cases = {case.get("name"): case for case in ElementTree.parse("junit.xml").iter("testcase")}
    wrong = cases["sampling.wrong"]
    (failure,) = wrong.iter("failure")
    assert "slots" in (failure.text or "")
    assert wrong.get("classname") == "mrv2[v1,mrv2]"
    properties = {one.get("name"): one.get("value") for one in wrong.iter("property")}
    assert properties["verdict"] == "WRONG_VALUE"
    assert next(cases["sampling.refused"].iter("skipped")).get("message") == (
        "refused: it is refused"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mrv2-pair", "a,b"], "*--mrv2-pair: no pair is called 'a,b'; choose v1,mrv2*"),
        (["--mrv2-area", "row"], "*no area is called 'row'; choose from: rows*"),
        (["--mrv2-case", "x"], "*no case is called 'x'*"),
        (["--mrv2-case-file", "gone.json"], "*cannot read gone.json*"),
    ],
)
def test_what_is_not_known_ends_the_session(
    project: pytest.Pytester, arguments: list[str], message: str
) -> None:
    result = _run(project, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_the_cases_are_not_run_when_collected_only(project: pytest.Pytester) -> None:
    result = _run(project, "--mrv2-area", "rows", "--collect-only", "-q", "-s")
    result.stdout.fnmatch_lines(["mrv2?v1,mrv2?::rows.good", "mrv2?v1,mrv2?::rows.crashed"])
    assert "RAN" not in result.stdout.str()


def test_xdist_runs_the_cases_of_an_engine_in_one_worker(
    project: pytest.Pytester, tmp_path: Path
) -> None:
    """With pytest-xdist itself, which tells what ran where by the worker's name in a file."""
    told = CONFTEST.replace(
        'print("\\nRAN " + " ".join(self.ran))',
        'open(f"ran-{os.environ[\'PYTEST_XDIST_WORKER\']}", "w").write(" ".join(self.ran))',
    )
    assert told != CONFTEST
    project.makeconftest("import os\n" + told)
    environment = _installed_by_entry_point(tmp_path)
    arguments = ("--mrv2-pair", "v1,mrv2", "-n", "2", "--dist", "loadgroup", "--strict-markers",
                 "-k", "not thinking", "--junitxml", "junit.xml")  # fmt: skip
    out = _pytest(project.path, environment, *arguments, code=1)
    assert "2 failed, 2 passed, 1 skipped" in out
    assert "WRONG_VALUE: it is wrong" in out
    ran = sorted(file.read_text() for file in project.path.glob("ran-gw*"))
    assert ran == ["rows.good rows.crashed", "sampling.good sampling.wrong sampling.refused"]
    cases = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    assert {case.get("name"): [part.tag for part in case if part.tag != "properties"]
            for case in cases} == {
        "rows.good": [], "rows.crashed": ["failure"], "sampling.good": [],
        "sampling.wrong": ["failure"], "sampling.refused": ["skipped"],
    }  # fmt: skip


def _installed_by_entry_point(folder: Path) -> dict[str, str]:
    """Return an environment in which pytest finds the plugin as pip would install it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["pytest11"]
    assert declared == {MODULE: MODULE}
    metadata = folder / "stand_in-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in declared.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "diff_tests")])}


def _pytest(folder: Path, environment: dict[str, str], *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def test_others_are_collected_without_torch_or_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "test_clean.py").write_text(
        "import sys\n\ndef test_clean():\n"
        "    assert 'mrv2_diff.pytest_plugin' in sys.modules\n"
        "    loaded = {'torch', 'vllm', 'numpy', 'msgspec', 'mrv2_diff.catalog', 'mrv2'}\n"
        "    assert not loaded & set(sys.modules)\n"
    )
    assert "1 passed" in _pytest(tmp_path, _installed_by_entry_point(tmp_path))


def test_cases_are_collected_without_torch(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\n\ndef pytest_sessionfinish():\n"
        "    assert not {'torch', 'vllm'} & set(sys.modules)\n"
    )
    arguments = ("--mrv2-pair", "v1,mrv2", "--mrv2-area", "sampling", "--collect-only", "-q")
    out = _pytest(tmp_path, _installed_by_entry_point(tmp_path), *arguments)
    assert "mrv2[v1,mrv2]::sampling.top_k" in out


def test_help_has_an_example(tmp_path: Path) -> None:
    out = " ".join(_pytest(tmp_path, _installed_by_entry_point(tmp_path), "--help").split())
    assert "--mrv2-pair v1,mrv2 --mrv2-area sampling -k top_k" in out
